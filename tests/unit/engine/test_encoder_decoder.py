"""Encoder-decoder models of the engine: logits equal those of transformers, whatever else runs in a step."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForSeq2SeqLM

from prefix_index.hashing import content_ids, input_digest
from step_protocol.messages import RowOpen, StepBatch, StepOutput
from step_protocol.types import CarriedInput, EncoderInput
from tests.processes.encoder_models import MAX_LEN, TEXT_SHAPES, make_speech_checkpoint, make_text_checkpoint, tone
from tests.processes.models import VOCAB_SIZE
from tests.unit.engine.driver import GREEDY
from worker_svc.engine.checkpoint.families import ENCODER_DECODER_NAMES, architecture_of
from worker_svc.engine.checkpoint.model_folder import CheckpointError
from worker_svc.engine.config import EngineConfig
from worker_svc.engine.encoder_decoder.config import parse_encoder_decoder
from worker_svc.engine.engines import load_runner

BLOCK_SIZE = 16
NUM_BLOCKS = 64
Chunks = tuple[int, ...]


class Steps:
    """Runs steps of one engine with rows of an encoder input and a decoder prompt, and keeps all logits."""

    def __init__(self, folder: Path, backend: str, threads: int = 1, **settings: Any) -> None:
        config = EngineConfig(
            folder, dtype="float32", block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_num_seqs=4,
            max_num_batched_tokens=2 * MAX_LEN, backend=backend, threads=threads, kernels="torch", **settings,
        )  # fmt: skip
        self.runner: Any = load_runner(config, lambda _: None)
        self.logits: list[torch.Tensor] = []
        self._record()
        self._step_id = 0
        self._next_block = 0

    def _record(self) -> None:
        model = self.runner._model
        forward = model.forward

        def recorded(*args: Any) -> torch.Tensor:
            logits = forward(*args)
            self.logits.append(logits.clone())
            return logits

        model.forward = recorded  # type: ignore[method-assign]

    def open(self, row: int, given: list[int], decoder: list[int], **options: Any) -> RowOpen:
        padding = [0] * (-len(given) % BLOCK_SIZE)
        tokens = np.array([*given, *padding, *decoder], np.uint32)
        count = -(-(len(tokens) + 32) // BLOCK_SIZE)
        blocks = np.arange(self._next_block, self._next_block + count, dtype=np.uint32)[::-1]
        self._next_block += count
        fields = {"encoder": EncoderInput(len(given))} | options
        return RowOpen(row, tokens, len(tokens), blocks, 0, GREEDY, 0, **fields)

    def run(self, opens: list[RowOpen], chunks: dict[int, tuple[int, int, bool]]) -> StepOutput:
        """A step in which each row computes positions from `start` to `end`, and may sample."""
        self._step_id += 1
        tables = {item.row: item.block_table for item in opens} | getattr(self, "_tables", {})
        self._tables = tables
        slots = [
            int(tables[row][position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
            for row, (start, end, _) in chunks.items()
            for position in range(start, end)
        ]
        spans = list(chunks.values())
        return self.runner.execute(
            StepBatch(
                self._step_id,
                np.array(list(chunks), np.uint32),
                np.array([end - start for start, end, _ in spans], np.uint32),
                np.array([start for start, _, _ in spans], np.uint32),
                np.array([samples for _, _, samples in spans], np.bool_),
                np.array(slots, np.uint32),
                opens=opens,
            )
        )


def inputs(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def reference_logits(folder: Path, encoder: list[int], decoder: list[int]) -> torch.Tensor:
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        found = model(
            input_ids=torch.tensor([encoder]),
            attention_mask=torch.ones(1, len(encoder)),
            decoder_input_ids=torch.tensor([decoder]),
        )
    logits: torch.Tensor = found.logits[0, -1]
    return logits


def last_logits(steps: Steps, encoder: list[int], decoder: list[int], chunks: Chunks, row: int = 0) -> torch.Tensor:
    """Logits after the decoder's prompt, computed in chunks of these sizes."""
    end = len(encoder) + -len(encoder) % BLOCK_SIZE
    output = steps.run([steps.open(row, encoder, decoder)], {row: (0, end, False)})
    assert not output.errors
    for size in chunks:
        start, end = end, end + size
        output = steps.run([], {row: (start, end, end == start + size and size == chunks[-1])})
        assert not output.errors
    return steps.logits[-1][-1]


