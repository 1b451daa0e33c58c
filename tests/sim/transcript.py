"""The trace of a cluster as text: one short line per event."""

from __future__ import annotations

from typing import Any

import numpy as np

from scheduler_svc.core.messages import RowAssignment
from scheduler_svc.core.sequence import SequenceGroup
from step_protocol.messages import StepBatch, StepOutput


def describe(event: tuple[Any, ...]) -> str:
    """One event of `Cluster.trace`."""
    kind, *rest = event
    match rest:
        case [StepBatch() as batch]:
            return f"send    {_batch(batch)}"
        case [StepOutput() as output]:
            return f"answer  {_output(output)}"
        case [SequenceGroup() as group]:
            return f"submit  {_group(group)}"
    return f"{kind:7} " + " ".join(map(str, rest))


def _group(group: SequenceGroup) -> str:
    stop = group.stop
    words = [f"{group.request_id} prompt {group.prompt.tolist()} max_tokens {stop.max_tokens} n {group.n}"]
    words += [f"priority {group.priority}"] * (group.priority != 0)
    words += [f"stop {sorted(stop.stop_token_ids)}"] * bool(stop.stop_token_ids)
    words += ["ignore_eos"] * stop.ignore_eos + [f"root {group.root_key!r}"] * bool(group.root_key)
    words += [f"outputs {[output.tolist() for output in group.outputs]}"] * any(map(len, group.outputs))
    words += [f"finished {sorted(group.finished_samples)}"] * bool(group.finished_samples)
    return ", ".join(words)


def _output(output: StepOutput) -> str:
    lens = np.ones_like(output.rows) if output.token_lens is None else output.token_lens
    parts = np.split(output.token_ids, np.cumsum(lens)[:-1])
    tokens = dict(zip(output.rows.tolist(), (part.tolist() for part in parts), strict=False))
    failed = [failure.row for failure in output.errors]
    return f"{output.worker_id} step {output.step_id} tokens {tokens}" + f" failed {failed}" * bool(failed)


def _batch(b: StepBatch) -> str:
    parts = [f"{b.worker_id} step {b.step_id}"]
    parts += [f"close {b.close_rows.tolist()}"] * bool(len(b.close_rows))
    parts += [_open(opened) for opened in b.opens]
    changes = list(zip(b.table_rows.tolist(), b.table_indices.tolist(), b.table_blocks.tolist(), strict=True))
    parts += [f"table[row, index] = {changes}"] * bool(changes)
    parts += [f"copy {list(zip(b.copy_src.tolist(), b.copy_dst.tolist(), strict=True))}"] * bool(len(b.copy_src))
    parts += [f"commit {b.commit_blocks.tolist()}"] * bool(len(b.commit_blocks))
    rows = zip(b.rows.tolist(), b.context_lens.tolist(), b.query_lens.tolist(), b.sample_mask.tolist(), strict=True)
    parts += ["rows " + " ".join(f"{row}:{start}+{count}{'*' * is_last}" for row, start, count, is_last in rows)]
    parts += [] if b.max_query_lens is None else [f"reserved {b.max_query_lens.tolist()}"]
    forks = list(zip(b.fork_rows.tolist(), b.fork_parents.tolist(), strict=True))
    parts += [f"sample forks {forks}"] * bool(forks)
    return "; ".join(parts)


def _open(opened: RowAssignment) -> str:
    source = f"{len(opened.token_ids)} tokens" if opened.fork_of_row is None else f"fork of row {opened.fork_of_row}"
    name = f"{opened.group.request_id}.{opened.sample_index}"
    return f"open {opened.row} = {name} ({source}, {opened.num_computed_tokens} computed) {opened.block_table.tolist()}"
