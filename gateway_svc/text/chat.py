"""Chat templates: renders a checkpoint's Jinja template with the same result as transformers.

A template is untrusted data, so it runs in an immutable sandbox, in a process with limits (template_process.py).
Everything it raises becomes a ChatTemplateError with the template's message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, TypeAlias

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

ChatMessages: TypeAlias = Sequence[Mapping[str, Any]]

RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
TOOLS_USE = re.compile(r"\{[%{](?:(?![%}]\}).)*?\btools\b", re.DOTALL)  # in a statement or an expression
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # the final space shows whether the template strips the content


class ChatTemplateError(ValueError):
    """A conversation cannot be rendered. The message gives the cause; an error that the template raised is quoted."""


class ChatTemplate:
    """One compiled template. An invalid source raises only in `render`, so text and token prompts still work."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._problem = ""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            self._problem = f"the model's chat template has a syntax error in line {error.lineno}: {error.message}"
        except Exception as error:  # raised by Python's compiler, e.g. for a template that is nested too deeply
            self._problem = f"the model's chat template cannot be compiled: {type(error).__name__}: {error}"

    @property
    def uses_tools(self) -> bool:
        """Whether the template reads the variable `tools`."""
        return TOOLS_USE.search(self.source) is not None

    def render(
        self,
        messages: ChatMessages,
        *,
        tools: Sequence[Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation as text: ready for an assistant turn, or with the last message left incomplete.

        Messages are mappings with role and content. Raises ChatTemplateError.
        """
        if self._problem:
            raise ChatTemplateError(self._problem)
        if tools and not self.uses_tools:
            raise ChatTemplateError(
                "the model's chat template does not use tools, so the model would not see them; remove the tools, or "
                "name a template that uses them"
            )
        if "developer" not in self.source:
            messages = [_without_developer(message) for message in messages]
        variables = {**self._special_tokens, **(template_kwargs or {})}
        taken = [name for name in RESERVED if name in variables and name != "documents"]
        if taken:
            raise ChatTemplateError(f"template variable {taken[0]!r} is set by the server; remove {taken[0]!r}")
        if not continue_final_message:
            return self._render(messages, tools, variables, add_generation_prompt=add_generation_prompt)
        return self._render_open(messages, tools, variables)

    def _render(
        self, messages: ChatMessages, tools: Sequence[Any] | None, variables: dict[str, Any], **flags: bool
    ) -> str:
        variables = {"documents": None, **variables}
        try:
            return self._template.render(messages=[dict(m) for m in messages], tools=tools, **variables, **flags)
        except jinja2.exceptions.SecurityError as error:
            raise ChatTemplateError(
                f"the model's chat template uses an operation that the sandbox forbids: {error}"
            ) from None
        except jinja2.exceptions.UndefinedError as error:
            raise ChatTemplateError(f"the model's chat template uses an undefined value: {error}") from None
        except jinja2.exceptions.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template refuses this chat: {error}") from None
        except MemoryError:
            raise ChatTemplateError("the model's chat template needs more memory than is allowed") from None
        except Exception as error:  # templates call arbitrary string and list methods
            kind = type(error).__name__
            raise ChatTemplateError(f"the model's chat template failed with {kind}: {error}") from None

    def _render_open(self, messages: ChatMessages, tools: Sequence[Any] | None, variables: dict[str, Any]) -> str:
        """Render with a tag after the last content and cut there, which removes the template's end of the message."""
        final = str(messages[-1].get("content", ""))
        tagged = [*messages[:-1], {**messages[-1], "content": final + CONTINUE_TAG}]
        text = self._render(tagged, tools, variables, add_generation_prompt=False)
        bare_tag = CONTINUE_TAG.strip()
        if bare_tag not in text or final.strip() not in text:
            raise ChatTemplateError(
                "continue_final_message: the model's chat template changes or drops the last message's content, so the "
                "message cannot be continued"
            )
        cut = text.rindex(bare_tag)
        is_spacing_kept = text[cut : cut + len(CONTINUE_TAG)] == CONTINUE_TAG
        return text[:cut] if is_spacing_kept else text[:cut].rstrip()


def _without_developer(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace OpenAI's role developer with system, for templates that know only system."""
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _TemplateDict()
    environment.globals["namespace"] = _TemplateNamespace
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """tojson without Jinja's HTML escapes, which would change the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _TemplateDict:
    """`dict` without the class object, whose attributes give access outside of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """`namespace` without names that begin with an underscore, which also give access outside of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} starts with an underscore")


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads a plain set)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())
