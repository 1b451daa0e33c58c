"""The process that renders the chat templates of one model, under limits: it may be killed at any time.

    python -m gateway_svc.request.sandbox.template_process

Messages (`to_frame` of child.py); `error` is empty if the message succeeded:

    {"templates": {name: source}, "special_tokens": {name: text}}                 -> {"error": ...}
    {"template": name, "messages": [...], "options": {...}, "max_chars": ...}     -> {"error": ..., "text": ...}
"""

from __future__ import annotations

from typing import Any

from gateway_svc.request.sandbox.child import answer_messages
from gateway_svc.text.chat import ChatTemplate, ChatTemplateError

MAX_MEMORY_BYTES = 512 << 20  # limit of the address space; more is a MemoryError in the template


class Templates:
    """The templates of one model. A template is compiled when it is used first."""

    def __init__(self) -> None:
        self._sources: dict[str, str] = {}
        self._special_tokens: dict[str, str] = {}
        self._compiled: dict[str, ChatTemplate] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one message."""
        if "templates" in request:
            self._sources, self._special_tokens = request["templates"], request["special_tokens"]
            self._compiled.clear()
            return {"error": ""}
        try:
            text = self._template(request["template"]).render(request["messages"], **request["options"])
        except ChatTemplateError as error:
            return {"error": str(error)}
        if len(text) > request["max_chars"]:
            most = request["max_chars"]
            return {"error": f"the model's chat template wrote {len(text)} characters; at most {most} are allowed here"}
        return {"error": "", "text": text}

    def _template(self, name: str) -> ChatTemplate:
        if name not in self._compiled:
            self._compiled[name] = ChatTemplate(self._sources[name], self._special_tokens)
        return self._compiled[name]


def _load_modules() -> None:
    """Import what Python and Jinja import late, because later the process cannot open files."""
    for source in ("{{ strftime_now('%d %b %Y') }}{{ messages[0] | tojson }}", "{{ 1 / 0 }}", "{{ messages.a.b }}"):
        try:
            ChatTemplate(source, {}).render([{"role": "user", "content": "é"}])
        except ChatTemplateError:
            continue


if __name__ == "__main__":
    _load_modules()
    answer_messages(Templates().answer, MAX_MEMORY_BYTES)
