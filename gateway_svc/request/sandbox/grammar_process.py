"""The process that compiles grammars of requests, under limits on memory and CPU time: it may be killed at any time.

    python -m gateway_svc.request.sandbox.grammar_process

Reads messages from stdin and answers each on stdout (`to_frame` of child.py):

    {"tokenizer": key, "json": ..., "vocab_size": ..., "eos_token_ids": [...]}    -> {"error": ...}
    {"tokenizer": key, "kind": ..., "text": ..., "schemas": [...]}                -> {"error": ..., "text": ...}

An empty error means success. `text` is the grammar in the form that workers compile. `schemas` are the JSON Schemas in
it: if one of them causes the error, `place` is its number and the path of the part that cannot be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from gateway_svc.request.sandbox.child import answer_messages
from grammars.compiler import DeadPartError, GrammarCompiler, UnsupportedTokenizerError, located_error, normalized
from grammars.schemas import GrammarError
from request_fields.parameters import GrammarKind

MAX_MEMORY_BYTES = 4 << 30  # limit of the address space; a process that needs more ends


def _answer(compilers: dict[str, GrammarCompiler], request: dict[str, Any]) -> dict[str, Any]:
    try:
        if "json" in request:
            compilers[request["tokenizer"]] = GrammarCompiler(
                request["json"], request["vocab_size"], request["eos_token_ids"]
            )
            return {"error": ""}
        kind = GrammarKind(request["kind"])
        text = normalized(kind, request["text"])
        compilers[request["tokenizer"]].compile(kind, text)
        compilers[request["tokenizer"]].check_parts(request.get("schemas", ()))
    except DeadPartError as error:
        return {"error": str(error), "place": error.place}
    except (GrammarError, UnsupportedTokenizerError) as error:
        return _error_answer(str(error) or type(error).__name__, request.get("schemas", ()))
    return {"error": "", "text": text}


def _error_answer(error: str, schemas: Sequence[str]) -> dict[str, Any]:
    try:
        found = located_error(schemas)
    except GrammarError:
        found = None
    return {"error": error} if found is None else {"error": found[2], "place": found[:2]}


if __name__ == "__main__":
    answer_messages(partial(_answer, {}), MAX_MEMORY_BYTES)
