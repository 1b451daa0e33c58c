"""The process that compiles grammars of requests, under limits on memory and CPU time: it may be killed at any time.

    python -m gateway_svc.grammar_process        started by gateway_svc.grammar_checker only

Reads messages from stdin and answers each on stdout (grammar_frames.py):

    {"tokenizer": key, "json": ..., "vocab_size": ..., "eos_token_ids": [...]}    -> {"error": ...}
    {"tokenizer": key, "kind": ..., "text": ...}                                  -> {"error": ..., "text": ...}

An empty error means success. `text` is the grammar in the form that workers compile.
"""

from __future__ import annotations

import resource
import signal
import sys
from typing import Any

from gateway_svc.grammar_frames import GRAMMAR_CPU_S, read_frame, to_frame
from grammars.compiler import GrammarCompiler, GrammarError, UnsupportedTokenizerError, normalized
from request_fields.grammar import GrammarKind

MAX_MEMORY_BYTES = 4 << 30  # of address space; a process that needs more ends
TOKENIZER_CPU_S = 60


def main() -> None:
    """Answer frames until stdin ends."""
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the gateway, which ends this process
    compilers: dict[str, GrammarCompiler] = {}
    while (request := read_frame(sys.stdin.buffer)) is not None:
        answer = to_frame(_answer(compilers, request))
        limit_cpu(0)
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


def _answer(compilers: dict[str, GrammarCompiler], request: dict[str, Any]) -> dict[str, Any]:
    try:
        if "json" in request:
            limit_cpu(TOKENIZER_CPU_S)
            compilers[request["tokenizer"]] = GrammarCompiler(
                request["json"], request["vocab_size"], request["eos_token_ids"]
            )
            return {"error": ""}
        limit_cpu(GRAMMAR_CPU_S)
        kind = GrammarKind(request["kind"])
        text = normalized(kind, request["text"])
        compilers[request["tokenizer"]].compile(kind, text)
    except (GrammarError, UnsupportedTokenizerError) as error:
        return {"error": str(error) or type(error).__name__}
    return {"error": "", "text": text}


def limit_cpu(seconds: float) -> None:
    """Let the kernel kill this process with SIGPROF after this much more CPU time of all its threads."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    main()
