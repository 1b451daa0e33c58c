"""Embeddings of 256 texts of mixed lengths: the CPU engine and sentence-transformers, in one run.

    python bench/embeddings.py                       # both number types, an encoder of MiniLM's shape; a minute
    python bench/embeddings.py --dtypes float32 --rounds 3 --texts 64

Both tokenize the texts, compute with one thread and return normalized means. The figures are CPU time of the process,
the least of several rounds in which both take turns. sentence-transformers sorts the texts by length and pads each
batch of 32; the engine packs whole texts into steps of --tokens tokens. The weights are random.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from request_fields.checks import default_sampling
from step_protocol.columns import F32
from step_protocol.features import PooledRows
from step_protocol.messages import RowOpen, StepBatch
from step_protocol.types import Pooling, PoolingKind, PoolingTask
from worker_svc.engine.config import ComputeDtype, EngineConfig
from worker_svc.engine.model_runner import ModelRunner

HIDDEN, LAYERS, HEADS, INNER, MAX_LENGTH, NUM_WORDS = 384, 6, 12, 1536, 512, 5000
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
MEAN = Pooling(PoolingTask.VECTOR, PoolingKind.MEAN, normalize=True)


def make_texts(count: int) -> list[str]:
    """Texts of 4 to 400 words; most are short, as in a store of passages."""
    rng = random.Random(0)
    lengths = [min(400, int(4 * 100 ** rng.random())) for _ in range(count)]
    return [" ".join(f"w{rng.randrange(NUM_WORDS)}" for _ in range(length)) for length in lengths]


def make_model(folder: Path) -> None:
    """An embedding model of MiniLM's shape with random weights."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(SPECIAL) + NUM_WORDS, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=INNER, max_position_embeddings=MAX_LENGTH,
    )  # fmt: skip
    base = folder / "base"
    BertModel(config).eval().save_pretrained(base)
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(NUM_WORDS))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=MAX_LENGTH,
    ).save_pretrained(base)  # fmt: skip
    parts = [modules.Transformer(str(base)), modules.Pooling(HIDDEN, "mean"), modules.Normalize()]
    SentenceTransformer(modules=parts, device="cpu").save_pretrained(str(folder / "model"))


class Engine:
    """The CPU engine, driven as a scheduler drives it: whole texts in steps of at most `max_tokens` tokens."""

    def __init__(self, folder: Path, dtype: ComputeDtype, max_tokens: int) -> None:
        config = EngineConfig(
            folder, dtype=dtype, threads=1, max_num_seqs=64, max_num_batched_tokens=max_tokens, max_model_len=MAX_LENGTH
        )
        self._runner = ModelRunner(config)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._max_tokens = max_tokens
        self._step_id = 0

    def encode(self, texts: list[str]) -> F32:
        """The embeddings of all texts, in order."""
        ids = [np.array(found.ids, np.uint32) for found in self._tokenizer.encode_batch_fast(texts)]
        found: list[F32] = []
        waiting = list(ids)
        while waiting:
            step: list[npt.NDArray[np.uint32]] = []
            while waiting and len(step) < 64 and sum(map(len, step)) + len(waiting[0]) <= self._max_tokens:
                step.append(waiting.pop(0))
            found.append(self._run(step))
        return np.concatenate(found)

    def _run(self, step: list[npt.NDArray[np.uint32]]) -> F32:
        size, block, opens, slots = self._runner.info.block_size, 0, [], []
        for row, ids in enumerate(step):
            table = np.arange(block, block + -(-len(ids) // size), dtype=np.uint32)
            opens.append(RowOpen(row, ids, len(ids), table, 0, default_sampling({}), 0, pooling=MEAN))
            slots.append(block * size + np.arange(len(ids)))
            block += len(table)
        rows = np.arange(len(step), dtype=np.uint32)
        self._step_id += 1
        batch = StepBatch(
            self._step_id, rows, np.array([len(ids) for ids in step], np.uint32), np.zeros(len(step), np.uint32),
            np.zeros(len(step), np.bool_), np.concatenate(slots).astype(np.uint32), opens=opens,
            close_rows=np.arange(64, dtype=np.uint32),
        )  # fmt: skip
        output = self._runner.execute(batch)
        pooled = output.part(PooledRows)
        if pooled is None or output.errors:
            raise RuntimeError(f"the step failed: {output.errors}")
        return pooled.values.reshape(len(step), HIDDEN)


def measure(calls: dict[str, Callable[[], F32]], rounds: int) -> dict[str, float]:
    """The least CPU time of each call in seconds; the calls take turns."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.process_time()
            call()
            best[name] = min(best[name], time.process_time() - started)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    texts = make_texts(args.texts)
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name))
        folder = Path(name) / "model"
        print(f"{args.texts} texts, {sum(len(text.split()) + 2 for text in texts)} tokens, one thread")
        for dtype in args.dtypes:
            kwargs = {"torch_dtype": getattr(torch, dtype)}
            peer = SentenceTransformer(str(folder), device="cpu", model_kwargs=kwargs)
            engine = Engine(folder, dtype, args.tokens)
            difference = np.abs(engine.encode(texts) - peer.encode(texts).astype(np.float32)).max()
            calls = {"engine": partial(engine.encode, texts), "peer": partial(peer.encode, texts)}
            found = measure(calls, args.rounds)
            ratio = found["peer"] / found["engine"]
            print(
                f"{dtype}: engine {found['engine']:.2f} s, sentence-transformers {found['peer']:.2f} s of CPU time, "
                f"ratio {ratio:.2f}; largest difference {difference:.1e}"
            )


if __name__ == "__main__":
    main()
