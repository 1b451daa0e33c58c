"""Flags, help and examples of `quire batch`."""

from __future__ import annotations

import argparse

from quire_cli.values import at_least, positive, priority

BATCH_EXAMPLES = """\
examples:
  quire batch input.jsonl -o output.jsonl
  quire batch input.jsonl -o output.jsonl --concurrency 64 --base-url http://a:8000,http://b:8000

A line of the input:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "demo", "messages": [...]}}
The output has one line per request, in the order of completion. After Ctrl-C or a crash, run the same command again:
it skips the requests that are already in the output.
Exit code: 0; 1 if requests are unanswered (run again); 2 for an invalid file or flag; 3 if all are answered, but some
with an error; 130 after Ctrl-C.
"""


def add_batch_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("input", metavar="INPUT", help="requests, one JSON object per line")
    add("-o", "--output", required=True, metavar="FILE", help="answers are appended to this file")
    add(
        "--base-url",
        metavar="URL,...",
        help="HTTP API of one or more gateways (default: $QUIRE_BASE_URL, else http://localhost:8000)",
    )
    add("--concurrency", type=at_least(1), default=32, metavar="N", help="requests in flight at once (default 32)")
    add(
        "--priority",
        type=priority,
        default=1000,
        metavar="N",
        help="priority of requests whose body has none (default 1000: after all others)",
    )
    add(
        "--retry-timeout-s", type=positive, default=60.0, metavar="S", help="how long a request is retried (default 60)"
    )
    add("--timeout-s", type=positive, default=600.0, metavar="S", help="time limit of one attempt (default 600)")
    add("--api-key", metavar="KEY", help="API key (default: $QUIRE_API_KEY)")
    add("--json", action="store_true", help="print the summary as one JSON line")
