"""`quire chat`: one question, or a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time

from quire_client.errors import QuireError
from quire_client.requests.chat import read_image
from quire_client.sync import Client
from quire_client.types import GenerateResult, Message

from quire_cli.commands.generate import result_fields, sampling_options, show_cost, show_stream, wait_for_model
from quire_cli.connection import connect
from quire_cli.output import complain, describe, to_json, write

PROMPT = "you> "
HELP = "Ctrl-C stops an answer, /quit or Ctrl-D exits, /new starts a new conversation."


def run(args: argparse.Namespace) -> int:
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
