"""A worker that executes the core's StepBatch messages with a symbolic KV cache and trusts none of them.

Every slot of its pool holds the digest of the token prefix that produced it. Before a row samples, every slot of every
open row's table is read back and compared with the digests of the row's own tokens, so a wrong slot, a stale block, a
bad prefix hit and a block freed early are all one mismatch. Beyond that it checks what the protocol promises:

    steps       ids without gaps, at most pipeline_depth messages unanswered, budgets and row limits
    rows        opened once, closed once, context lengths that continue where the row ended
    tables      appends at the end, replacements only by copy-on-write, new blocks that no other row names
    writes      slots follow from the table, no slot twice, never into a shared or a committed block
    commits     full blocks, written by acknowledged steps, with the digest of their whole chain
    forks       off a prompt that completes in this very step
    inputs      a row has each input whose positions it computes, and no other
    beams       continue a beam of their request by one of its candidates; they share its blocks or copy the last one
    pooled      rows start from position 0 if they pool all states; their blocks are never committed
    snapshots   of rows and positions that a step computes; a row starts from one of exactly its computed tokens
    states      follow from the state before and the tokens of a step; a row samples from that of its own tokens
    windows     a row holds the blocks that its next token attends to; blocks before them may get new content
    drafts      a row that speculates continues where the worker left it, at most at the stated position: that one less
                what unanswered steps have rejected. Some drafts are right; the rest are random. A request with an old
                answer has the drafts that a worker takes from it

Everything per token is a numpy column; Python loops run over rows that open or blocks that fill only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
from xxhash import xxh3_128_digest

from prefix_index.hashing import FIRST_CONTENT_ID
from scheduler_svc.core.features.adapters import adapter_of
from scheduler_svc.core.features.pooled import PooledRequest
from scheduler_svc.core.messages import CachedBlock, RowAssignment, WorkerCapacity
from scheduler_svc.core.sequence import SequenceGroup
from step_protocol.columns import EMPTY
from step_protocol.features import BeamCandidates, BeamMoves, PooledRows, TakenSnapshots
from step_protocol.messages import StepBatch, StepOutput
from step_protocol.types import RowError
from tests.sim import symbolic_model
from tests.sim.inputs import contents_in, with_contents
from tests.sim.symbolic_groups import SymbolicGroup
from tests.sim.violation import POISON, Violation
from worker_svc.engine.speculation.old_answers import OldAnswer


@dataclass(slots=True)
class Sent:
    """A step on its way, and what the scheduler knew when it was planned."""

    batch: StepBatch
    num_acked: int  # last step whose answer the scheduler had
    ends_message: bool = True
    output: StepOutput | None = None


class Chains:
    """The block digests as the design documents them, computed from tokens alone and remembered by prefix digest."""

    def __init__(self, root_salt: bytes, block_size: int) -> None:
        self.root_salt, self.block_size = root_salt, block_size
        self.by_prefix: dict[int, bytes] = {}
        self.parent: dict[bytes, bytes] = {}

    def root(self, root_key: bytes) -> bytes:
        head = f"{self.block_size}|{len(self.root_salt)}|{len(root_key)}|".encode()
        return xxh3_128_digest(head + self.root_salt + root_key)

    def change_root(self, root_salt: bytes) -> None:
        """All chains start from another root."""
        self.root_salt = root_salt
        self.by_prefix.clear()
        self.parent.clear()

    def of_block(self, tokens: np.ndarray, digests: np.ndarray, index: int, group: SequenceGroup) -> bytes:
        """Digest of block `index` of a sequence with these tokens and prefix digests."""
        end = (index + 1) * self.block_size
        prefix = int(digests[end - 1])
        known = self.by_prefix.get(prefix)
        if known is not None:
            return known
        parent = self.of_block(tokens, digests, index - 1, group) if index else self.root(group.root_key)
        content = b"".join(int(token).to_bytes(4, "little") for token in tokens[end - self.block_size : end])
        keys = b"".join(item.digest for item in contents_in(group) if item.start // self.block_size == index)
        digest = xxh3_128_digest(parent + content + keys)
        self.by_prefix[prefix] = digest
        self.parent[digest] = parent
        return digest


NAN_SEED = 1 << 32  # a request with this seed has NaN logits


class SymbolicWorker:
    """One worker process in miniature. `send` queues a step, `answer` gives the oldest answer."""

    def __init__(
        self, capacity: WorkerCapacity, chains: Chains, vocab_size: int, *, next_step_id: int = 1, is_lazy: bool = False
    ) -> None:
        self.capacity, self.chains, self.vocab_size = capacity, chains, vocab_size
        self.is_lazy = is_lazy  # execute a step only when its answer is read, like a slow worker
        self.queue: deque[Sent] = deque()
        self.num_acked = next_step_id - 1
        self.is_draining = False
        self.fail_next: str | None = (
            None  # "nan" keeps the row's KV, "lost" leaves garbage, "silent" reports nothing either
        )
        self.failed_requests: set[str] = set()
        self.resident: set[bytes] = set()  # adapters that rows may use
        self.old_answers: dict[str, np.ndarray] = {}  # by request id
        self.draft_rate = 0.0  # fraction of the answers' rows that ask for drafts, and of right drafts
        self.num_drafted = self.num_accepted = 0
        bs, rows = capacity.block_size, capacity.max_num_seqs
        width = -(-capacity.max_model_len // bs)
        self.kv = np.zeros(capacity.num_blocks * bs, dtype=np.uint64)
        self.kv_version = np.zeros(capacity.num_blocks * bs, dtype=np.int64)  # version that wrote the slot
        self.version = 0  # version of its weights
        self.kv_token = np.zeros(capacity.num_blocks * bs, dtype=np.uint32)
        self.fill_step = np.zeros(capacity.num_blocks, dtype=np.int64)  # last step that wrote into the block
        self.content: list[bytes | None] = [None] * capacity.num_blocks  # chain digest of what a full block holds
        self.holder: dict[bytes, int] = {}  # the block that was last filled with this content
        self.duplicates: set[bytes] = set()  # contents that were in two blocks at once
        self.committed: dict[int, bytes] = {}
        self.is_committed = np.zeros(capacity.num_blocks, dtype=np.bool_)
        self.is_forgotten = np.zeros(capacity.num_blocks, dtype=np.bool_)  # no row may start from its content
        self.is_pool_asleep = self.was_reconnected = False
        self.newly_committed: list[tuple[int, bytes]] = []  # for the tier
        self._next_step = next_step_id
        self.has_states = capacity.num_snapshots is not None
        self.groups: list[SymbolicGroup] = []
        self._columns(rows, width, capacity.max_model_len)
        first_id = capacity.num_blocks
        for number, group in enumerate(capacity.groups, 1):
            self.groups.append(SymbolicGroup(self, group, first_id, number))
            first_id += group.num_blocks

    def _columns(self, rows: int, width: int, max_len: int) -> None:
        self.is_open = np.zeros(rows, dtype=np.bool_)
        self.is_broken = np.zeros(rows, dtype=np.bool_)
        self.is_hopeless = np.zeros(rows, dtype=np.bool_)  # its logits are NaN, on every worker
        self.is_sticky = np.zeros(rows, dtype=np.bool_)  # broken, and fails in every later step too
        self.num_candidates = np.zeros(rows, dtype=np.int64)
        self.candidates: dict[int, set[int]] = {}  # by row: ids returned for the newest token
        self.is_silent = np.zeros(rows, dtype=np.bool_)  # broken, and not even reported if a token was expected
        self.group: list[RowAssignment | None] = [None] * rows
        self.row_version = np.zeros(rows, dtype=np.int64)  # version that the row reads and writes
        self.seed = np.zeros(rows, dtype=np.uint64)
        self.sample = np.zeros(rows, dtype=np.uint64)
        self.prompt_len = np.zeros(rows, dtype=np.int64)
        self.history_len = np.zeros(rows, dtype=np.int64)
        self.num_computed_tokens = np.zeros(rows, dtype=np.int64)
        self.tokens = np.zeros((rows, max_len + 1), dtype=np.uint32)
        self.has_input = np.zeros((rows, max_len + 1), dtype=np.bool_)  # an input provides the position
        self.digests = np.zeros((rows, max_len + 1), dtype=np.uint64)
        self.table = np.zeros((rows, width), dtype=np.int64)
        self.table_len = np.zeros(rows, dtype=np.int64)
        self.num_dead = np.zeros(rows, dtype=np.int64)  # leading entries that no later token attends to
        self.slots = np.zeros((rows, width * self.capacity.block_size), dtype=np.int64)
        self.state = np.zeros(rows, dtype=np.uint64)  # states of a model with recurrent layers
        self.snapshots: dict[int, tuple[int, int]] = {}  # slot -> position, state
        self._draft_states: dict[int, np.ndarray] = {}  # states of a row after each token of its newest step
        self.sums = np.zeros(rows, dtype=np.uint64)  # sums of the states that pooled rows have computed
        self.refs = np.zeros(self.capacity.num_blocks, dtype=np.int64)  # open rows that name the block
        self._starts = np.zeros(rows, dtype=np.int64)  # where each row began its newest step
        self.num_drafts = np.zeros(rows, dtype=np.int64)  # drafts of the running step
        self._answers: dict[int, OldAnswer] = {}
        self.rejected: dict[int, list[tuple[int, int]]] = {}  # by row: (step, reserved tokens that do not exist)
        self._positions = np.arange(max_len + 1)
        self._places = np.arange(max_len + 1, dtype=np.uint64)

    # -- the stream ---------------------------------------------------------------------------------------------------

    def send(self, batch: StepBatch) -> None:
        """A step arrives on the stream."""
        num_messages = 1 + sum(sent.ends_message for sent in self.queue)
        if num_messages > self.capacity.pipeline_depth:
            raise Violation(f"{num_messages} messages in flight, pipeline_depth is {self.capacity.pipeline_depth}")
        steps = (batch, *batch.then)
        for step in steps:
            sent = Sent(step, self.num_acked, ends_message=step is steps[-1])
            if not self.is_lazy:
                sent.output = self.execute(step, sent.num_acked)
            self.queue.append(sent)

    def answer(self) -> StepOutput:
        """The oldest answer leaves; from now on the scheduler knows it."""
        sent = self.queue.popleft()
        output = sent.output or self.execute(sent.batch, sent.num_acked)
        self.num_acked = output.step_id
        return output

    def lease(self) -> None:
        """Another scheduler takes the worker: unread answers and rows are gone, committed blocks stay."""
        self.queue.clear()
        self.resident.clear()
        self._columns(len(self.is_open), self.table.shape[1], self.capacity.max_model_len)
        for group in self.groups:
            group.reset()
        self.num_acked = self._next_step - 1
        self.is_draining, self.fail_next = False, None

    def change_weights(self, version: int) -> None:
        """Compute with other weights from the next step on. No block stays committed."""
        if self.queue:
            raise Violation("the weights change while a step is in flight")
        self.version = version
        self._uncommit_all()
        self.snapshots.clear()

    def free_pool(self) -> None:
        """The pool's memory is free: it has zeros until it is written again. Fetches are refused until it is back."""
        if self.queue:
            raise Violation("the pool sleeps while a step is in flight")
        self._uncommit_all()
        self.is_pool_asleep = True
        self.kv[:] = 0
        for group in self.groups:
            group.kv[:] = 0
            group.content = [None] * group.num_blocks
            group.committed.clear()

    def forget_prefixes(self) -> None:
        """No block stays committed. Rows keep theirs."""
        self.is_forgotten |= np.array([content is not None for content in self.content])
        self.committed.clear()
        self.newly_committed.clear()
        self.is_committed[:] = False

    def _uncommit_all(self) -> None:
        self.content = [None] * self.capacity.num_blocks
        self.holder.clear()
        self.duplicates.clear()
        self.committed.clear()
        self.newly_committed.clear()
        self.is_committed[:] = self.is_forgotten[:] = False

    @property
    def next_step_id(self) -> int:
        return self._next_step

    def list_blocks(self) -> list[CachedBlock]:
        """Committed blocks in the order of their commits, with the tokens they really hold."""
        bs = self.capacity.block_size
        own = [CachedBlock(b, d, self.kv_token[b * bs : (b + 1) * bs].copy()) for b, d in self.committed.items()]
        return [*own, *(block for group in self.groups for block in group.list_blocks())]

    def group_of(self, block: int) -> SymbolicGroup | None:
        """The group after the first one whose block has this id."""
        ends = self.capacity.num_all_blocks
        return next((one for one in reversed(self.groups) if one.first_id <= block < ends), None)

    def holds(self, block: int, digest: bytes) -> bool:
        """Whether a block is committed with this digest, or has the content that will be."""
        group = self.group_of(block)
        if group is None:
            return digest in (self.committed.get(block), self.content[block])
        return group.digest_of(block - group.first_id) == digest

    # -- one step -----------------------------------------------------------------------------------------------------

    def execute(self, batch: StepBatch, num_acked: int) -> StepOutput:
        """Everything a real worker does with a step, in the documented order."""
        if batch.step_id != self._next_step or batch.worker_id != self.capacity.worker_id:
            raise Violation(f"step {batch.step_id} for {batch.worker_id}, expected {self._next_step}")
        self._next_step += 1
        if self.capacity.attention_window is not None:
            self._leave_dead_blocks()
        for group in self.groups:
            group.leave_dead_blocks()
            group.close(batch.close_rows.tolist())
        if len(batch.close_rows):
            self._close(batch.close_rows)
        parts = [group.part_of(batch) for group in self.groups]
        if parts:
            batch = self._of_first_group(batch)
        fresh: list[tuple[int, int]] = []
        self._claims = np.zeros(self.capacity.num_blocks, dtype=np.int64)  # sharing that begins in this step
        for opened in batch.opens:
            self._open(opened, fresh)
        for index, group in enumerate(self.groups):
            tables = [(opened, opened.group_tables[index]) for opened in batch.opens]
            group.apply(parts[index], tables, num_acked)
        if len(batch.table_rows):
            self._change_tables(batch, fresh)
        self._take_fresh(fresh)
        if len(batch.copy_src):
            self._copy(batch, {block for _, block in fresh})
        if len(batch.commit_blocks):
            self._commit(batch, num_acked)
        if (moves := batch.part(BeamMoves)) is not None:
            self._move_beams(moves)
        if batch.max_query_lens is not None:
            batch = self._with_drafts(batch, num_acked)
        rows, broken = self._forward(batch)
        return self._sample(batch, rows, broken)

    def _of_first_group(self, batch: StepBatch) -> StepBatch:
        """The step without changes of blocks that other groups have."""
        changed, copied, committed = (
            blocks < self.capacity.num_blocks for blocks in (batch.table_blocks, batch.copy_dst, batch.commit_blocks)
        )
        return replace(
            batch,
            table_rows=batch.table_rows[changed],
            table_indices=batch.table_indices[changed],
            table_blocks=batch.table_blocks[changed],
            copy_src=batch.copy_src[copied],
            copy_dst=batch.copy_dst[copied],
            commit_blocks=batch.commit_blocks[committed],
            commit_digests=[d for d, own in zip(batch.commit_digests, committed, strict=True) if own],
        )

    def _first_seen(self, positions: np.ndarray) -> np.ndarray:
        """The first position that the token at each of these positions attends to."""
        window = self.capacity.attention_window
        return positions * 0 if window is None else np.maximum(positions - window + 1, 0)

    def _leave_dead_blocks(self) -> None:
        dead = np.minimum(self._first_seen(self.num_computed_tokens) // self.capacity.block_size, self.table_len)
        for row in np.flatnonzero(self.is_open & (dead > self.num_dead)).tolist():
            self.refs[self.table[row, self.num_dead[row] : dead[row]]] -= 1
            self.num_dead[row] = dead[row]

    def _close(self, rows: np.ndarray) -> None:
        for row in rows.tolist():
            self._need_open(row, "closes")
            self.refs[self.table[row, self.num_dead[row] : self.table_len[row]]] -= 1
            self.is_open[row] = self.is_broken[row] = self.is_sticky[row] = self.is_silent[row] = False
            self.rejected.pop(row, None)

    def _need_open(self, row: int, verb: str) -> None:
        if row >= len(self.is_open) or not self.is_open[row]:
            raise Violation(f"{verb} row {row}, which is not open")

    def _open(self, opened: RowAssignment, fresh: list[tuple[int, int]]) -> None:
        row, bs = opened.row, self.capacity.block_size
        if row >= len(self.is_open) or self.is_open[row]:
            raise Violation(f"opens row {row}, which is open or does not exist")
        tokens = self._opening_tokens(opened)
        count = len(tokens)
        blocks = opened.block_table.astype(np.int64)
        if not opened.prompt_len <= count <= self.capacity.max_model_len:
            raise Violation(f"row {row} opens with {count} tokens, its prompt has {opened.prompt_len}")
        if opened.fork_of_row is None and opened.num_computed_tokens >= count:
            raise Violation(f"row {row} opens with nothing to compute")
        num_dead = int(self._first_seen(np.array(opened.num_computed_tokens))) // bs
        held = blocks[num_dead:]
        if (blocks >= self.capacity.num_blocks).any() or len(set(held.tolist())) != len(held):
            raise Violation(f"row {row} opens with a bad table {blocks.tolist()}")
        num_shared = -(-opened.num_computed_tokens // bs)
        num_encoder = opened.group.features.num_head_tokens
        if opened.fork_of_row is None and 0 < opened.num_computed_tokens < num_encoder:
            raise Violation(f"row {row} starts from {opened.num_computed_tokens} of {num_encoder} encoder positions")
        if num_shared > len(blocks):
            raise Violation(f"row {row}: {opened.num_computed_tokens} computed tokens in {len(blocks)} blocks")
        if opened.group.num_sequences == 1 and self.is_forgotten[blocks[num_dead:num_shared]].any():
            raise Violation(f"row {row} starts from blocks that were forgotten")
        if _pooling(opened) == "mean" and opened.num_computed_tokens:
            raise Violation(f"row {row} pools all states, but {opened.num_computed_tokens} of them are cached")
        self.sums[row] = 0
        parent = opened.fork_of_row
        self.row_version[row] = self.version if parent is None else self.row_version[parent]
        self.is_open[row], self.group[row] = True, opened
        self.seed[row], self.sample[row] = opened.group.options, opened.sample_index
        self.is_hopeless[row] = opened.group.options == NAN_SEED
        self._answers.pop(row, None)
        if (answer := self.old_answers.get(opened.group.request_id)) is not None:
            self._answers[row] = OldAnswer(answer)
        self.prompt_len[row], self.history_len[row] = opened.prompt_len, count
        self.num_computed_tokens[row] = opened.num_computed_tokens
        self.num_candidates[row] = opened.num_candidates
        self.tokens[row, :count] = tokens
        self._give_inputs(opened)
        model_key = symbolic_model.key(opened.group.root_key, adapter_of(opened.group))
        contents = with_contents(tokens, contents_in(opened.group)).astype(np.uint64)
        terms = symbolic_model.term_column(contents, self._places[:count])
        self.digests[row, :count] = np.cumsum(terms) + np.uint64(symbolic_model.root(model_key))
        if self.has_states:
            self._start_state(opened, symbolic_model.root(model_key))
        self.table_len[row] = len(blocks)
        self.table[row, : len(blocks)] = blocks
        self.slots[row, : len(blocks) * bs] = (blocks[:, None] * bs + np.arange(bs)).reshape(-1)
        self.num_dead[row] = num_dead
        self.refs[held] += 1
        self._claims[blocks[num_dead:num_shared]] += 1
        self.is_forgotten[blocks[num_shared:]] = False  # rows of the same step may start from what this one writes
        fresh += [(row, block) for block in blocks[num_shared:].tolist()]

    def _start_state(self, opened: RowAssignment, root: int) -> None:
        row, count = opened.row, opened.num_computed_tokens
        if opened.fork_of_row is not None:
            return  # it continues from the state of its parent, which this step computes
        if not count:
            self.state[row] = root
            return
        kept = None if opened.snapshot is None else self.snapshots.get(opened.snapshot)
        if kept is None or kept[0] != count:
            raise Violation(f"row {row} starts after {count} tokens from the snapshot {kept}")
        self.state[row] = kept[1]

    def _advance_states(self, batch: StepBatch, rows: np.ndarray, starts: np.ndarray) -> None:
        """Each state follows from the one before; garbage stays garbage."""
        taken = batch.part(TakenSnapshots)
        columns = (
            [[], [], []] if taken is None else [taken.rows.tolist(), taken.positions.tolist(), taken.slots.tolist()]
        )
        wanted = {(row, position): slot for row, position, slot in zip(*columns, strict=True)}
        slots = set(wanted.values())
        if len(slots) < len(columns[2]) or (slots and max(slots) >= self.capacity.num_snapshots):
            raise Violation(f"takes snapshots in slots {columns[2]}")
        for slot in slots:
            self.snapshots.pop(slot, None)
        for row, start in zip(rows.tolist(), starts.tolist(), strict=True):
            end = int(self.num_computed_tokens[row])
            terms = symbolic_model.term_column(self._contents(row, start, end), self._places[start:end])
            states = np.cumsum(terms) + self.state[row]
            if self.state[row] == POISON or (self.kv[self.slots[row, start:end]] == POISON).any():
                states[:] = POISON
            self.state[row], self._draft_states[row] = states[-1], states
            for position in range(start + 1, end + 1):
                if (slot := wanted.pop((row, position), None)) is not None:
                    self.snapshots[slot] = position, int(states[position - start - 1])
        speculating = () if batch.max_query_lens is None else rows[batch.max_query_lens > 0].tolist()
        if any(row not in speculating for row, _ in wanted):
            raise Violation(f"takes snapshots of rows and positions {list(wanted)}, which the step does not compute")
        forks, parents = batch.fork_rows.astype(np.int64), batch.fork_parents.astype(np.int64)
        self.state[forks] = self.state[parents]

    def _contents(self, row: int, start: int, end: int) -> np.ndarray:
        tokens = with_contents(self.tokens[row], contents_in(self.group[row].group))
        return tokens[start:end].astype(np.uint64)

    def _give_inputs(self, opened: RowAssignment) -> None:
        """The row can compute the positions of these inputs from now on."""
        self.has_input[opened.row] = False
        for item in opened.inputs:
            if item.end <= opened.num_computed_tokens:
                raise Violation(f"row {opened.row} gets an input whose positions are computed")
            self.has_input[opened.row, item.start : item.end] = True

    def _opening_tokens(self, opened: RowAssignment) -> np.ndarray:
        prompt = opened.group.prompt
        if opened.fork_of_row is None:
            if not np.array_equal(opened.token_ids[: opened.prompt_len], prompt) or opened.prompt_len != len(prompt):
                raise Violation(f"row {opened.row} opens with a prompt that is not its request's")
            return opened.token_ids
        parent = opened.fork_of_row
        self._need_open(parent, "forks off")
        if self.group[parent].group is not opened.group or opened.num_computed_tokens != opened.prompt_len:
            raise Violation(f"row {opened.row} forks from row {parent} of another request, or not at its prompt's end")
        if self.history_len[parent] != opened.prompt_len or opened.prompt_len != len(prompt):
            raise Violation(f"row {opened.row} forks from row {parent}, which is past its prompt")
        return self.tokens[parent, : opened.prompt_len].copy()

    def _change_tables(self, batch: StepBatch, fresh: list[tuple[int, int]]) -> None:
        bs, copied = self.capacity.block_size, dict(zip(batch.copy_dst.tolist(), batch.copy_src.tolist(), strict=True))
        moves = batch.part(BeamMoves)
        parents = dict(zip(moves.rows.tolist(), moves.parents.tolist(), strict=True)) if moves else {}
        taken = {row: self.table[parent, : self.table_len[parent]].tolist() for row, parent in parents.items()}
        changes = zip(batch.table_rows.tolist(), batch.table_indices.tolist(), batch.table_blocks.tolist(), strict=True)
        for row, index, block in changes:
            self._need_open(row, "changes the table of")
            if index > self.table_len[row] or index >= self.table.shape[1] or block >= self.capacity.num_blocks:
                raise Violation(f"row {row}: table[{index}] = {block} with {self.table_len[row]} blocks")
            if index < self.num_dead[row]:
                self.table[row, index] = block  # no token attends to it, so it may be any block
                self.slots[row, index * bs : (index + 1) * bs] = np.arange(block * bs, (block + 1) * bs)
                continue
            if index == self.table_len[row]:
                self.table_len[row] += 1
            else:
                old = int(self.table[row, index])
                if row in taken and taken[row][index] != old:  # it takes the block over from its parent
                    if copied.get(block, block) != taken[row][index]:
                        raise Violation(f"beam {row}: block {block} is neither its parent's nor a copy of it")
                elif copied.get(block) != old:
                    raise Violation(f"row {row}: block {old} is replaced by {block} without a copy")
                self.refs[old] -= 1
            self.table[row, index] = block
            self.slots[row, index * bs : (index + 1) * bs] = np.arange(block * bs, (block + 1) * bs)
            self.refs[block] += 1
            if block not in taken.get(row, ())[index:]:
                fresh.append((row, block))

    def _take_fresh(self, fresh: list[tuple[int, int]]) -> None:
        """A newly allocated block is only in the tables of its row and of rows that share it from this step on."""
        for row, block in fresh:
            if self.refs[block] - self._claims[block] != 1:
                raise Violation(f"row {row} gets new block {block}, which another open row has in its table")
            self._drop_content(block)
            self.committed.pop(block, None)
            self.is_committed[block] = False

    def _drop_content(self, block: int) -> None:
        content, self.content[block], self.is_forgotten[block] = self.content[block], None, False
        if content is not None and self.holder.get(content) == block:
            del self.holder[content]

    def _copy(self, batch: StepBatch, fresh: set[int]) -> None:
        bs = self.capacity.block_size
        for src, dst in zip(batch.copy_src.tolist(), batch.copy_dst.tolist(), strict=True):
            if dst not in fresh:
                raise Violation(f"copies block {src} over block {dst}, which is in use")
            self.kv[dst * bs : (dst + 1) * bs] = self.kv[src * bs : (src + 1) * bs]
            self.kv_token[dst * bs : (dst + 1) * bs] = self.kv_token[src * bs : (src + 1) * bs]
            self.kv_version[dst * bs : (dst + 1) * bs] = self.kv_version[src * bs : (src + 1) * bs]
            self.fill_step[dst] = batch.step_id

    def _commit(self, batch: StepBatch, num_acked: int) -> None:
        first_id = self.capacity.num_all_blocks
        for block, digest in zip(batch.commit_blocks.tolist(), batch.commit_digests, strict=True):
            if block >= first_id:
                self.newly_committed.append((block, digest))
                continue
            if self.content[block] is None:
                raise Violation(f"commits block {block}, which is not full")
            if self.content[block] != digest:
                raise Violation(f"commits block {block} under a digest that is not that of its chain")
            if self.fill_step[block] > num_acked:
                raise Violation(f"commits block {block} before step {self.fill_step[block]} was acknowledged")
            self.committed.pop(block, None)  # the order of the table is that of the commits
            self.committed[block] = digest
            self.is_committed[block] = True
            self.newly_committed.append((block, digest))

    def deposit(self, block: int, tokens: np.ndarray, kv: np.ndarray, digest: bytes) -> None:
        """A fetched block gets its content, between two steps. If a row that has not ended uses it, the next step that
        reads it back tells.
        """
        bs = self.capacity.block_size
        self._drop_content(block)
        self.committed.pop(block, None)
        self.is_committed[block] = False
        self.kv[block * bs : (block + 1) * bs] = kv
        self.kv_version[block * bs : (block + 1) * bs] = self.version
        self.kv_token[block * bs : (block + 1) * bs] = tokens
        self.content[block], self.fill_step[block] = digest, 0
        if digest in self.holder:
            self.duplicates.add(digest)
        self.holder.setdefault(digest, block)

    def _move_beams(self, moves: BeamMoves) -> None:
        rows, parents = moves.rows.astype(np.int64), moves.parents.astype(np.int64)
        for row, parent, token in zip(rows.tolist(), parents.tolist(), moves.tokens.tolist(), strict=True):
            self._need_open(row, "moves beam")
            self._need_open(parent, "moves a beam to")
            if self.group[row].group is not self.group[parent].group or not self.num_candidates[row]:
                raise Violation(f"row {row} becomes a beam of row {parent}, which belongs to another request")
            if token not in self.candidates.get(parent, ()):
                raise Violation(f"beam {row} gets token {token}, which is no candidate of row {parent}")
        ends = self.num_computed_tokens[parents]
        tokens, digests = self.tokens[parents], self.digests[parents]
        self.tokens[rows], self.digests[rows] = tokens, digests
        self.tokens[rows, ends] = moves.tokens
        terms = symbolic_model.term_column(moves.tokens.astype(np.uint64), self._places[ends])
        self.digests[rows, ends] = digests[np.arange(len(rows)), ends - 1] + terms
        self.history_len[rows], self.num_computed_tokens[rows] = ends + 1, ends
        self.state[rows] = self.state[parents]

    # -- drafts -------------------------------------------------------------------------------------------------------

    def _with_drafts(self, batch: StepBatch, num_acked: int) -> StepBatch:
        """The step with the positions, drafts and slots that this worker chooses for the rows that speculate."""
        rows, most = batch.rows.astype(np.int64), batch.max_query_lens.astype(np.int64)
        if int(np.maximum(most, batch.query_lens).sum()) > self.capacity.max_num_batched_tokens:
            raise Violation(f"step {batch.step_id} reserves more tokens than max_num_batched_tokens")
        context_lens, lens = batch.context_lens.copy(), batch.query_lens.copy()
        firsts = np.cumsum(lens) - lens
        slots = np.split(batch.slot_mapping, firsts[1:])
        for i in np.flatnonzero(most).tolist():
            row, reserved = int(rows[i]), int(most[i])
            self._need_open(row, "speculates in")
            start, end = int(self.num_computed_tokens[row]), int(context_lens[i]) + reserved
            late = sum(count for step_id, count in self.rejected.get(row, ()) if step_id > num_acked)
            if not self.is_broken[row] and context_lens[i] != start + late:
                raise Violation(
                    f"row {row} may be at {context_lens[i]}, but it is at {start} and {late} tokens are rejected"
                )
            if end > self.table_len[row] * self.capacity.block_size:
                raise Violation(f"row {row} may compute {end} tokens beyond their tables")
            if slots[i][0] != self.slots[row, end - 1]:
                raise Violation(f"slot_mapping {slots[i][0]} disagrees with the tables {self.slots[row, end - 1]}")
            count = reserved - 1 if self.is_broken[row] else self._draft(row, reserved - 1, batch.step_id)
            context_lens[i], lens[i], self.num_drafts[row] = start, 1 + count, count
            slots[i] = self.slots[row, start : start + 1 + count]
        return replace(batch, context_lens=context_lens, query_lens=lens, slot_mapping=np.concatenate(slots))

    def _chance(self, step_id: int, row: int, nth: int) -> float:
        return symbolic_model.mix(step_id << 20 ^ row << 10 ^ nth) % 1000 / 1000

    def _draft(self, row: int, most: int, step_id: int) -> int:
        """Append drafts to the history of a row. Returns their number."""
        count = min(most, int(self._chance(step_id, row, 500) * (most + 2)))
        if row in self._answers:
            output = self.tokens[row, self.prompt_len[row] : self.history_len[row]]
            found = self._answers[row].propose(output, count)
            for token in found:
                self._append(row, int(self.history_len[row]), token)
            self.num_drafted += len(found)
            return len(found)
        for nth in range(count):
            end = int(self.history_len[row])
            token = self._next_token(row, end)
            if self._chance(step_id, row, nth) >= self.draft_rate:
                token = int(self._chance(step_id, row, 100 + nth) * self.vocab_size)
            self._append(row, end, token)
        self.num_drafted += count
        return count

    def _reads_garbage(self, row: int, end: int, nth: int) -> bool:
        """Whether the token at `end`, which is sampled after the `nth` token of this step, is garbage."""
        is_garbage = bool(self.kv[self.slots[row, end - 1]] == POISON)
        if not self.has_states or is_garbage:
            return is_garbage
        state = self._draft_states[row][nth]
        if state not in (POISON, self.digests[row, end - 1]):
            raise Violation(f"rows [{row}] sample from a state that is not that of their tokens")
        return bool(state == POISON)

    def _next_token(self, row: int, end: int) -> int:
        digest, position = int(self.digests[row, end - 1]), end - int(self.prompt_len[row])
        seed, sample = int(self.seed[row]), int(self.sample[row])
        return symbolic_model.next_token(digest, seed, sample, position, self.vocab_size)

    def _append(self, row: int, end: int, token: int) -> None:
        self.tokens[row, end] = token
        term = symbolic_model.term(token, end)
        self.digests[row, end] = (int(self.digests[row, end - 1]) + term) & symbolic_model.MASK
        self.history_len[row] = end + 1

    def _accept(self, batch: StepBatch, rows: list[int]) -> None:
        """Replace the drafts of these rows by the tokens that are sampled, up to the first one that differs."""
        reserved = dict(zip(batch.rows.tolist(), batch.max_query_lens.tolist(), strict=True))
        for row in rows:
            count = int(self.num_drafts[row])
            start = int(self.history_len[row]) - count
            for end in range(start, start + count + 1):
                draft = int(self.tokens[row, end])
                token = (self._next_token(row, end) + self._reads_garbage(row, end, end - start)) % self.vocab_size
                self._append(row, end, token)
                if token != draft:
                    break
            num_new = int(self.history_len[row]) - start
            self.num_accepted += num_new - 1
            self.num_computed_tokens[row] = self.history_len[row] - 1
            if self.has_states:
                self.state[row] = self._draft_states[row][num_new - 1]
            self.rejected.setdefault(row, []).append((batch.step_id, reserved[row] - num_new))
        found = np.array(rows, dtype=np.int64)
        self._record_full_blocks(found, self._starts[found])

    # -- forward ------------------------------------------------------------------------------------------------------

    def _forward(self, batch: StepBatch) -> tuple[np.ndarray, list[int]]:
        rows, lens = batch.rows.astype(np.int64), batch.query_lens.astype(np.int64)
        self._check_shape(batch, rows, lens)
        if not len(rows):
            return rows, []
        starts = self.num_computed_tokens[rows]
        flat_rows = np.repeat(rows, lens)
        flat_positions = np.arange(len(flat_rows)) + np.repeat(starts - (np.cumsum(lens) - lens), lens)
        slots = self._checked_slots(batch, flat_rows, flat_positions)
        self._check_writable(slots)
        self._check_inputs(flat_rows, flat_positions)
        self.kv[slots] = self.digests[flat_rows, flat_positions]
        self.kv_version[slots] = self.row_version[flat_rows]
        self.kv_token[slots] = self.tokens[flat_rows, flat_positions]
        self.fill_step[slots // self.capacity.block_size] = batch.step_id
        self.num_computed_tokens[rows] = starts + lens
        self._starts[rows] = starts
        may_fail = self.fail_next or self.is_broken.any() or self.is_hopeless[rows].any()
        broken = self._break_rows(rows, starts) if may_fail else []
        self._read_back(rows, starts)
        for group in self.groups:
            group.write(flat_rows, flat_positions, batch.step_id)
            group.read_back(rows, starts)
        np.add.at(self.sums, flat_rows, self.kv[slots])
        if self.has_states:
            self._advance_states(batch, rows, starts)
        known = np.ones(len(rows), dtype=np.bool_)
        if batch.max_query_lens is not None:
            known = batch.max_query_lens == 0
            for i in np.flatnonzero(~known & np.isin(rows, broken)).tolist():  # the scheduler expects errors
                row, end = rows[i], starts[i] + batch.max_query_lens[i]
                places = np.arange(self.num_computed_tokens[row], end)  # positions of drafts that were not computed
                self.kv[self.slots[row, places]] = POISON
                for group in self.groups:
                    group.poison(row, places)
                self.num_computed_tokens[row] = end
        self._record_full_blocks(rows[known], starts[known])
        return rows, broken

    def _check_shape(self, batch: StepBatch, rows: np.ndarray, lens: np.ndarray) -> None:
        c = self.capacity
        if len(rows) > c.max_num_seqs or int(lens.sum()) > c.max_num_batched_tokens:
            raise Violation(f"{len(rows)} rows with {lens.sum()} tokens exceed max_num_seqs or max_num_batched_tokens")
        if len(np.unique(rows)) != len(rows) or len(lens) != len(rows) or (len(lens) and lens.min() < 1):
            raise Violation(f"rows {rows.tolist()} must be distinct, with query_lens of at least 1: {lens.tolist()}")
        if not self.is_open[rows].all():
            raise Violation(f"computes rows {rows[~self.is_open[rows]].tolist()}, which are not open")
        if not np.array_equal(batch.context_lens, self.num_computed_tokens[rows]):
            raise Violation(
                f"context_lens {batch.context_lens.tolist()}, rows are at {self.num_computed_tokens[rows].tolist()}"
            )
        ends = self.num_computed_tokens[rows] + lens
        beyond = (ends > self.history_len[rows]) & ~self.is_broken[rows]  # a broken row gets no more tokens
        if beyond.any():
            raise Violation(f"rows {rows[beyond].tolist()} compute tokens that do not exist")
        if (ends > self.table_len[rows] * c.block_size).any():
            raise Violation(f"rows {rows.tolist()} compute tokens beyond their tables")
        self._check_encoders(rows, ends)
        self._check_masks(batch, rows, (ends == self.history_len[rows]) | self.is_broken[rows])

    def _check_encoders(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """An encoder is bidirectional: one chunk computes all its positions, and nothing else."""
        for row, start, end in zip(rows.tolist(), self.num_computed_tokens[rows].tolist(), ends.tolist(), strict=True):
            num_encoder = self.group[row].group.features.num_head_tokens
            if start < num_encoder and (start, end) != (0, num_encoder):
                raise Violation(f"row {row} computes positions {start} to {end}, its encoder has {num_encoder}")

    def _check_inputs(self, rows: np.ndarray, positions: np.ndarray) -> None:
        is_known = self.has_input[rows, positions] | (positions >= self.history_len[rows])  # a broken row goes on
        is_missing = (self.tokens[rows, positions] >= FIRST_CONTENT_ID) & ~is_known
        if is_missing.any():
            raise Violation(f"rows {np.unique(rows[is_missing]).tolist()} compute an input that they do not have")

    def _check_masks(self, batch: StepBatch, rows: np.ndarray, reaches_end: np.ndarray) -> None:
        if (batch.sample_mask & ~reaches_end).any():
            raise Violation("samples from logits that are not those of the last token")
        for row in rows[reaches_end & ~batch.sample_mask & ~self.is_broken[rows]].tolist():
            if self.group[row].group.stop.max_tokens:
                raise Violation(f"row {row} reaches its last token and does not sample")
        reached = dict(zip(rows.tolist(), reaches_end.tolist(), strict=True))
        opened = {opened.row: opened.fork_of_row for opened in batch.opens}
        for row, parent in zip(batch.fork_rows.tolist(), batch.fork_parents.tolist(), strict=True):
            if opened.get(row) != parent or not reached.get(parent) or row in reached:
                raise Violation(f"row {row} samples from row {parent} without a fork of a prompt that ends here")

    def _checked_slots(self, batch: StepBatch, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        slots = self.slots[rows, positions]
        if not np.array_equal(slots, batch.slot_mapping):
            raise Violation(f"slot_mapping {batch.slot_mapping.tolist()} disagrees with the tables {slots.tolist()}")
        return slots

    def _check_writable(self, slots: np.ndarray) -> None:
        blocks = slots // self.capacity.block_size
        if len(np.unique(slots)) != len(slots):
            raise Violation("two tokens of one step are written to one slot")
        shared = self.refs[blocks] - self._claims[blocks] != 1
        if shared.any():
            raise Violation(f"writes into blocks {np.unique(blocks[shared]).tolist()}, which other rows share")
        if self.is_committed[blocks].any():
            raise Violation(f"writes into committed blocks {np.unique(blocks[self.is_committed[blocks]]).tolist()}")

    def _break_rows(self, rows: np.ndarray, starts: np.ndarray) -> list[int]:
        """Rows that fail in this step: one new row if requested, and the rows that failed before.

        Real workers keep no record of failures: a row that failed inside its prompt computes on, and its tokens are
        garbage.
        """
        hurt = [row for row in rows.tolist() if self.is_broken[row]]
        for row in hurt:
            self._poison(row, int(starts[rows == row][0]))
        broken = [row for row in hurt if self.is_sticky[row] or self.num_computed_tokens[row] > self.history_len[row]]
        for row in rows[self.is_hopeless[rows] & ~self.is_broken[rows]].tolist():
            if self.num_computed_tokens[row] == self.history_len[row]:
                self.is_broken[row] = self.is_sticky[row] = True
                broken.append(row)
        sound = [row for row in rows.tolist() if not self.is_broken[row]]
        if self.fail_next and sound:
            row = sound[self._next_step % len(sound)]
            if self.fail_next != "nan":
                self._poison(row, int(starts[rows == row][0]))
            broken.append(row)
            self.is_broken[row], self.is_silent[row] = True, self.fail_next == "silent"
            self.is_sticky[row] = self._next_step % 2
            self.fail_next = None
        return broken

    def _poison(self, row: int, start: int) -> None:
        self.kv[self.slots[row, start : self.num_computed_tokens[row]]] = POISON

    def _read_back(self, rows: np.ndarray, starts: np.ndarray) -> None:
        """Every slot that a row reads must hold the row's prefix. Content that depends on a failed row is garbage."""
        reads_from = self._first_seen(self.num_computed_tokens)
        reads_from[rows] = self._first_seen(starts)
        while True:
            opened = np.flatnonzero(self.is_open)
            width = int(self.num_computed_tokens[opened].max(initial=0))
            seen = self.kv[self.slots[opened, :width]]
            places = self._positions[:width]
            is_other = self.kv_version[self.slots[opened, :width]] != self.row_version[opened, None]
            if self.version:  # rows of one request share blocks, also those that open after an update that keeps them
                is_other &= [[not self.group[row].group.keeps_kv] for row in opened]
            wrong = (seen != self.digests[opened, :width]) | is_other
            wrong &= places < self.num_computed_tokens[opened, None]
            wrong &= places >= reads_from[opened, None]
            if not wrong.any():
                return
            bad = wrong & (seen != POISON)
            if bad.any():
                row, position = np.argwhere(bad)[0].tolist()
                raise Violation(
                    f"row {opened[row]} reads the wrong content at position {position} "
                    f"(block {self.table[opened[row], position // self.capacity.block_size]})"
                )
            if not self._spread_poison(opened[wrong.any(axis=1)], rows, starts):
                return

    def _spread_poison(self, tainted: np.ndarray, rows: np.ndarray, starts: np.ndarray) -> bool:
        """A row that attends to garbage writes garbage. True if that changed anything."""
        changed = False
        for row in np.intersect1d(tainted, rows).tolist():
            written = self.slots[row, int(starts[rows == row][0]) : self.num_computed_tokens[row]]
            if (self.kv[written] != POISON).any():
                self.kv[written] = POISON
                changed = True
        return changed

    def _record_full_blocks(self, rows: np.ndarray, starts: np.ndarray) -> None:
        bs = self.capacity.block_size
        first, last = starts // bs, self.num_computed_tokens[rows] // bs
        for i in np.flatnonzero(last > first).tolist():
            row = int(rows[i])
            for index in range(int(first[i]), int(last[i])):
                self._record_full_block(row, index)
        for group in self.groups:
            group.record_full_blocks(rows, starts)

    def _record_full_block(self, row: int, index: int) -> None:
        bs, block = self.capacity.block_size, int(self.table[row, index])
        if (self.kv[block * bs : (block + 1) * bs] == POISON).any():
            return
        if _pooling(self.group[row]):
            return  # a commit of it is a violation
        digest = self.chains.of_block(self.tokens[row], self.digests[row], index, self.group[row].group)
        other = self.holder.get(digest)
        if other is not None and other != block:
            self.duplicates.add(digest)
        self.content[block], self.holder[digest] = digest, block

    # -- sampling -----------------------------------------------------------------------------------------------------

    def _sample(self, batch: StepBatch, rows: np.ndarray, broken: list[int]) -> StepOutput:
        forks, parents = batch.fork_rows.astype(np.int64), batch.fork_parents.astype(np.int64)
        if broken:
            children = forks[np.isin(parents, broken)]
            self.is_broken[children] = self.is_sticky[children] = True
            broken = broken + children.tolist()
        asked = np.concatenate((rows[batch.sample_mask], forks)) if len(rows) else rows
        samplers = asked[~np.isin(asked, broken)] if broken else asked
        is_drafted = np.zeros(len(samplers), dtype=np.bool_)
        if batch.max_query_lens is not None:
            is_drafted = np.isin(samplers, rows[batch.max_query_lens > 0])
            self._accept(batch, samplers[is_drafted].tolist())
        if len(plain := samplers[~is_drafted]):
            self._append_samples(plain)
        lens = np.where(is_drafted, self.history_len[samplers] - 1 - self._starts[samplers], 1)
        candidates = self._candidates(samplers[self.num_candidates[samplers] > 0])
        if broken:
            self.failed_requests.update(self.group[row].group.request_id for row in broken)
            broken = [row for row in broken if not self.is_silent[row] or row not in asked]
        output = StepOutput(
            worker_id=batch.worker_id,
            step_id=batch.step_id,
            rows=samplers.astype(np.uint32),
            token_ids=self._newest(samplers, lens),
            token_lens=lens.astype(np.uint32) if is_drafted.any() else None,
            draft_lens=self._wanted(samplers, batch.step_id),
            errors=[RowError(row, "simulated failure") for row in broken],
        )
        output.add(BeamCandidates(*candidates) if len(candidates[0]) else None)
        output.add(self._pooled([row for row in rows.tolist() if row not in broken]))
        return output

    def _newest(self, rows: np.ndarray, lens: np.ndarray) -> np.ndarray:
        """The newest tokens of each row."""
        parts = [
            self.tokens[row, end - count : end]
            for row, end, count in zip(rows.tolist(), self.history_len[rows].tolist(), lens.tolist(), strict=True)
        ]
        return np.concatenate(parts) if parts else EMPTY

    def _wanted(self, rows: np.ndarray, step_id: int) -> np.ndarray | None:
        if not self.draft_rate:
            return None
        chances = [self._chance(step_id, row, 700) for row in rows.tolist()]
        return np.array([int(6 * chance) if chance < self.draft_rate else 0 for chance in chances], dtype=np.uint32)

    def _pooled(self, rows: list[int]) -> PooledRows | None:
        """The numbers of the pooled rows whose prompts are complete."""
        found = [
            (row, _pooling(self.group[row]))
            for row in rows
            if _pooling(self.group[row]) and self.num_computed_tokens[row] == self.prompt_len[row]
        ]
        if not found:
            return None
        last = [int(self.kv[self.slots[row, self.num_computed_tokens[row] - 1]]) for row, _ in found]
        numbers = [int(self.sums[row]) if kind == "mean" else end for (row, kind), end in zip(found, last, strict=True)]
        values = np.array([symbolic_model.number_of(value) for value in numbers], np.float32)
        return PooledRows(np.array([row for row, _ in found], np.uint32), np.ones(len(found), np.uint32), values)

    def _candidates(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The most likely tokens after the computed tokens of each beam. Wrong KV gives other tokens."""
        self.candidates.update(dict.fromkeys(rows.tolist(), ()))
        parts = [(np.zeros(0, np.uint32), np.zeros(0, np.uint32), np.zeros(0, np.float32))]
        for row in rows.tolist():
            last = self.num_computed_tokens[row] - 1
            digest = self.digests[row, last] ^ (self.kv[self.slots[row, last]] == POISON)
            ids, logprobs = symbolic_model.best_candidates(int(digest), self.vocab_size, int(self.num_candidates[row]))
            self.candidates[row] = set(ids.tolist())
            parts.append((np.full(len(ids), row, dtype=np.uint32), ids, logprobs))
        return tuple(np.concatenate(column) for column in zip(*parts, strict=True))

    def _append_samples(self, rows: np.ndarray) -> None:
        ends = self.history_len[rows]
        if int(ends.max()) >= self.capacity.max_model_len:
            raise Violation(f"rows {rows.tolist()} sample beyond max_model_len")
        last = self.digests[rows, ends - 1]
        positions = (ends - self.prompt_len[rows]).astype(np.uint64)
        tokens = symbolic_model.next_token_column(last, self.seed[rows], self.sample[rows], positions, self.vocab_size)
        read = self.kv[self.slots[rows, ends - 1]]
        if self.has_states:
            is_wrong = (self.state[rows] != last) & (self.state[rows] != POISON) & (read != POISON)
            if is_wrong.any():
                raise Violation(f"rows {rows[is_wrong].tolist()} sample from a state that is not that of their tokens")
            read = np.where(self.state[rows] == POISON, POISON, read)
        tokens = np.where(read == POISON, (tokens + np.uint64(1)) % np.uint64(self.vocab_size), tokens)
        self.tokens[rows, ends] = tokens
        self.digests[rows, ends] = last + symbolic_model.term_column(tokens, self._places[ends])
        self.history_len[rows] = ends + 1


def _pooling(opened: RowAssignment) -> str | None:
    """Kind of the row's pooling; None if it returns tokens."""
    found = opened.group.features.find(PooledRequest)
    return None if found is None else "last" if found.may_hit else "mean"
