"""Tools of a body, and the calls that they cause. Pure.

The model knows each tool as a function; that of a custom tool has one argument, the input. A row of KINDS says what an
item of a call has, and how it becomes the arguments that the model wrote, and back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway_svc.http.json_text import Json, invalid, list_of, object_of, optional, shown, text_at, text_of
from gateway_svc.request.tools import MAX_TOOLS
from gateway_svc.text.lark import slashed
from grammars.schemas import INPUT, INPUT_GRAMMAR

NAMESPACE = "namespace"  # type of a tool that has tools, and the field of their calls
FUNCTION, CUSTOM, SEARCH, LOCAL_SHELL, SHELL = "function", "custom", "tool_search", "local_shell", "shell"
ADDITIONAL = "additional_tools"  # type of an item that has tools
SERVER_SIDE = "web_search"  # ignored: stock agents send it, and go on without
TEXT = {"type": "string"}
COMMAND = {"type": "array", "items": TEXT}
MILLISECONDS = {"type": "integer", "description": "Time limit in milliseconds."}


ONE_INPUT = {"type": "object", "properties": {INPUT: TEXT}, "required": [INPUT], "additionalProperties": False}


def _shell(description: str, required: str, properties: Json) -> Json:
    parameters = {"type": "object", "properties": properties, "required": [required], "additionalProperties": False}
    return {"description": description, "parameters": parameters, "strict": True}


BUILT_IN: Mapping[str, Json] = {  # tools without a definition of their own, by type
    LOCAL_SHELL: _shell(
        "Runs a command on the user's machine.", "command",
        {
            "command": {**COMMAND, "description": "The program and its arguments."}, "working_directory": TEXT,
            "timeout_ms": MILLISECONDS, "env": {"type": "object", "additionalProperties": TEXT},
        },
    ),
    SHELL: _shell(
        "Runs shell commands on the user's machine, each on its own.",
        "commands",
        {"commands": COMMAND, "timeout_ms": MILLISECONDS, "max_output_length": {"type": "integer"}},
    ),
    SEARCH: {
        "description": "Searches for tools that can be called afterwards.",
        "parameters": {"type": "object", "properties": {"query": TEXT}, "required": ["query"]},
    },
}  # fmt: skip


def flat_name(namespace: str, name: str) -> str:
    """The name under which the model knows a tool, which may be one of a namespace."""
    return f"{namespace}__{name}" if namespace else name


# -- the tools of a body ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tools:
    """The functions of the tools, the types of ignored ones, and field names in the body."""

    given: list[Json] = field(default_factory=list)
    ignored: dict[str, None] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)


def found_in(items: Sequence[Json]) -> Iterator[tuple[str, Any]]:
    """The field and the value of the tools that items of the input bring: results of searches, and additional ones."""
    for i, item in enumerate(items):
        if item.get("type") in (f"{SEARCH}_output", ADDITIONAL):
            yield f"input[{i}].tools", item.get("tools")


def tools_of(tools: Any, items: Sequence[Json]) -> Tools:
    """The tools of a body and of its items. Raises InvalidRequestError."""
    result, known = Tools(), set[str]()
    for is_own, (where, some) in ((True, ("tools", tools)), *((False, found) for found in found_in(items))):
        for place, namespace, tool in each_tool(where, some):
            kind = tool.get("type")
            if isinstance(kind, str) and kind.startswith(SERVER_SIDE):
                result.ignored[f"tools.{kind}"] = None
                continue
            name, tool = _for_chat(place, namespace, tool)
            if name in known and not is_own:
                continue  # a tool that was found before
            known.add(name)
            path = f"prompt.chat.tools_json[{len(result.given)}].function"
            result.names[path] = place
            if kind == CUSTOM:
                result.names[f"{path}.parameters.{INPUT_GRAMMAR}"] = f"{place}.format.definition"
            result.given.append({"type": FUNCTION, FUNCTION: {**tool, "name": name}})
            if len(result.given) > MAX_TOOLS:
                raise invalid(place, f"is one of more than {MAX_TOOLS} tools; send fewer")
    return result


def each_tool(where: str, tools: Any) -> Iterator[tuple[str, str, Json]]:
    """The field and the namespace of each tool of a list, and the tool. Raises InvalidRequestError."""
    for i, tool in enumerate(optional(list_of, where, tools) or ()):
        place = f"{where}[{i}]"
        if object_of(place, tool).get("type") != NAMESPACE:
            yield place, "", tool
            continue
        namespace, own = _name_of(place, tool, "a namespace"), tool.get("tools")
        if not isinstance(own, list) or not all(isinstance(one, dict) for one in own):
            raise invalid(f"{place}.tools", f"is {shown(own)}; must be a list of objects")
        for j, one in enumerate(own):
            yield f"{place}.tools[{j}]", namespace, one


def _for_chat(where: str, namespace: str, tool: Json) -> tuple[str, Json]:
    """The name of a tool for the model, and its function."""
    kind = tool.get("type")
    own = {key: value for key, value in tool.items() if key not in ("type", "defer_loading") and value is not None}
    if kind in (FUNCTION, CUSTOM):
        name = flat_name(namespace, _name_of(where, tool, f"a {kind}" if kind == FUNCTION else "a custom tool"))
        return name, own if kind == FUNCTION else _function_of(where, own)
    if kind == SEARCH and tool.get("execution", "server") != "client":
        words = 'tools are searched by the client: set it to "client", or send all tools'
        raise invalid(f"{where}.execution", f"is {shown(tool.get('execution'))}; {words}")
    environment = tool.get("environment")
    if kind == SHELL and isinstance(environment, dict) and environment.get("type") != "local":
        words = 'commands run on the client\'s machine: set it to {"type": "local"}'
        raise invalid(f"{where}.environment", f"is {shown(environment)}; {words}")
    if not isinstance(kind, str) or kind not in BUILT_IN or namespace:
        words = f"is {shown(kind)}, which this server does not run; use {', '.join((FUNCTION, CUSTOM, *BUILT_IN))}"
        raise invalid(f"{where}.type", f"{words} or {NAMESPACE}, or leave the tool out")
    about: Json = {key: own[key] for key in ("description", "parameters") if kind == SEARCH and key in own}
    return kind, {**BUILT_IN[kind], **about}


def _function_of(where: str, tool: Json) -> Json:
    """The function of a custom tool. Its grammar stands in the schema, and for the model in the description."""
    about, form = text_of(f"{where}.description", tool.get("description", "")), tool.get("format", {"type": "text"})
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return {"description": about, "parameters": ONE_INPUT}
    if kind != "grammar":
        raise invalid(f"{where}.format.type", f"is {shown(kind)}; must be text or grammar")
    syntax, definition = form.get("syntax"), form.get("definition")
    if syntax not in ("lark", "regex"):
        raise invalid(f"{where}.format.syntax", f"is {shown(syntax)}; must be lark or regex")
    if not isinstance(definition, str) or not definition:
        raise invalid(f"{where}.format.definition", f"is {shown(definition)}; must be the text of a grammar")
    about = f"{about}\nThe {INPUT} is text of this grammar ({syntax}):\n{definition}".lstrip()
    grammar = definition if syntax == "lark" else f"start: {slashed(definition)}"
    return {"description": about, "parameters": {**ONE_INPUT, INPUT_GRAMMAR: grammar}, "strict": True}


def _name_of(where: str, tool: Json, kind: str) -> str:
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise invalid(f"{where}.name", f"is {shown(tool.get('name'))}; must be the name of {kind}")
    return str(tool["name"])


# -- their calls ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallKind:
    """A kind of call. `text`: the field of the item that is streamed, with events named `event`; "": none is.

    `fields`: the other fields of an item, by the arguments. `arguments`: the reverse; it raises LookupError, TypeError,
    ValueError or AttributeError for an item without them.
    """

    tool: str  # type of its tool
    prefix: str  # start of ids
    event: str = ""
    text: str = ""
    fields: Callable[[Json], Json] = lambda given: {}
    arguments: Callable[[Json], Json] = lambda item: {}


def _picked(given: Json, *names: str) -> Json:
    return {name: given[name] for name in names if given.get(name) is not None}


def _action(item: Json, name: str) -> Json:
    """The action of a shell call, whose field `name` has its commands."""
    action = {**item["action"]}
    if not isinstance(action[name], list) or not all(isinstance(one, str) for one in action[name]):
        raise TypeError
    return action


def _local_shell_fields(given: Json) -> Json:
    command, env = given.get("command", []), given.get("env", {})
    return {
        "action": {"type": "exec", "command": command, "env": env, **_picked(given, "working_directory", "timeout_ms")}
    }


def _shell_fields(given: Json) -> Json:
    return {"action": {"commands": given.get("commands", []), **_picked(given, "timeout_ms", "max_output_length")}}


KINDS: Mapping[str, CallKind] = {
    "function_call": CallKind(FUNCTION, "fc", "response.function_call_arguments", "arguments"),
    "custom_tool_call": CallKind(
        CUSTOM, "ctc", "response.custom_tool_call_input", INPUT, arguments=lambda item: {INPUT: item[INPUT]},
    ),
    "tool_search_call": CallKind(
        SEARCH, "tsc", fields=lambda given: {"execution": "client", "arguments": given},
        arguments=lambda item: dict(item["arguments"]),
    ),
    "local_shell_call": CallKind(
        LOCAL_SHELL, "lsh", fields=_local_shell_fields,
        arguments=lambda item: {k: value for k, value in _action(item, "command").items() if k != "type" and value},
    ),
    "shell_call": CallKind(
        SHELL, "sh", "response.shell_call_command", fields=_shell_fields,
        arguments=lambda item: _action(item, "commands"),
    ),
}  # fmt: skip
OUTPUTS = (
    *(f"{item}_output" for item in KINDS if item != f"{SEARCH}_call"),
    f"{SEARCH}_output",
)  # types of their results
OF_TOOLS = {kind.tool: item for item, kind in KINDS.items()}  # type of the item of a call, by the type of the tool


@dataclass(frozen=True, slots=True)
class Called:
    """The tool that a name of the model stands for."""

    kind: str  # type of the item
    namespace: str = ""
    name: str = ""


def called_by_name(tools: Sequence[Json]) -> dict[str, Called]:
    """The tools of a response, by the names that the model knows."""
    found: dict[str, Called] = {}
    for _, namespace, tool in each_tool("tools", list(tools)):
        kind, name = tool.get("type"), str(tool.get("name", tool.get("type")))
        if kind in OF_TOOLS:
            found.setdefault(flat_name(namespace, name), Called(OF_TOOLS[kind], namespace, name))
    return found


def parsed(arguments: str) -> Json:
    """Arguments as an object; empty if they are not one, because the answer was cut off."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def arguments_of(where: str, item: Json) -> str:
    """The arguments of an item of a call, as the model wrote them. Raises InvalidRequestError."""
    kind = KINDS[item["type"]]
    if kind.tool == FUNCTION:
        return text_at(where, item, "arguments")
    if kind.tool == CUSTOM:
        text_at(where, item, INPUT)
    try:
        return json.dumps(kind.arguments(item), ensure_ascii=False)
    except (LookupError, TypeError, ValueError, AttributeError):
        part, words = ("arguments", "") if kind.tool == SEARCH else ("action", " with a list of strings, the commands")
        raise invalid(f"{where}.{part}", f"is {shown(item.get(part))}; must be an object{words}") from None


