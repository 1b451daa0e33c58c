"""Checkpoints with random weights for several architectures, and their reference outputs from transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

from tests.unit.engine.models import load_reference

VOCAB_SIZE = 512
MAX_MODEL_LEN = 1024
EOS_ID = 2


@dataclass(frozen=True)
class Shape:
    """The architecture and sizes of one checkpoint."""

    model_type: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int = 64
    is_tied: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        tied = "tied" if self.is_tied else "untied"
        return f"{self.model_type}-{self.num_heads}x{self.num_kv_heads}-d{self.head_dim}-{tied}"


SHAPES = (
    Shape("qwen3", 4, 4, 32, is_tied=True),  # 1:1, head_dim is not hidden / heads
    Shape("qwen3", 8, 1, 16),  # 8:1, head_dim is not hidden / heads
    Shape("qwen2", 8, 2, 8, is_tied=True),  # 4:1; Qwen2 has biases on q, k and v
    Shape("qwen2", 4, 4, 16),
    Shape("mistral", 8, 2, 32, extra={"sliding_window": 90}),
    Shape(
        "gemma2",
        4,
        2,
        16,
        is_tied=True,
        extra={"sliding_window": 40, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    ),
)
DEFAULT_SHAPE = SHAPES[0]


def make_checkpoint(
    folder: Path, shape: Shape = DEFAULT_SHAPE, *, seed: int = 0, max_model_len: int = MAX_MODEL_LEN
) -> Path:
    """Write a Hugging Face folder of float32 weights that are spread enough to keep the argmax away from ties."""
    folder.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.for_model(
        shape.model_type,
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden_size,
        intermediate_size=2 * shape.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max_model_len,
        tie_word_embeddings=shape.is_tied,
        eos_token_id=EOS_ID,
        bos_token_id=None,
        pad_token_id=None,
        **shape.extra,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def randomize(model: torch.nn.Module) -> None:
    """Fill every tensor so that ignoring it changes the output: norms are not 1, biases are not 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
            else:
                parameter.normal_(0, 0.15)


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog, again and again"] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": (
            "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


class Reference:
    """The same checkpoint in transformers, one sequence at a time, in float32."""

    def __init__(self, folder: Path) -> None:
        self._model = load_reference(folder)

    def greedy(self, prompt: list[int], max_tokens: int, **settings: Any) -> list[int]:
        """The tokens of `generate` with these settings. Without `eos_token_id`, it does not stop early."""
        ends = {"min_new_tokens": max_tokens, "eos_token_id": None}
        ids = torch.tensor([prompt])
        with torch.no_grad():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                pad_token_id=0,
                do_sample=False,
                **ends | settings,
            )
        return output[0, len(prompt) :].tolist()

    def greedy_after(self, prompt: list[int], output: list[int]) -> list[int]:
        """The greedy token after each prefix of `output`. Equal to `output` exactly if `generate` returns `output`."""
        with torch.no_grad():
            logits = self._model(torch.tensor([prompt + output])).logits[0]
        return logits[len(prompt) - 1 : -1].argmax(-1).tolist()

    def embed(self, token_ids: list[int]) -> torch.Tensor:
        """The input embeddings [tokens, hidden_size]."""
        return self._model.get_input_embeddings()(torch.tensor(token_ids)).detach()

    def greedy_after_embeddings(self, prompt: torch.Tensor, output: list[int]) -> list[int]:
        """`greedy_after` for a prompt of input embeddings."""
        inputs = torch.cat((prompt, self.embed(output))).unsqueeze(0)
        with torch.no_grad():
            logits = self._model(inputs_embeds=inputs).logits[0]
        return logits[len(prompt) - 1 : -1].argmax(-1).tolist()
