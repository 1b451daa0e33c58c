"""best_of: computes more samples than it sends, and sends those with the highest sums of log probabilities.

journals of all samples --ComputedSample--> end and sum of each --BestSamples--> journals of the best n, best first
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.internal.v1 import scheduler_pb2
from quire.v1 import types_pb2 as types

from gateway_svc.answer.stream import SampleStream
from gateway_svc.request.plan import GenerationPlan
from gateway_svc.request.validation import BestOf
from gateway_svc.schedulers.logprobs import PromptLogprobJournal
from gateway_svc.schedulers.scheduler_request import SampleJournal, SchedulerRequest
from gateway_svc.text.detokenizer import SampleText
from svc_common.errors import InvalidRequestError

INCOMPLETE = (types.FINISH_REASON_ERROR, types.FINISH_REASON_ABORTED)


class ComputedSample:
    """One computed sample. Finds the end of its output, which may be before the last token if a stop string matched."""

    def __init__(self, index: int, plan: GenerationPlan, text: SampleText | None) -> None:
        self.index = index
        self.total = 0.0  # sum of the log probabilities of its output, set when it is done
        self._stream = SampleStream(index, plan, text)

    @property
    def is_done(self) -> bool:
        return self._stream.is_done

    @property
    def is_stopped(self) -> bool:
        return self._stream.is_stopped

    @property
    def num_output(self) -> int:
        return self._stream.num_output

    @property
    def rank_key(self) -> tuple[bool, float, int]:
        """The best sample has the smallest key. Samples that failed or were aborted come last."""
        return self._stream.reason in INCOMPLETE, -self.total, self.index

    def advance(self, journal: SampleJournal) -> None:
        """Read the new tokens of its journal, whose log probabilities stay there."""
        tokens = SampleJournal(journal.outputs)
        tokens.finish = journal.finish
        for _ in self._stream.advance(tokens):
            pass
        if self.is_done and journal.logprobs is not None:
            self.total = journal.logprobs.total(self.num_output)


class BestSamples:
    """A request as GenerationStream reads it: no sample has news until all computed samples have ended; then the best
    ones have all of their news at once. Log probabilities of the prompt come as they are computed.
    """

    def __init__(self, request: SchedulerRequest, plan: GenerationPlan, best_of: BestOf) -> None:
        self.samples: Sequence[SampleJournal] = ()  # the best ones, once they are known
        self._request = request
        self._keeps_logprobs = plan.output.logprobs is not None
        self._n = plan.sampling.params.n
        self._known = best_of.known
        self._computed = _computed_samples(plan, best_of.num_computed)

    @property
    def prompt_logprobs(self) -> PromptLogprobJournal | None:
        return self._request.prompt_logprobs

    @property
    def is_resumed(self) -> bool:
        return self._request.is_resumed

    @property
    def is_due(self) -> bool:
        return False  # news of a computed sample seldom complete the request

    async def wait_accepted(self) -> None:
        """Wait until the request is queued. Raises the refusal."""
        await self._request.wait_accepted()

    async def wait(self) -> list[int]:
        """Wait for news of the request. Returns the indices of the best samples when all have ended, and none before.

        Raises a failure, or InvalidRequestError if the client has other output.
        """
        for index in await self._request.wait():
            self._advance(self._computed[index])
        if not all(sample.is_done for sample in self._computed):
            return []
        self.samples = self._choose()
        self._check_known()
        return list(range(self._n))

    def close_sample(self, index: int) -> None:
        """Nothing to cancel: a sample that is sent has ended."""

    def _advance(self, sample: ComputedSample) -> None:
        if sample.is_done:
            return
        was_stopped = sample.is_stopped
        sample.advance(self._request.samples[sample.index])
        if sample.is_stopped and not was_stopped:
            self._request.close_sample(sample.index)

    def _choose(self) -> list[SampleJournal]:
        ranked = sorted(self._computed, key=lambda sample: sample.rank_key)
        chosen = [self._journal_of(sample) for sample in ranked[: self._n]]
        best = chosen[0].finish
        if best is not None:
            discarded = ranked[self._n :]
            best.usage.discarded_tokens = sum(sample.num_output for sample in discarded)
            for sample in discarded:
                finish = self._request.samples[sample.index].finish
                if finish is not None:
                    best.usage.processor_seconds += finish.usage.processor_seconds
                    best.usage.block_seconds += finish.usage.block_seconds
        return chosen

    def _journal_of(self, sample: ComputedSample) -> SampleJournal:
        """The journal of a sample, without log probabilities that the client does not want."""
        journal = self._request.samples[sample.index]
        chosen = SampleJournal(journal.outputs, journal.logprobs if self._keeps_logprobs else None)
        finish = scheduler_pb2.SampleFinished()
        if journal.finish is not None:
            finish.CopyFrom(journal.finish)
        finish.cumulative_logprob = sample.total
        chosen.finish, chosen.versions = finish, journal.versions
        return chosen

    def _check_known(self) -> None:
        """Check that the samples continue the output that the client has. Workers in exact mode compute it again."""
        for index, (known, journal) in enumerate(zip(self._known, self.samples, strict=True)):
            if journal.outputs[: len(known)] != known:
                raise InvalidRequestError(
                    f"continuation: output_token_ids of sample {index} are not the beginning of its output, which was "
                    "computed again because of sampling.best_of; send the request again without a continuation",
                    field="continuation.samples",
                )


def _computed_samples(plan: GenerationPlan, num: int) -> list[ComputedSample]:
    """All samples of a request, with text only if there are stop strings."""
    texts = plan.new_texts(num) if plan.sampling.stop.stop else [None] * num
    output = replace(plan.output, logprobs=None, answer=None, wants_text=False, wants_token_ids=False)
    silent = replace(plan, output=output, resume=replace(plan.resume, finished=(False,) * num, replay=None))
    return [ComputedSample(index, silent, text) for index, text in enumerate(texts)]
