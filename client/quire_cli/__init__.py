"""The `quire` command: starts a stack, sends requests, shows status.

The module of a command is imported only when the command runs, so that `quire --help` and flag errors are fast.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence

INTERRUPTED = 130
# gRPC's older poller: a message wakes one thread on its way to the event loop instead of four.
GRPC_EXPERIMENTS = "-event_engine_client,-event_engine_listener,-event_engine_for_all_other_endpoints"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. An error is one line on stderr, never a traceback."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # gRPC reads this on import; by default it logs to stderr
    os.environ.setdefault("GRPC_EXPERIMENTS", GRPC_EXPERIMENTS)
    from quire_client.errors import QuireError

    from quire_cli.arguments import make_parser
    from quire_cli.output import complain, describe

    parser = make_parser()
    if "_ARGCOMPLETE" in os.environ:  # set by the script of `quire completion`
        import argcomplete

        argcomplete.autocomplete(parser)
    args = parser.parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # replace characters that the terminal cannot encode
    command = importlib.import_module(args.module)
    try:
        return int(getattr(command, args.function)(args))
    except QuireError as error:
        complain(describe(error))
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe (quire generate ... | head); the interpreter must not flush into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        complain(str(error))
        return 1
