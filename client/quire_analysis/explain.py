"""`quire explain`: why a stored answer has its token at a position, and how it continues with other parameters.

The request is sent again with the output before the position, so its token is drawn again with the same noise.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.v1 import inference_pb2 as pb
from quire.v1 import session_pb2, types_pb2
from quire_cli.connection import connect
from quire_cli.output import complain, to_json
from quire_client import convert
from quire_client.requests.generate import generate_request
from quire_client.sync import Client
from quire_client.types import TokenLogprob

from quire_analysis.differences import first_difference

NUM_TOP = 20
TIMEOUT_S = 600.0
GREEDY_BELOW = 1e-5  # temperature
MASK = 0xFFFFFFFF
RAW = {"logprobs_mode": types_pb2.LOGPROBS_MODE_RAW}
FINAL = {"logprobs_mode": types_pb2.LOGPROBS_MODE_PROCESSED}
RULED = {**FINAL, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "top_a": 0.0, "min_p": 1e-30}  # no filters
KEPT = ("model", "adapter", "prompt", "media", "truncate_prompt_tokens", "sampling", "stop", "continuation",
        "scheduling")  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """One sample of an answer: its request with the seed, and its output."""

    client: Client
    request: pb.GenerateRequest
    sample: int
    token_ids: Sequence[int]

    def after(self, position: int) -> pb.GenerateRequest:
        """The request, continued after the output before a position. The other samples have ended."""
        values = {field.name: value for field, value in self.request.ListFields() if field.name in KEPT}
        request = pb.GenerateRequest(**values)
        for i in range(max(1, request.sampling.n)):
            request.continuation.samples.add(index=i, finished=i != self.sample)
        request.continuation.samples[self.sample].output_token_ids.extend(self.token_ids[:position])
        return request

    def send(self, request: pb.GenerateRequest) -> list[pb.Chunk]:
        """The new output of the sample."""
        events = self.client.unary(
            lambda gateway: lambda message, **more: list(gateway.stub.Generate(message, **more)), request, TIMEOUT_S
        )
        return [event.chunk for event in events if event.HasField("chunk") and event.chunk.index == self.sample]

    def draw(self, position: int, **sampling: Any) -> TokenLogprob:
        """The token at a position with these parameters, and the most likely ones. Raises ValueError."""
        request = self.after(position)
        request.sampling.MergeFrom(types_pb2.SamplingParams(**sampling))
        request.stop.max_tokens = position + 1
        request.stop.min_tokens = min(request.stop.min_tokens, position + 1)
        request.output.logprobs = NUM_TOP
        for chunk in self.send(request):
            if chunk.token_ids:
                return convert.token_logprobs(chunk.logprobs, chunk.token_ids)[0]
        raise ValueError(f"the model gives no token at {position}: the output before it has ended")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0; 1 if the model does not give the token again; 2 if the answer or a parameter is not readable."""
    with connect(args) as client:
        try:
            answer = _stored(args, client)
            position = len(answer.token_ids) - 1 if args.token is None else args.token
            if not 0 <= position < len(answer.token_ids):
                raise ValueError(f"--token {position}: the sample has {len(answer.token_ids)} output tokens")
            found = explain(answer, position)
            if args.what_if:
                found["what_if"] = what_if(answer, position, args.what_if)
        except (ValueError, TypeError) as error:
            complain(f"{args.answer}: {error}")
            return 2
    print(to_json(found))
    return 0 if found["is_reproduced"] else 1


def _stored(args: argparse.Namespace, client: Client) -> StoredAnswer:
    asked = session_pb2.GetSessionRequest(session_id=args.answer, with_content=True)
    found = client.unary(lambda gateway: gateway.sessions.GetSession, asked)
    if args.sample >= len(found.outputs):
        raise ValueError(f"--sample {args.sample}: the answer has {len(found.outputs)} samples")
    return StoredAnswer(client, found.request, args.sample, found.outputs[args.sample].ids)


