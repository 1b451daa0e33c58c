"""The start-up check: a few steps of the loaded model, in which each kernel runs beside its torch form.

The steps have prompts, decode rows and both together; rows that sample with noise, filters and processing; and an
adapter if the worker serves some. Layers of the same shapes are checked once. A kernel that fails is replaced: first
without programmatic launch, then by another attention or the torch form, with a warning. In exact mode rows must also
have the same bits alone and together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from request_fields.fields import sampling_params
from step_protocol.columns import EMPTY
from step_protocol.messages import NO_RULES, RowOpen, StepBatch, TokenRules
from step_protocol.types import Pooling, PoolingKind, PoolingTask
from worker_svc.engine.backend import Adapter, AdapterPart, BackendUnavailableError
from worker_svc.engine.gpu.attention.paged import Attention, TorchAttention
from worker_svc.engine.gpu.kernels import forms
from worker_svc.engine.gpu.kernels.forms import Forms, Kernel
from worker_svc.engine.gpu.loading import LoadedModel
from worker_svc.engine.gpu.step.pending_step import PendingStep

# Allowed difference per element, as a fraction of the sum of its magnitude and the root mean square of its last
# dimension. A value in the wrong place differs by about 1, roundings of 16-bit numbers by less than 2 of their steps
# (eps). float32 sums of thousands of products differ by 1e-5, products rounded to TF32 by 1e-3.
TOLERANCES = {
    torch.float32: 1e-4,
    torch.float16: 4 * torch.finfo(torch.float16).eps,
    torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps,
    torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).eps,
}
# Kernels that round inner numbers, which may get the other neighbour: adapters and experts, or numbers in fp8.
FP8 = TOLERANCES[torch.float8_e4m3fn]
ROUNDED = {"adapters": 2.0**-5, "norm_rows": 2.0**-5, "scaled_linear": 4e-3, "experts": FP8}
PROMPTS = (7, 1, 40, 600)  # tokens: several tiles and splits; no length is a multiple of a block
MORE = 3  # tokens of each row after its prompt
RANK = 8  # of the adapter
SAMPLING = (
    sampling_params({"temperature": 0.0}),
    sampling_params({"temperature": 0.8, "seed": 2**63 + 5}),
    sampling_params({"temperature": 1.2, "seed": 3, "top_k": 50, "top_p": 0.8, "min_p": 0.01}),
    sampling_params({"temperature": 0.7, "seed": 4, "top_a": 0.1}),
)
PROCESSED = replace(SAMPLING[0], repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=-0.3)
NUM_LOGPROBS = 8
ALIGNMENT = 16  # bytes


class Comparison(Forms):
    """Runs both forms of each kernel that is in Triton, on the same inputs, and goes on with the torch form's results.
    `faults` describes the first difference of each kernel, or its error; "" for those that are right."""

    def __init__(self, tested: Forms) -> None:
        super().__init__(tested.in_torch, tested.may_overlap, tested.has_one_tile)
        self.faults: dict[str, str] = {}
        self._seen: set[str] = set()

    def call(self, kernel: Kernel, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(kernel.launch).bind(*args, **kwargs).arguments
        inputs = ", ".join(f"{name} {_described(value)}" for name, value in given.items())
        if self.is_in_torch(kernel) or self.faults.get(kernel.name):
            return kernel.torch_form(*args, **kwargs)
        if f"{kernel.name} {inputs}" in self._seen:
            return kernel.launch(*args, **kwargs)
        self._seen.add(f"{kernel.name} {inputs}")
        written = {name: _copied(given[name]) for name in kernel.writes}
        fault, found = "", list[torch.Tensor]()
        try:  # copies, because both forms may return the same buffer
            found = [x.clone() for x in _tensors((kernel.launch(**(given | written)), written))]
        except Exception as error:
            fault = f"{kernel.name} failed in the start-up check ({inputs}): {error}"
        with forms.using(forms.TORCH):
            expected = kernel.torch_form(*args, **kwargs)
        if not fault:
            pairs = zip(found, _tensors((expected, [given[name] for name in written])), strict=True)
            differences = (difference(*pair, tolerance_of(kernel.name, pair[1])) for pair in pairs)
            first = next(filter(None, differences), None)
            fault = f"{kernel.name} failed the start-up check ({inputs}): {first}" if first else ""
        self.faults[kernel.name] = fault
        return expected


def tolerance_of(name: str, expected: torch.Tensor) -> float:
    tolerance = TOLERANCES.get(expected.dtype, 0.0)
    return max(tolerance, ROUNDED.get(name, 0.0)) if tolerance else 0.0


def difference(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str | None:
    """Describes the element that is furthest beyond the tolerance. NaN counts as infinitely far, except from NaN."""
    if not expected.numel():
        return None
    found, expected = (x.cpu().double() for x in (found, expected))
    is_same = (found == expected) | (found.isnan() & expected.isnan())
    distance = torch.where(is_same, 0.0, (found - expected).abs()).nan_to_num(torch.inf)
    allowed = torch.zeros_like(distance)
    if tolerance:
        finite = expected.where(expected.isfinite(), 0.0)
        allowed = tolerance * (finite.abs() + finite.square().mean(-1, keepdim=True).sqrt())
    excess = distance - allowed
    if not (excess > 0).any():
        return None
    place = torch.unravel_index(excess.argmax(), excess.shape)
    return (
        f"the largest difference is {float(distance[place]):.3g} at {[int(index) for index in place]} "
        f"(got {float(found[place]):.6g}, expected {float(expected[place]):.6g}, tolerance {float(allowed[place]):.3g})"
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        yield from _tensors([getattr(value, item.name) for item in fields(value)])


def _copied(value: Any) -> Any:
    """As well aligned as the original, because kernels are compiled for alignments."""
    if value is None:
        return None
    if isinstance(value, tuple):
        return tuple(map(_copied, value))
    first = value.data_ptr() % ALIGNMENT // value.element_size()
    copy = value.new_empty(first + value.numel())[first:].view(value.shape)
    return copy.copy_(value)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_described, value))})"
    if is_dataclass(value):
        return f"({', '.join(_described(getattr(value, item.name)) for item in fields(value))})"
    return str(value) if value is None or isinstance(value, str | int | float) else type(value).__name__


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A row of the check."""

    number: int
    prompt_len: int
    blocks: np.ndarray[Any, Any]

    def slots(self, positions: range, block_size: int) -> np.ndarray[Any, Any]:
        places = np.array(positions)
        slots: np.ndarray[Any, Any] = self.blocks[places // block_size] * block_size + places % block_size
        return slots


class StartCheck:
    """The check of a loaded model. `launch` applies and launches a step on a pool of `num_blocks`."""

    def __init__(self, loaded: LoadedModel, launch: Callable[[StepBatch], PendingStep]) -> None:
        setup = self._setup = loaded.setup
        self._loaded = loaded
        self._launch = launch
        self.max_model_len = min(setup.max_model_len, max(PROMPTS) + MORE)
        config = setup.config
        left, self._rows, self.num_blocks = config.max_num_batched_tokens, list[Row](), 0
        for number, length in enumerate(PROMPTS[: config.max_num_seqs]):
            prompt_len = min(length, max(self.max_model_len - MORE, 1), left)
            if prompt_len:
                count = -(-(prompt_len + MORE) // config.block_size)
                blocks = np.arange(self.num_blocks, self.num_blocks + count, dtype=np.uint32)[::-1]
                self._rows.append(Row(number, prompt_len, blocks))
                self.num_blocks, left = self.num_blocks + count, left - prompt_len
        self._attention = loaded.attention
        self._adapter = self._random_adapter()

    def choose(self) -> tuple[Forms, Attention]:
        """The forms and the attention with which the worker serves. Raises BackendUnavailableError for kernels that
        fail, if the settings exclude others."""
        from worker_svc.engine.gpu.start.compilation import compile_first  # it needs Triton

        setup = self._setup
        chosen = Forms(setup.in_torch)
        steps: list[Callable[[], object]] = [partial(self._run, chosen)]
        if setup.is_exact:
            steps.append(partial(self._depends_on_other_rows, chosen))
        compile_first(steps, setup.group)
        faults = self._faults(chosen)
        if faults and setup.config.kernels == "triton":
            raise BackendUnavailableError(f"{next(iter(faults.values()))}; use --kernels auto, or --backend cpu")
        if faults:
            apart = replace(chosen, may_overlap=False)
            remaining = self._faults(apart)
            if len(remaining) < len(faults):
                setup.degradations.note(f"kernels are launched without overlap, because some fail with it: {faults}")
                chosen, faults = apart, remaining
        while faults:
            for name, fault in faults.items():
                if name != "attention":
                    chosen = replace(chosen, in_torch=(*chosen.in_torch, name))
                    setup.degradations.note(f"plain torch replaces {name}, which is slower: {fault}")
                    continue
                self._use(next(self._loaded.other_attentions))
                setup.degradations.note(f"attention {self._attention.name} is used instead: {fault}")
            faults = self._faults(chosen)
        if setup.is_exact and self._depends_on_other_rows(chosen):
            chosen = self._made_independent(replace(chosen, has_one_tile=True))
        return chosen, self._attention

    def _made_independent(self, apart: Forms) -> Forms:
        """One tile for linear layers, if that suffices, else torch."""
        note = self._setup.degradations.note
        if not self._depends_on_other_rows(apart):
            note("linear layers have one tile, which is slower: rows depend on the number of rows")
            return apart
        if self._setup.config.kernels == "triton":
            raise BackendUnavailableError("rows depend on the number of rows; use --determinism best_effort")
        note("plain torch replaces all kernels, which is slower: rows depend on the number of rows")
        self._use(TorchAttention(is_exact=True))
        return forms.TORCH

    def _use(self, attention: Attention) -> None:
        self._attention = attention
        self._loaded.compute.use_attention(attention)

    def _faults(self, tested: Forms) -> dict[str, str]:
        """The kernels that fail on some rank, with their faults."""
        compared = Comparison(tested)
        try:
            self._run(compared)
        except Exception as error:
            if isinstance(self._attention, TorchAttention):
                raise
            # Of what a library does on the host, which is not compared.
            compared.faults["attention"] = f"attention failed in the start-up check: {error}"
            self._step([], {}, self._rows)
        names = sorted(compared.faults)
        flags = torch.tensor([bool(compared.faults[name]) for name in names], dtype=torch.int32)
        failed = self._setup.group.all_reduce_max(flags.to(self._setup.device)).tolist()
        faults = {name: compared.faults[name] for name, has_failed in zip(names, failed, strict=True) if has_failed}
        return {name: fault or f"{name} failed the start-up check of another rank" for name, fault in faults.items()}

    def _run(self, chosen: Forms) -> None:
        """Prompts, a decode step, and a step that mixes both."""
        rows = self._rows
        with forms.using(chosen):
            self._step([self._open(row) for row in rows], {row: range(row.prompt_len) for row in rows})
            if self._loaded.pooling.generates:
                self._step([], {row: range(row.prompt_len, row.prompt_len + 1) for row in rows})
                again, *others = rows
                decoding = {row: range(row.prompt_len + 1, row.prompt_len + 2) for row in others}
                self._step([self._open(again, is_processed=True)], {again: range(again.prompt_len)} | decoding, [again])
            self._step([], {}, rows)

    def _depends_on_other_rows(self, chosen: Forms) -> bool:
        """Whether the logits of a row have other bits if it is computed alone."""
        if not self._loaded.pooling.generates:
            return False
        with forms.using(chosen):
            together = self._logprobs(self._rows)
            is_different = any(not np.array_equal(together[row], self._logprobs([row])[row]) for row in self._rows)
        flag = torch.tensor([is_different], dtype=torch.int32, device=self._setup.device)
        return bool(self._setup.group.all_reduce_max(flag))

    def _logprobs(self, rows: list[Row]) -> dict[Row, np.ndarray[Any, Any]]:
        opens = [replace(self._open(row), logprobs=NUM_LOGPROBS) for row in rows]
        output = self._step(opens, {row: range(row.prompt_len) for row in rows})
        self._step([], {}, rows)
        if output.logprobs is None and not output.errors:
            raise RuntimeError("a step returned no log probabilities: a bug in the engine")
        lens, values = ([], EMPTY) if output.logprobs is None else (output.logprobs.lens, output.logprobs.logprobs)
        found = dict(zip(output.rows.tolist(), np.split(values, np.cumsum(lens)[:-1]), strict=False))
        return {row: found.get(row.number, EMPTY) for row in rows}  # a row with NaN has none

    def _step(self, opens: list[RowOpen], computed: dict[Row, range], closes: list[Row] | None = None) -> Any:
        slots = [row.slots(positions, self._setup.config.block_size) for row, positions in computed.items()]
        batch = StepBatch(
            0,
            rows=np.array([row.number for row in computed], np.uint32),
            query_lens=np.array([len(positions) for positions in computed.values()], np.uint32),
            context_lens=np.array([positions.start for positions in computed.values()], np.uint32),
            sample_mask=np.full(len(computed), self._loaded.pooling.generates),
            slot_mapping=np.concatenate([*slots, np.empty(0)]).astype(np.uint32),
            close_rows=np.array([row.number for row in closes or ()], np.uint32),
            opens=opens,
        )
        if self._adapter is not None and self._loaded.adapters is not None:
            self._loaded.adapters.know(self._adapter)
        return self._launch(batch).result()

    def _open(self, row: Row, *, is_processed: bool = False) -> RowOpen:
        """Row 1 has an adapter. Processing: every penalty, banned ids, and a bad word that the prompt does not end."""
        size = self._setup.whole.vocab_size
        tokens = (np.arange(row.prompt_len) * 7919 % size).astype(np.uint32)
        adapter = b"" if self._adapter is None or row.number != 1 else self._adapter.digest
        ids = np.arange(0, size, max(1, size // 16), dtype=np.uint32)
        rules = TokenRules(
            banned_ids=ids[:1], bias_ids=ids[1:2], biases=np.array([3.3], np.float32), bad_words=(ids[2:3],)
        )
        pooling = None
        if not self._loaded.pooling.generates:
            pooling = Pooling(PoolingTask.VECTOR, PoolingKind.LAST)
        return RowOpen(
            row.number, tokens, row.prompt_len, row.blocks, 0, PROCESSED if is_processed else SAMPLING[row.number], 0,
            banned_ids=ids[-1:], banned_before=1, rules=rules if is_processed else NO_RULES, adapter=adapter,
            pooling=pooling,
        )  # fmt: skip

    def _random_adapter(self) -> Adapter | None:
        """An adapter of the first layer."""
        if self._loaded.adapters is None or len(self._rows) < 2:
            return None
        rank, parts = min(RANK, self._setup.config.max_adapter_rank), []
        generator = torch.Generator().manual_seed(0)
        for module in sorted(set(self._loaded.loader.modules().values())):
            if module.layer == 0:
                a = torch.randn(rank, module.num_inputs, generator=generator) * module.num_inputs**-0.5
                b = torch.randn(module.num_outputs, rank, generator=generator) * rank**-0.5
                parts.append(AdapterPart(module, a.to(self._setup.dtype), b.to(self._setup.dtype)))
        return Adapter(bytes(16), rank, tuple(parts)) if parts else None
