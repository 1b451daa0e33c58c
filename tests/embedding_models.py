"""Small embedding models and rerankers with random weights, saved by sentence-transformers and transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

NUM_WORDS = 200
WORDS = [f"w{i}" for i in range(NUM_WORDS)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "yes", "no"]
MAX_LENGTH = 160
VOCAB_SIZE = len(SPECIAL) + NUM_WORDS
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3,
    "intermediate_size": 88, "max_position_embeddings": MAX_LENGTH, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
OF_TYPE: dict[str, dict[str, Any]] = {
    "bert": {"type_vocab_size": 2},
    "roberta": {"type_vocab_size": 1, "max_position_embeddings": MAX_LENGTH + 1},
    "modernbert": {"local_attention": 16, "global_attn_every_n_layers": 2, "cls_token_id": 2, "sep_token_id": 3},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 16, "num_attention_heads": 4, "max_position_embeddings": 1024},
}
RERANK_TEMPLATE = (
    "{%- for m in messages %}{% if m.role == 'system' %}w1 {{ m.content }} "
    "{% elif m.role == 'query' %}w2 {{ m.content }} "
    "{% elif m.role == 'document' %}w3 {{ m.content }} {% endif %}{% endfor %}[SEP]"
)


def texts(count: int, most: int = 100, seed: int = 0) -> list[str]:
    """Texts of mixed lengths."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, most))) for _ in range(count)]


def make_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of words: [CLS] text [SEP], with token types for pairs, or text [SEP] for a decoder."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    types = 0 if kind == "roberta" else 1
    backend.post_processor = processors.TemplateProcessing(
        single="$A [SEP]" if kind == "qwen3" else "[CLS] $A [SEP]",
        pair=f"$A $B:{types} [SEP]:{types}" if kind == "qwen3" else f"[CLS] $A [SEP] $B:{types} [SEP]:{types}",
        special_tokens=special,
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_max_length=MAX_LENGTH if kind != "qwen3" else 1024,
        model_input_names=["input_ids", "attention_mask", *(["token_type_ids"] if kind == "bert" else [])],
        padding_side="left" if kind == "qwen3" else "right",
    )  # fmt: skip


def make_config(kind: str, **extra: Any) -> Any:
    return AutoConfig.for_model(kind, **{**SIZES, **OF_TYPE[kind], **extra})


def make_embedder(
    folder: Path, kind: str, pooling: str = "mean", *, dense: int = 0, normalizes: bool = True
) -> SentenceTransformer:
    """An embedding model: a transformer, a pooling, and if asked for a dense layer and a normalization."""
    torch.manual_seed(1)
    base = folder.with_name(f"{folder.name}-base")
    AutoModel.from_config(make_config(kind)).eval().save_pretrained(base)
    make_tokenizer(kind).save_pretrained(base)
    parts: list[Any] = [modules.Transformer(str(base)), modules.Pooling(SIZES["hidden_size"], pooling)]
    if dense:
        parts.append(modules.Dense(SIZES["hidden_size"], dense, activation_function=torch.nn.Tanh()))
    if normalizes:
        parts.append(modules.Normalize())
    model = SentenceTransformer(modules=parts, device="cpu", prompts={"query": "w7 w8 ", "document": ""})
    model.save_pretrained(str(folder))
    return SentenceTransformer(str(folder), device="cpu")


def make_cross_encoder(folder: Path, kind: str, **extra: Any) -> None:
    """A reranker with a classification head, or with more labels a classifier."""
    torch.manual_seed(2)
    config = make_config(kind, **{"num_labels": 1, **extra})
    AutoModelForSequenceClassification.from_config(config).eval().save_pretrained(folder)
    make_tokenizer(kind).save_pretrained(folder)


def make_answering_reranker(folder: Path) -> None:
    """A causal reranker: the logit of yes against that of no after a chat template."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder.modules import LogitScore

    torch.manual_seed(3)
    base = folder.with_name(f"{folder.name}-base")
    AutoModelForCausalLM.from_config(make_config("qwen3", tie_word_embeddings=True)).eval().save_pretrained(base)
    tokenizer = make_tokenizer("qwen3")
    tokenizer.chat_template = RERANK_TEMPLATE
    tokenizer.save_pretrained(base)
    transformer = modules.Transformer(str(base), transformer_task="text-generation")
    model = CrossEncoder(modules=[transformer, LogitScore(SPECIAL.index("yes"), SPECIAL.index("no"))], device="cpu")
    model.save_pretrained(str(folder))