def explain(answer: StoredAnswer, position: int) -> dict[str, Any]:
    """The distributions of the model, after the rules of the request, and after its filters; the noise; the runner-up.

    A token without a number is not in a distribution, or not among its most likely tokens.
    """
    params, taken = answer.request.sampling, answer.token_ids[position]
    raw, ruled, final = (answer.draw(position, **mode) for mode in (RAW, RULED, FINAL))
    is_greedy, num_kept = params.temperature < GREEDY_BELOW, final.num_kept or 0
    entries = {"raw": raw, "ruled": ruled, "final": final}
    listed = {name: _listed(entry) for name, entry in entries.items()}
    tokens: Any = [one for entry in entries.values() for one in (*entry.top, entry)]
    texts = {one.token_id: one.token for one in tokens}
    if not is_greedy and num_kept > NUM_TOP:  # the runner-up may be less likely than the listed tokens
        second = answer.draw(position, **FINAL, banned_token_ids=[taken])
        texts[second.token_id] = second.token
        listed["final"].setdefault(second.token_id, second.logprob + math.log1p(-math.exp(final.logprob)))
    weights = listed["ruled" if is_greedy else "final"]
    rows: list[dict[str, Any]] = []
    for token, text in texts.items():
        noise = 0.0 if is_greedy else gumbel_noise(params.seed, position, answer.sample, token or 0)
        numbers = {name: values.get(token) for name, values in listed.items()}
        score = weights[token] + noise if token in weights else None
        rows.append({"token_id": token, "text": text, **numbers, "noise": noise, "score": score})
    rows.sort(key=lambda row: -math.inf if row["score"] is None else row["score"], reverse=True)
    scores = [row["score"] for row in rows if row["score"] is not None]
    return {
        "position": position,
        "token_id": taken,
        "is_reproduced": taken == final.token_id == rows[0]["token_id"],
        "logprob": final.logprob,
        "raw_logprob": final.raw_logprob,
        "num_allowed": ruled.num_kept,
        "num_kept": num_kept,
        "margin": scores[0] - scores[1] if len(scores) > 1 else None,
        "tokens": rows,
    }


def _listed(entry: TokenLogprob) -> dict[int | None, float]:
    tokens: Any = (*entry.top, entry)
    return {one.token_id: one.logprob for one in tokens if one.logprob > -math.inf}


def gumbel_noise(seed: int, position: int, sample: int, token_id: int) -> float:
    """The noise of a token id at an output position of a sample (docs/adr/0004-sampling-without-state.md)."""
    a, b, c, d = token_id >> 2, position, sample, 0
    keys = seed & MASK, seed >> 32
    for _ in range(10):  # rounds of Philox
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (second >> 32) ^ b ^ keys[0], second & MASK, (first >> 32) ^ d ^ keys[1], first & MASK
        keys = (keys[0] + 0x9E3779B9) & MASK, (keys[1] + 0xBB67AE85) & MASK
    uniform = ((a, b, c, d)[token_id & 3] + 0.5) * 2.0**-32
    (rounded,) = struct.unpack("<f", struct.pack("<f", -math.log(-math.log1p(-uniform))))
    return float(rounded)


def what_if(answer: StoredAnswer, position: int, words: Sequence[str]) -> dict[str, Any]:
    """The output from a position on with other parameters, each NAME=VALUE with a value in JSON."""
    changes = {name: json.loads(value) for name, _, value in (word.partition("=") for word in words)}
    changed, request = generate_request("", None, None, changes), answer.after(position)
    changed.ClearField("prompt")
    request.MergeFrom(changed)
    request.joins_events = False
    if changed.model or changed.adapter:
        request.continuation.revision = ""
    chunks = answer.send(request)
    token_ids = [token for chunk in chunks for token in chunk.token_ids]
    first = first_difference([*answer.token_ids[:position], *token_ids], answer.token_ids)
    text = "".join(chunk.text for chunk in chunks)
    return {"changes": changes, "first_difference": first, "token_ids": token_ids, "text": text}
