"""Small tokenizers of every kind found in checkpoints, built without a download."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "Hello world, how are you today? The quick brown fox jumps over the lazy dog.",
    "def stop(): return 'END' # a comment\n    indented = True",
    "naïve café über straße señor",
    "你好世界 こんにちは 안녕하세요",
    "emoji 😀 👩‍👩‍👧 🇩🇪 and e\u0301 combining",
] * 4


def byte_level() -> Tokenizer:
    """Like GPT-2, Llama 3 and Qwen: bytes, with two special tokens and an ordinary added token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False)])
    return tokenizer


def _sentencepiece_vocab() -> dict[str, int]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    tokens += [chr(code) for code in range(33, 127)]
    tokens += ["▁H", "▁He", "ll", "▁w", "or", "▁▁", "é", "▁é", "你", "EN", "▁EN"]
    return {token: i for i, token in enumerate(dict.fromkeys(tokens))}


def byte_fallback() -> Tokenizer:
    """Like Llama 2 and Mistral: metaspace pieces, unknown characters as byte tokens."""
    merges = [("▁", "H"), ("▁H", "e"), ("l", "l"), ("▁", "w"), ("o", "r"), ("▁", "▁"), ("E", "N"), ("▁", "EN")]
    tokenizer = Tokenizer(
        models.BPE(_sentencepiece_vocab(), merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def gemma_style() -> Tokenizer:
    """Byte fallback without the strip of the first space."""
    tokenizer = byte_fallback()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def metaspace() -> Tokenizer:
    """Like T5: the metaspace decoder alone."""
    tokenizer = Tokenizer(models.BPE(_sentencepiece_vocab(), [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def word_piece() -> Tokenizer:
    """A decoder that only the generic window supports."""
    words = ["[UNK]", "[CLS]", "hello", "world", "##ing", "##s", ",", "play", "do", "n't", "你"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[CLS]"])
    return tokenizer


def no_decoder() -> Tokenizer:
    """Words joined with spaces."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["a", "b", "<unk>"])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


KINDS = {kind.__name__: kind for kind in (byte_level, byte_fallback, gemma_style, metaspace, word_piece, no_decoder)}


def bundle_files(tokenizer: Tokenizer, config: dict[str, Any] | None = None, **texts: str) -> dict[str, bytes]:
    """The files of a model folder. `chat_template` and `generation_config` are the contents of the files so named."""
    files = {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config or {}).encode()}
    names = {"chat_template": "chat_template.jinja", "generation_config": "generation_config.json"}
    files.update({names[key]: text.encode() for key, text in texts.items()})
    return files
