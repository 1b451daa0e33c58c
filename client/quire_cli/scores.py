"""Log probabilities as text: one line per token, with the most likely tokens at its position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire_client.types import GenerateResult, TokenLogprob, TopLogprob


def score_lines(result: GenerateResult) -> Iterator[str]:
    """The log probabilities of a result; nothing if none were requested."""
    if any(result.prompt_logprobs):
        yield "--- prompt: log probability, rank, token, most likely tokens"
        yield from _lines(result.prompt_logprobs)
    for sample in result.samples:
        if sample.logprobs:
            yield (
                f"--- sample {sample.index}: log probability, rank, token, most likely tokens "
                f"(sum {sample.cumulative_logprob:.3f})"
            )
            yield from _lines(sample.logprobs)


def _lines(entries: Sequence[TokenLogprob | None]) -> Iterator[str]:
    for entry in entries:
        if entry is None:  # the first token of a prompt
            continue
        top = "  ".join(f"{_shown(item)} {item.logprob:.3f}" for item in entry.top)
        yield f"{entry.logprob:9.3f} {entry.rank:6d}  {_shown(entry)}{f'  |  {top}' if top else ''}"


def _shown(token: TokenLogprob | TopLogprob) -> str:
    """The token's text in quotes, or its id if the server sent no text."""
    return repr(token.token.decode(errors="backslashreplace")) if token.token else f"#{token.token_id}"
