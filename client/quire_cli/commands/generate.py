"""`quire generate`, `quire resume` and `quire chat`: continue a prompt or a request, and converse."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Any, cast

from quire_client.errors import QuireError
from quire_client.requests.chat import read_image
from quire_client.requests.generate import GenerateOptions
from quire_client.sync import Client, GenerateStream
from quire_client.types import GenerateResult, Message, ModelInfo, Sample, Status

from quire_cli.connection import connect
from quire_cli.output import (
    AnswerWriter,
    complain,
    describe,
    read_stdin,
    sample_fields,
    score_lines,
    to_json,
    usage_line,
    write,
)
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


PROMPT = "you> "
HELP = "Ctrl-C stops an answer, /quit or Ctrl-D exits, /new starts a new conversation."


def chat(args: argparse.Namespace) -> int:
    if args.json and args.question is None:
        complain('--json needs a question: quire chat "..." --json')
        return 2
    with connect(args) as client:
        wait_for_model(client, args)
        if args.question is not None:
            return _ask_once(client, args)
        return Conversation(client, args).run()


def _ask_once(client: Client, args: argparse.Namespace) -> int:
    messages = [*_system(args), _question(args.question, args.image)]
    started = time.monotonic()
    with client.stream_chat(messages, **sampling_options(args)) as stream:
        result = stream.result() if args.json else show_stream(stream)
    if args.json:
        print(to_json(result_fields(result)))
        return 0
    show_cost(result, time.monotonic() - started)
    return 0


def _question(text: str, images: list[str]) -> Message:
    """A question about images, which come before its text."""
    return (
        Message("user", parts=(*(read_image(image, "--image") for image in images), text))
        if images
        else Message("user", text)
    )


def _system(args: argparse.Namespace) -> list[Message]:
    return [Message("system", args.system)] if args.system else []


class Conversation:
    """Turns until Ctrl-D. A turn that fails or is stopped is not kept in the history."""

    def __init__(self, client: Client, args: argparse.Namespace) -> None:
        self._client = client
        self._args = args
        self._options = sampling_options(args)
        self._messages = _system(args)
        self._is_tty = sys.stdin.isatty()

    def run(self) -> int:
        if self._is_tty:
            _enable_line_editing()
            print(f"{self._model_names()}. {HELP}")
        while (line := self._read_line()) is not None:
            question = line.strip()
            if question in ("/quit", "/exit"):
                break
            if question == "/new":
                self._messages = _system(self._args)
                print("(a new conversation)")
            elif question.startswith("/"):
                print(HELP)
            elif question:
                self._turn(question)
        return 0

    def _turn(self, question: str) -> None:
        images = self._args.image if self._messages == _system(self._args) else []  # images of the first turn
        messages = [*self._messages, _question(question, images)]
        try:
            result = self._answer(messages)
        except KeyboardInterrupt:
            print("\n(stopped)")
        except QuireError as error:
            write("\n")
            complain(describe(error))
        else:
            self._messages = [*messages, result.samples[0].as_message()]

    def _answer(self, messages: list[Message]) -> GenerateResult:
        with self._client.stream_chat(messages, **self._options) as stream:
            return show_stream(stream)

    def _read_line(self) -> str | None:
        """The next line of input; None at its end. Ctrl-C at the prompt returns an empty line."""
        try:
            return input(PROMPT if self._is_tty else "")
        except EOFError:
            if self._is_tty:
                write("\n")
            return None
        except KeyboardInterrupt:
            write("\n")
            return ""

    def _model_names(self) -> str:
        if self._args.model:
            return f"Model: {self._args.model}"
        return f"Model: {', '.join(model.name for model in self._client.models()) or 'none yet'}"


def _enable_line_editing() -> None:
    """Enable arrow keys and history if Python has readline."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
