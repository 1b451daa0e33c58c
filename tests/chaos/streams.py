"""The clients: consecutive streams in many lanes, each compared with its expected answer."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field, replace

from quire_client import AsyncClient, QuireError
from quire_client.types import Delta

from tests.chaos.reference import Answers, Catalogue, Source, answers_of
from tests.chaos.workload import Request

SALTS = 4  # streams of one salt share cached blocks
UNSEEDED_FRACTION = 0.05


@dataclass(slots=True)
class StreamRecord:
    """The deltas and the result of one stream. Times are those of the event loop's clock."""

    number: int
    request: Request
    expected: Answers | None  # None: the server chooses the seed; checked afterwards
    delta_times: list[float] = field(default_factory=list)
    token_ids: list[list[int | None]] = field(default_factory=list)  # per sample, by position; None: missing
    answers: Answers = ()
    request_id: str = ""
    seed: int | None = None
    resumes: int = 0
    error: str = ""
    began: float = 0.0
    ended: float = 0.0
    repeated: int = 0

    def take(self, delta: Delta, now: float) -> None:
        """Store a delta by its offset, and count repeated tokens."""
        self.delta_times.append(now)
        if not delta.token_ids:
            return
        token_ids = self.token_ids[delta.index]
        self.repeated += max(0, len(token_ids) - delta.offset)
        token_ids.extend([None] * (delta.offset - len(token_ids)))
        token_ids[delta.offset : delta.offset + len(delta.token_ids)] = delta.token_ids

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def lost(self) -> int:
        """The number of tokens that did not arrive."""
        pairs = zip(self.expected or (), self.token_ids, strict=False)
        missing_ends = sum(max(0, len(answer.token_ids) - len(got)) for answer, got in pairs)
        return missing_ends + sum(got.count(None) for got in self.token_ids)

    @property
    def changed(self) -> int:
        """The number of wrong or surplus tokens. Equal tokens with a different text or finish reason count as one."""
        if self.expected is None:
            return 0
        changed = 0
        for index, (answer, got) in enumerate(zip(self.expected, self.token_ids, strict=True)):
            wrong = sum(b is not None and a != b for a, b in zip(answer.token_ids, got, strict=False))
            wrong += max(0, len(got) - len(answer.token_ids))
            is_other = bool(self.answers) and self.answers[index] != answer
            changed += wrong or int(is_other)
        return changed

    @property
    def is_bad(self) -> bool:
        return bool(self.error or self.repeated or self.lost or self.changed)

    def difference(self) -> str:
        """The first difference from the expected answer, in words."""
        if self.error:
            return f"{self.error} after {self.num_tokens} tokens"
        for index, (answer, got) in enumerate(zip(self.expected or (), self.token_ids, strict=False)):
            wrong = [p for p, (a, b) in enumerate(zip(answer.token_ids, got, strict=False)) if a != b]
            if wrong or len(got) != len(answer.token_ids):
                first = wrong[0] if wrong else min(len(got), len(answer.token_ids))
                actual, wanted = got[first : first + 8], list(answer.token_ids[first : first + 8])
                return (
                    f"sample {index} differs from position {first} on: got {actual} ({len(got)} tokens), "
                    f"expected {wanted} ({len(answer.token_ids)} tokens)"
                )
            if self.answers and self.answers[index] != answer:
                return f"sample {index} has the expected tokens, but {self.answers[index]} instead of {answer}"
        return f"{self.repeated} tokens repeated, {self.lost} lost"


class StreamLoad:
    """Runs `lanes` streams at a time until the time is over and `at_least` streams were started."""

    def __init__(self, client: AsyncClient, catalogue: Catalogue, *, seed: int, lanes: int, at_least: int) -> None:
        self._client = client
        self._catalogue = catalogue
        self._seed = seed
        self._lanes = lanes
        self._at_least = at_least
        self._is_stopped = False
        self.records: list[StreamRecord] = []
        self.counts: Counter[str] = Counter()  # sums over the streams that have ended

    async def run(self, until: float) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._lanes):
                group.create_task(self._lane(until))

    def stop(self) -> None:
        """Start no more streams; `run` returns when the running ones have ended."""
        self._is_stopped = True

    async def verify_unseeded(self, source: Source) -> None:
        """Compute the expected answers of streams whose seed the server chose."""
        unknown = [record for record in self.records if record.ended and record.expected is None and not record.error]
        seeded = [replace(r.request, options=r.request.options | {"seed": r.seed}) for r in unknown]
        for record, answers in zip(unknown, await asyncio.gather(*map(source.answers, seeded)), strict=True):
            record.expected = answers

    @property
    def num_running(self) -> int:
        return len(self.records) - self.counts["streams"]

    async def _lane(self, until: float) -> None:
        loop = asyncio.get_running_loop()
        while not self._is_stopped and (loop.time() < until or len(self.records) < self._at_least):
            await self._stream()

    async def _stream(self) -> None:
        rng = random.Random(f"{self._seed}/{len(self.records)}")
        request, expected = self._catalogue.draw(rng)
        options = request.options | {"cache_salt": str(rng.randrange(SALTS))}
        record = StreamRecord(len(self.records), request, expected)
        record.token_ids = [[] for _ in range(request.num_samples)]
        if "seed" in options and rng.random() < UNSEEDED_FRACTION:
            del options["seed"]
            record.expected = None
        self.records.append(record)
        loop = asyncio.get_running_loop()
        record.began = loop.time()
        try:
            async with self._client.stream(**request.prompt, **options) as stream:
                record.request_id, record.seed = stream.request_id, stream.seed
                async for delta in stream:
                    record.take(delta, loop.time())
                result = await stream.result()
            record.answers = answers_of(result)
            record.resumes = result.resumes
        except QuireError as error:
            record.error = f"{type(error).__name__} ({error.code.name}): {error}"
        record.ended = loop.time()
        self._count(record)

    def _count(self, record: StreamRecord) -> None:
        self.counts.update(
            streams=1,
            tokens=record.num_tokens,
            lost=record.lost,
            repeated=record.repeated,
            changed=record.changed,
            errors=int(bool(record.error)),
            resumes=record.resumes,
        )
