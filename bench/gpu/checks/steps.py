"""Cases of the integer kernels of a step: deltas of row records, and the columns of the forward pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.gpu.checks.case import Case, Outputs, Setup
from bench.gpu.checks.references import prepared
from worker_svc.engine.gpu.kernels import prepare, record

STARTS, ROWS = (0, 1, 4, 5), (3, 0, 2)
PADDING = 6  # tokens beyond the batch
NUM_WORDS, NUM_DELTAS = 700, 300


def deltas_cases(setup: Setup) -> Iterator[Case]:
    """More deltas than one program applies."""
    state = torch.arange(NUM_WORDS, dtype=torch.int32, device=setup.device)
    words = torch.randperm(NUM_WORDS, generator=torch.Generator().manual_seed(0))[:NUM_DELTAS]
    changes = torch.stack((words, words + NUM_WORDS), dim=1).int().to(setup.device)

    def run(first: int, last: int) -> Outputs:
        changed = state.clone()
        record.apply_deltas(changed, changes)
        return {"rows": changed}

    wanted = state.clone()
    record.torch_deltas(wanted, changes)
    expected = {"rows": wanted}
    yield Case("deltas", f"{NUM_DELTAS} of {NUM_WORDS} words", (0, NUM_WORDS), run, expected)


def prepare_cases(setup: Setup) -> Iterator[Case]:
    """A row whose token the host does not know yet, a prompt, and padding."""
    generator, size = torch.Generator().manual_seed(0), setup.block_size
    contexts = [size + 3, size - 1, 0]
    num_blocks = -(-(contexts[0] + 1) // size)
    on_device = setup.records(max(ROWS) + 1, num_blocks)
    on_device.copy_(torch.randint(0, 99, on_device.shape, generator=generator))
    state = on_device.cpu()
    known = torch.randint(0, 99, (STARTS[-1],), generator=generator).tolist()
    known[0] = -1

    def run(first: int, last: int) -> Outputs:
        begin, end = STARTS[first], STARTS[last]
        out = [setup.ints(*[-7] * (end - begin + PADDING)) for _ in range(3)]
        prepare.prepare(
            on_device, setup.ints(last - first), setup.ints(*ROWS[first:last]),
            setup.ints(*(start - begin for start in STARTS[first : last + 1])), setup.ints(*contexts[first:last]),
            setup.ints(*known[begin:end], *[0] * PADDING), (out[0], out[1], out[2]), size,
        )  # fmt: skip
        return {"columns": torch.stack(out, dim=1)}

    tokens = prepared(state, list(ROWS), list(STARTS), contexts, known, size)
    expected = {"columns": torch.tensor(tokens + [(0, 0, -1)] * PADDING)}
    yield Case("prepare", f"rows after {contexts} tokens, block_size {size}", STARTS, run, expected)
