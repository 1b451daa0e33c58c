"""`quire generate`: continue a prompt."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any, cast

from quire_client.requests.generate import GenerateOptions
from quire_client.sync import Client, GenerateStream
from quire_client.types import GenerateResult, ModelInfo, Sample, Status

from quire_cli.connection import connect
from quire_cli.output import AnswerWriter, complain, read_stdin, sample_fields, score_lines, to_json, usage_line, write
from request_fields.fields import FIELDS

MODEL_TIMEOUT_S = 120.0
POLL_S = 0.2
OPTIONS = ("model", "n", "request_id", "json_schema", "images", *(field.option for field in FIELDS if field.has_flag))


def run(args: argparse.Namespace) -> int:
    if args.prompt is not None and args.tokens is not None:
        complain("both a prompt and --tokens are set; give a prompt or --tokens, not both")
        return 2
    if args.prompt is None and args.tokens is None and sys.stdin.isatty():
        complain('no prompt: give one, e.g. quire generate "Once upon a time", or --tokens 1,2,3')
        return 2
    prompt = read_stdin() if args.prompt is None and args.tokens is None else args.prompt
    with connect(args) as client:
        wait_for_model(client, args)
        started = time.monotonic()
        with client.stream(prompt, token_ids=args.tokens, **sampling_options(args)) as stream:
            result = stream.result() if args.json else show_stream(stream, is_single=args.n in (None, 1))
    if args.receipt is not None:
        args.receipt.write_text("".join(f"{sample.receipt}\n" for sample in result.samples if sample.receipt))
    if args.json:
        print(to_json(result_fields(result)))
    else:
        for line in score_lines(result):
            print(line)
        show_cost(result, time.monotonic() - started)
    return 0


def resume(args: argparse.Namespace) -> int:
    """`quire resume`: continue a request by its id."""
    with connect(args) as client:
        started = time.monotonic()
        with client.resume(args.request_id, after=args.after) as stream:
            result = stream.result() if args.json else show_stream(stream, is_single=stream.num_samples == 1)
    if args.json:
        print(to_json(result_fields(result)))
    else:
        show_cost(result, time.monotonic() - started)
    return 0


def wait_for_model(client: Client, args: argparse.Namespace) -> None:
    """Wait until a worker serves the model; print a message. After the time limit, the request reports the error."""
    end = time.monotonic() + (args.timeout_s or MODEL_TIMEOUT_S)
    has_said = False
    while not _is_served(client.models(), args.model) and time.monotonic() < end:
        if not has_said:
            print(f"waiting for the model: {_workers_text(client.status())}", file=sys.stderr, flush=True)
            has_said = True
        time.sleep(POLL_S)


def _is_served(models: Sequence[ModelInfo], name: str) -> bool:
    """Whether a request for `name` need not wait: a worker is ready, or waiting would not prevent the error."""
    asked = [model for model in models if model.name == name] if name else models
    return any(model.ready_workers for model in asked) if asked else bool(models)


def _workers_text(status: Status) -> str:
    workers = [worker for scheduler in status.schedulers for worker in scheduler.workers]
    if not workers:
        return "no worker is ready yet" if status.is_summary else "no worker has registered yet"
    return ", ".join(f"{worker.worker_id} is {worker.state}" for worker in workers)


def sampling_options(args: argparse.Namespace) -> GenerateOptions:
    """Options from the flags that are set; other options keep the model's defaults."""
    given = {name: getattr(args, name, None) for name in OPTIONS}
    given["receipt"] = getattr(args, "receipt", None) is not None
    return cast(GenerateOptions, {name: value for name, value in given.items() if _is_given(value)})


def _is_given(value: object) -> bool:
    return value is not None and value is not False and value != ""  # 0 is a value (greedy, off)


def show_stream(stream: GenerateStream, *, is_single: bool = True) -> GenerateResult:
    """Print text as it is generated. Several samples are printed at the end, because their chunks interleave."""
    writer = AnswerWriter()
    for delta in stream:
        if is_single:
            writer.write(delta)
    result = stream.result()
    if is_single:
        writer.end()
        if not (result.text or result.reasoning or result.tool_calls):
            write(f"{shown(result.samples[0])}\n")
        return result
    for sample in result.samples:
        print(f"--- sample {sample.index} ({sample.finish_reason.value})\n{shown(sample)}")
    return result


def shown(sample: Sample) -> str:
    """A sample's text, or its token ids if the model has no tokenizer."""
    if sample.text or not sample.token_ids:
        return sample.text
    return f"token ids: {','.join(map(str, sample.token_ids))}"


def show_cost(result: GenerateResult, seconds: float) -> None:
    """Print finish reasons, tokens and time if stderr is a terminal."""
    if sys.stderr.isatty():
        reasons = ", ".join(sample.finish_reason.value for sample in result.samples)
        print(f"[{reasons}; {usage_line(result.usage, seconds)}]", file=sys.stderr)


def result_fields(result: GenerateResult) -> dict[str, Any]:
    """The output of --json: the request, fields of the sample (or a list of samples), and the usage."""
    request: dict[str, Any] = {"request_id": result.request_id, "model": result.model, "seed": result.seed}
    if result.prompt_logprobs:
        request["prompt_logprobs"] = result.prompt_logprobs
    if len(result.samples) == 1:
        return {**request, **sample_fields(result.samples[0]), "usage": result.usage}
    return {**request, "samples": [sample_fields(sample) for sample in result.samples], "usage": result.usage}
