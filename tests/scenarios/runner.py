"""Golden transcripts of the scheduler: commands, `----`, what they print.

Each file in this folder is one story. `pytest tests/scenarios --rewrite` writes what the code prints now: read the
diff.

    config NAME=NUMBER ...                            (first of all: SchedulerConfig)
    worker w [blocks=9] [block_size=4] [rows=4] [budget=16] [depth=1] [max_len=100]
    add ID prompt=0..9 [max_tokens=4] [n=1] [priority=0] [stop=7,8] [eos=yes] [output=5,6]
        [takes_over=yes] [tenant=NAME] [timeout=SECONDS]
    schedule | answer [w] [tokens=1,2] | step [N]     (step = schedule and answer everything)
    abort ID | finish ID SAMPLE | remove w | drain w | tick SECONDS
    tables | refs | queue | served | stats | cached

A sampled token is 1000 + its output position unless `answer` says otherwise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.errors import SchedulerError
from scheduler_svc.core.messages import Deltas, WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishReason, SequenceGroup, StopCondition
from step_protocol.messages import StepBatch, StepOutput
from tests.invariants import check_scheduler, queues

EOS = 2


class Transcript:
    """Runs one file's commands against one scheduler."""

    def __init__(self) -> None:
        config = SchedulerConfig(eos_token_ids=frozenset({EOS}), watermark=0.0, aging_s=5.0)
        self.scheduler = Scheduler(config)
        self.in_flight: dict[str, deque[StepBatch]] = {}
        self.now = 0.0
        self.names: dict[int, str] = {}

    def run(self, line: str) -> str:
        name, *words = line.split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        command: Callable[..., str] = getattr(self, f"do_{name}")
        try:
            output = command(*plain, **options)
        except SchedulerError as error:
            output = f"{type(error).__name__}: {error}"
        check_scheduler(self.scheduler)
        return output or "ok"

    # -- commands -----------------------------------------------------------------------------------------------------

    def do_config(self, **numbers: str) -> str:
        self.scheduler = Scheduler(replace(self.scheduler.config, **{k: float(v) for k, v in numbers.items()}))
        return ""

    def do_worker(
        self,
        worker_id: str,
        blocks: str = "9",
        block_size: str = "4",
        rows: str = "4",
        budget: str = "16",
        depth: str = "1",
        max_len: str = "200",
    ) -> str:
        numbers = [int(n) for n in (blocks, block_size, rows, budget, max_len, depth)]
        self.scheduler.add_worker(WorkerCapacity(worker_id, 1, *numbers))
        self.in_flight[worker_id] = deque()
        return ""

    def do_add(
        self,
        request_id: str,
        prompt: str,
        max_tokens: str = "4",
        n: str = "1",
        priority: str = "0",
        stop: str = "",
        eos: str = "no",
        output: str = "",
        takes_over: str = "no",
        tenant: str = "",
        timeout: str = "",
    ) -> str:
        handle = len(self.names)
        group = SequenceGroup(
            request_id,
            _tokens(prompt),
            StopCondition(int(max_tokens), frozenset(_tokens(stop).tolist()), ignore_eos=eos == "no"),
            handle=handle,
            n=int(n),
            priority=int(priority),
            outputs=[_tokens(output)] if output else (),
            takes_over=takes_over == "yes",
            tenant_id=tenant,
            timeout_s=float(timeout) if timeout else None,
        )
        self.names[handle] = request_id
        deltas = self.scheduler.add_group(group, self.now)
        return self._deltas(deltas)

    def do_schedule(self) -> str:
        batches = self.scheduler.schedule(self.now)
        for batch in batches:
            self.in_flight[batch.worker_id].append(batch)
        expired = self._deltas(self.scheduler.take_expired())
        return "\n".join([*map(self._batch, batches), *filter(None, [expired])]) or "nothing to send"

    def do_answer(self, worker_id: str = "w", tokens: str = "") -> str:
        batch = self.in_flight[worker_id].popleft()
        rows = np.concatenate((batch.rows[batch.sample_mask], batch.fork_rows))
        if tokens:
            token_ids = _tokens(tokens)
        else:
            ends = (batch.context_lens + batch.query_lens)[batch.sample_mask]
            parents = {int(r): int(e) for r, e in zip(batch.rows[batch.sample_mask], ends, strict=True)}
            ends = np.concatenate((ends, [parents[int(p)] for p in batch.fork_parents]))
            table = self.scheduler._workers[worker_id].rows
            token_ids = (1000 + ends - table.prompt_len[rows]).astype(np.uint32)
        return self._deltas(
            self.scheduler.update(StepOutput(batch.step_id, rows, token_ids, worker_id=worker_id), self.now)
        )

    def do_step(self, count: str = "1") -> str:
        lines = []
        for _ in range(int(count)):
            lines.append(self.do_schedule())
            lines += [self.do_answer(worker) for worker, batches in self.in_flight.items() if batches]
        return "\n".join(line for line in lines if line)

    def do_abort(self, request_id: str) -> str:
        return self._deltas(self.scheduler.abort_group(request_id, FinishReason.ABORTED))

    def do_finish(self, request_id: str, sample: str) -> str:
        return self._deltas(self.scheduler.finish_sample(request_id, int(sample), FinishReason.STOP))

    def do_remove(self, worker_id: str) -> str:
        del self.in_flight[worker_id]
        self.scheduler.remove_worker(worker_id)
        return ""

    def do_drain(self, worker_id: str) -> str:
        self.scheduler.drain_worker(worker_id)
        return ""

    def do_tick(self, seconds: str) -> str:
        self.now += float(seconds)
        return ""

    def do_tables(self) -> str:
        lines = []
        for name, worker in self.scheduler._workers.items():
            for row in worker.rows.active().tolist():
                seq = worker.rows.sequence(row)
                label = f"{seq.group.request_id}.{seq.sample_index}"
                blocks = worker.rows.held_blocks(row).tolist()
                stage = "prefill" if worker.rows.todo_of(row) > 1 else "decode"
                lines.append(f"{name} {label} {seq.status.value} {stage} {blocks}")
        return "\n".join(lines) or "no rows"

    def do_refs(self, worker_id: str = "w") -> str:
        refs = self.scheduler._workers[worker_id].pool.refs
        return " ".join(f"{block}:{refs[block]}" for block in np.flatnonzero(refs)) or "none"

    def do_queue(self) -> str:
        waiting = [entry.seq for entry in self.scheduler._waiting]
        return (
            "\n".join(f"{s.group.request_id}.{s.sample_index} output={s.data.output.tolist()}" for s in waiting)
            or "empty"
        )

    def do_served(self) -> str:
        share = self.scheduler._share
        return " ".join(f"{tenant or '(none)'}={share.served[slot]}" for tenant, slot in share._slots.items())

    def do_cached(self, worker_id: str = "w") -> str:
        pool = self.scheduler._workers[worker_id].pool
        return "cached, next to go first: {}; hit before: {}; empty: {}".format(*queues(pool))

    def do_stats(self) -> str:
        s = self.scheduler.stats()
        num_requeued = s.counts.num_preemptions + s.counts.migrations.total()
        lines = [f"waiting={s.num_waiting} running={s.num_running} preemptions={num_requeued}"]
        lines += [
            f"{w.worker_id} free={w.blocks_free} cached={w.blocks_cached} used={w.blocks_used}" for w in s.workers
        ]
        return "\n".join(lines)

    # -- printing -----------------------------------------------------------------------------------------------------

    def _batch(self, batch: StepBatch) -> str:
        table = self.scheduler._workers[batch.worker_id].rows
        lines = [f"{batch.worker_id} step {batch.step_id}"]
        lines += [f"  close row {row}" for row in batch.close_rows]
        for o in batch.opens:
            fork = "" if o.fork_of_row is None else f" fork of row {o.fork_of_row}"
            name = f"{o.group.request_id}.{o.sample_index}"
            lines.append(
                f"  open row {o.row} {name} table={o.block_table.tolist()} computed={o.num_computed_tokens}{fork}"
            )
        for row, index, block in zip(batch.table_rows, batch.table_indices, batch.table_blocks, strict=True):
            lines.append(f"  row {row} table[{index}]={block}")
        lines += [f"  copy {a} -> {b}" for a, b in zip(batch.copy_src, batch.copy_dst, strict=True)]
        if len(batch.commit_blocks):
            lines.append(f"  commit {batch.commit_blocks.tolist()}")
        start = 0
        for row, count, context, samples in zip(
            batch.rows, batch.query_lens, batch.context_lens, batch.sample_mask, strict=True
        ):
            seq = table.sequence(int(row))
            slots = batch.slot_mapping[start : start + count].tolist()
            start += count
            mark = " sample" if samples else ""
            name = f"{seq.group.request_id}.{seq.sample_index}"
            lines.append(f"  row {row} {name} computes {count} at {context} slots={slots}{mark}")
        lines += [f"  row {a} samples from row {b}" for a, b in zip(batch.fork_rows, batch.fork_parents, strict=True)]
        return "\n".join(lines)

    def _deltas(self, deltas: Deltas) -> str:
        lines = []
        for handle, sample, offset, token in zip(
            deltas.handles, deltas.sample_indices, deltas.offsets, deltas.token_ids, strict=True
        ):
            lines.append(f"> {self.names[int(handle)]}.{sample} [{offset}] {token}")
        for f in deltas.finished:
            stop = "" if f.stop_token_id is None else f" stop_id={f.stop_token_id}"
            lines.append(
                f"> {f.group.request_id}.{f.sample_index} finished {f.reason.value}{stop} output={f.num_output_tokens} "
                f"cached={f.num_cached_tokens} recomputed={f.num_recomputed_tokens} preemptions={f.num_preemptions}"
            )
        return "\n".join(lines)


def _tokens(text: str) -> np.ndarray:
    """`0..9,7` -> an array of ids."""
    ids: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("..")
        ids += range(int(first), int(last or first) + 1)
    return np.array(ids, dtype=np.uint32)


def replay(path: Path) -> str:
    """The file with every output replaced by what the code prints now."""
    transcript, out = Transcript(), []
    for block in path.read_text().strip().split("\n\n"):
        command = block.split("\n----", 1)[0]
        lines = [line for line in command.split("\n") if line and not line.startswith("#")]
        printed = "\n".join(transcript.run(line) for line in lines)
        out.append(f"{command}\n----\n{printed}" if lines else command)
    return "\n\n".join(out) + "\n"