@pytest.mark.parametrize("name", ENCODER_DECODER_NAMES)
def test_backends_for_decoders_refuse_the_model_by_name(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name} has an encoder and cross-attention.*use --backend cpu"):
        architecture_of({"architectures": [name]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder_attention_heads": 2}, "encoder_attention_heads: 2 differs from decoder_attention_heads 4"),
        ({"activation_function": "tanh"}, "activation: 'tanh' is not supported; use one of relu, "),
        ({"decoder_layers": 0}, "decoder_layers: config.json must hold a positive integer, found 0"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized encoder-decoder checkpoints are not supported"),
    ],
)
def test_configurations_that_are_not_supported_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = json.loads((make_text_checkpoint(tmp_path, TEXT_SHAPES[2]) / "config.json").read_text())
    with pytest.raises(CheckpointError, match=message):
        parse_encoder_decoder(config | changes)


def test_rules_of_outputs_are_those_of_transformers(tmp_path: Path, rewrite_config: Callable[..., None]) -> None:
    """generation_config.json replaces what config.json says about outputs."""
    folder = make_text_checkpoint(tmp_path, TEXT_SHAPES[3])
    rewrite_config(folder, forced_eos_token_id=2, forced_bos_token_id=6, decoder_start_token_id=9)
    path = folder / "generation_config.json"
    without_start = json.loads(path.read_text()) | {"decoder_start_token_id": None, "bos_token_id": 5}
    for generation in (json.loads(path.read_text()), without_start, None):
        path.unlink() if generation is None else path.write_text(json.dumps(generation))
        found = Steps(folder, "cpu").runner.info.encoder
        expected = AutoModelForSeq2SeqLM.from_pretrained(folder).generation_config
        start = (
            expected.decoder_start_token_id if expected.decoder_start_token_id is not None else expected.bos_token_id
        )
        assert found is not None
        assert found.decoder_start_ids == (start,)
        assert found.forced_eos_token_id == expected.forced_eos_token_id
        assert found.forced_bos_token_id == expected.forced_bos_token_id


def test_a_checkpoint_with_other_tensors_is_refused(tmp_path: Path) -> None:
    folder = make_text_checkpoint(tmp_path, TEXT_SHAPES[2])
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    shared = tensors["model.shared.weight"]
    for name, tensor, message in (
        ("model.encoder.embed_tokens.weight", shared + 1, "have different embeddings are not supported"),
        ("model.encoder.other.weight", shared.clone(), "1 tensors are unexpected, first model.encoder.other.weight"),
    ):
        safetensors.torch.save_file(tensors | {name: tensor}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            Steps(folder, "cpu")


ODD_HEADS = replace(TEXT_SHAPES[2], name="bart-odd-heads", extra=TEXT_SHAPES[2].extra | {"d_model": 60})


@pytest.mark.parametrize("backend", ["cpu", "reference", "cuda"])
@pytest.mark.parametrize("shape", [*TEXT_SHAPES, ODD_HEADS], ids=lambda shape: shape.name)
def test_logits_equal_transformers(shape: Any, backend: str, tmp_path: Path) -> None:
    folder = make_text_checkpoint(tmp_path, shape)
    encoder, decoder = inputs(1, 45, 23)
    found = last_logits(Steps(folder, backend), encoder, decoder, (3, 1, 19))
    torch.testing.assert_close(found, reference_logits(folder, encoder, decoder), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("shape", TEXT_SHAPES[1:3], ids=lambda shape: shape.name)
def test_bits_depend_neither_on_the_batch_nor_on_chunks_nor_on_threads(
    shape: Any, backend: str, tmp_path: Path
) -> None:
    folder = make_text_checkpoint(tmp_path, shape)
    encoder, decoder, other, more = inputs(2, 70, 20, 130, 9)
    alone = last_logits(Steps(folder, backend), encoder, decoder, (20,))
    threads = 2 if backend == "cpu" else 1  # torch on a CPU stands for a device
    in_chunks = last_logits(Steps(folder, backend, threads=threads), encoder, decoder, (1, 7, 12))
    steps = Steps(folder, backend)
    opens = [steps.open(0, encoder, decoder), steps.open(2, other, more), steps.open(1, other[:5], more)]
    steps.run(opens, {2: (0, 144, False), 0: (0, 80, False), 1: (0, 16, False)})
    steps.run([], {1: (16, 25, True), 0: (80, 100, True), 2: (144, 153, True)})
    assert torch.equal(alone, in_chunks)
    assert torch.equal(alone, steps.logits[-1][1])
    assert steps.runner._model.num_encoder_runs == 3


def test_a_row_reads_an_encoder_input_that_another_row_computes_in_the_same_step(tmp_path: Path) -> None:
    folder = make_text_checkpoint(tmp_path, TEXT_SHAPES[2])
    encoder, decoder = inputs(3, 40, 6)
    expected = last_logits(Steps(folder, "cpu"), encoder, decoder, (6,))
    steps = Steps(folder, "cpu")
    first = steps.open(0, encoder, decoder)
    second = steps.open(1, encoder, decoder)
    shared = np.concatenate((first.block_table[:3], second.block_table[3:]))
    opens = [first, RowOpen(1, second.token_ids, second.prompt_len, shared, 48, GREEDY, 0, encoder=second.encoder)]
    steps.run(opens, {1: (48, 54, True), 0: (0, 48, False)})
    assert torch.equal(steps.logits[-1][-1], expected)
    assert steps.runner._model.num_encoder_runs == 1


def test_rows_with_a_bad_encoder_input_fail_alone(tmp_path: Path) -> None:
    steps = Steps(make_text_checkpoint(tmp_path, TEXT_SHAPES[0]), "cpu")
    encoder, decoder = inputs(4, 20, 3)
    good = steps.open(0, encoder, decoder)
    bad = steps.open(1, encoder, decoder, encoder=None)
    long = steps.open(2, encoder, decoder, encoder=EncoderInput(MAX_LEN + 1))
    banned = steps.open(3, encoder, decoder, encoder=EncoderInput(20, banned_ids=np.array([VOCAB_SIZE], np.uint32)))
    output = steps.run([good, bad, long, banned], {0: (0, 32, False)})
    assert {error.row: error.message for error in output.errors} == {
        1: "the model has an encoder, but the row has no encoder input",
        2: f"encoder.num_tokens is {MAX_LEN + 1}, expected 1 to {MAX_LEN}",
        3: "encoder has more than 1024 ids in one rule, or an id beyond the vocabulary",
    }
    assert not steps.run([], {0: (32, 35, True)}).errors


@pytest.mark.parametrize("chunk", [(0, 16), (0, 33)])
def test_a_chunk_with_a_part_of_the_encoder_positions_fails(chunk: tuple[int, int], tmp_path: Path) -> None:
    steps = Steps(make_text_checkpoint(tmp_path, TEXT_SHAPES[0]), "cpu")
    output = steps.run([steps.open(0, *inputs(5, 20, 3))], {0: (*chunk, False)})
    assert [error.message for error in output.errors] == [
        f"positions 0 to {chunk[1] - 1} are no chunk of an encoder or a decoder"
    ]


def test_chunks_that_no_scheduler_sends_fail_their_row(tmp_path: Path) -> None:
    steps = Steps(make_text_checkpoint(tmp_path, TEXT_SHAPES[0]), "cpu")
    steps.run([steps.open(0, *inputs(5, 20, MAX_LEN + 1))], {0: (0, 32, False)})
    for chunk in ((0, 32), (32, 32 + MAX_LEN + 1)):
        (error,) = steps.run([], {0: (*chunk, False)}).errors
        assert error.message == f"positions {chunk[0]} to {chunk[1] - 1} are no chunk of an encoder or a decoder"
    assert not steps.run([], {0: (32, 32 + MAX_LEN, False)}).errors


def spoken() -> tuple[list[int], CarriedInput]:
    """Half a second of audio, and the ids of its positions."""
    samples = tone(0, 0.5).tobytes()
    digest = input_digest("audio", "float32", (8000,), samples)
    ids = np.frombuffer(content_ids(digest, 100), np.uint32).tolist()
    return ids, CarriedInput("audio", digest, 0, 100, "float32", (8000,), samples)


@pytest.mark.parametrize("change", ["no audio", "other length", "fork without audio"])
def test_rows_of_speech_without_a_whole_input_are_refused(change: str, tmp_path: Path) -> None:
    steps = Steps(make_speech_checkpoint(tmp_path), "cpu")
    ids, carried = spoken()
    good = steps.open(0, ids, [3, 20], inputs=(carried,))
    assert not steps.run([good], {0: (0, 112, False)}).errors
    assert not steps.run([], {0: (112, 114, True)}).errors
    bad = {
        "no audio": steps.open(1, ids, [3]),
        "other length": steps.open(1, ids, [3], inputs=(carried,), encoder=EncoderInput(99)),
        "fork without audio": RowOpen(
            1, np.empty(0, np.uint32), 113, good.block_table, 0, GREEDY, 0, fork_of_row=0, encoder=good.encoder
        ),
    }[change]
    (error,) = steps.run([bad], {1: (0, 112, False)}).errors
    assert error.row == 1


def test_forced_and_banned_ids_apply_at_their_positions(tmp_path: Path) -> None:
    steps = Steps(make_text_checkpoint(tmp_path, TEXT_SHAPES[0]), "cpu")
    encoder, decoder = inputs(6, 5, 1)
    likely = int(last_logits(Steps(tmp_path, "cpu"), encoder, decoder, (1,)).argmax())
    banned = np.array([likely], np.uint32)
    for row, rules in enumerate(
        (EncoderInput(5, allowed={0: np.array([77], np.uint32)}), EncoderInput(5, first_banned_ids=banned))
    ):
        steps.run([steps.open(row, encoder, decoder, encoder=rules)], {row: (0, 16, False)})
        (token,) = steps.run([], {row: (16, 17, True)}).token_ids.tolist()
        assert token == 77 if row == 0 else token != likely