def output_of(where: str, item: Json) -> Any:
    """The result of a call for the model: a text, or parts. Raises InvalidRequestError."""
    if item["type"] == f"{SEARCH}_output":
        tools = item.get("tools")
        return json.dumps(
            {"tools": [flat_name(space, str(one.get("name"))) for _, space, one in each_tool(f"{where}.tools", tools)]}
        )
    output = item.get("output")
    is_shell = item["type"] == f"{SHELL}_call_output" and isinstance(output, list)
    return json.dumps(output, ensure_ascii=False) if is_shell else output


HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
PIECE = re.compile(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*')
MAX_HELD = 64  # pieces of arguments in which the text may begin
HALF = re.compile(r"(?:\\u[dD][89abAB][0-9a-fA-F]{2})+$")  # the first half of a character


class InputReader:
    """Reads the text of `{"input": TEXT}` as it arrives. Arguments of another form are the input as they are."""

    def __init__(self) -> None:
        self._held: list[str] = []  # arguments whose text has not begun
        self._pending: str | None = None  # text that is not read yet; None: it has not begun
        self._is_over = False

    def read(self, text: str, *, is_last: bool = False) -> str:
        if self._pending is not None:
            self._pending += text
        else:
            self._held.append(text)
            if len(self._held) <= MAX_HELD and (head := HEAD.match(held := "".join(self._held))):
                self._pending = held[head.end() :]
        if self._is_over:
            return ""
        if self._pending is None:
            return "".join(self._held) if is_last else ""
        return self._next(self._pending, is_last=is_last)

    def _next(self, pending: str, *, is_last: bool) -> str:
        piece = pending[: _end_of_piece(pending)]
        self._is_over = pending.startswith('"', len(piece))
        if not (is_last or self._is_over):
            piece = HALF.sub("", piece)
        self._pending = pending[len(piece) :]
        return _decoded(piece)


def _end_of_piece(text: str) -> int:
    found = PIECE.match(text)
    return found.end() if found else 0


def _decoded(piece: str) -> str:
    try:
        text = str(json.loads(f'"{piece}"', strict=False))
    except ValueError:
        return piece
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
