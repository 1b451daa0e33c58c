"""Checks the chat of a request, converts it for the template, and chooses the parser of its answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.v1 import inference_pb2 as pb

from gateway_svc.request.models import ServedModel
from gateway_svc.request.sandbox.template_renderer import CHAT, render_frame
from gateway_svc.text.bundle import RenderOptions, Tokenizer
from gateway_svc.text.chat import ChatTemplateError
from gateway_svc.text.chat_output import ChatFormat, ChatParser
from gateway_svc.text.tool_grammar import CallRules, tool_grammar
from request_fields.fields import MAX_GRAMMAR_BYTES
from request_fields.grammar import Grammar, GrammarKind, has_grammar
from svc_common.errors import InvalidRequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 10_000  # number of messages in a chat
MAX_TOOLS = 1024
MAX_SHOWN = 80  # characters of a wrong value in an error
TAIL_TOKENS = 16  # tokens at the end of a prompt that are searched for the start of reasoning
TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")  # the parsers find no other names
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools that the template and the parser get: none with tool_choice NONE."""

    given: tuple[Mapping[str, Any], ...] = ()  # as in tools_json
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # schema of the parameters, by tool name
    strict: frozenset[str] = frozenset()  # names of the tools whose calls must match their schema


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How the answers to a chat are parsed."""

    format: ChatFormat
    schemas: Mapping[str, Mapping[str, Any]]
    is_parallel: bool
    is_reasoning_begun: bool  # the prompt ends with the start of reasoning

    def new_parser(self) -> ChatParser:
        """A parser for one answer."""
        return ChatParser(
            self.format,
            is_reasoning_begun=self.is_reasoning_begun,
            tools=self.schemas,
            is_parallel=self.is_parallel,
        )


def check_chat(chat: pb.Chat) -> None:
    """Check the fields that do not depend on the model, except the JSON fields. Raises InvalidRequestError."""
    if not chat.messages:
        raise _invalid("messages", "is empty; send at least one message")
    if len(chat.messages) > MAX_MESSAGES:
        raise _invalid("messages", f"has {len(chat.messages)} messages; at most {MAX_MESSAGES} are allowed")
    for i, message in enumerate(chat.messages):
        _check_message(f"messages[{i}]", message)
    if chat.tool_choice not in pb.ToolChoice.values():
        raise _invalid("tool_choice", f"is {chat.tool_choice}; must be a value of ToolChoice")
    if chat.tool_name and chat.tool_choice not in (pb.TOOL_CHOICE_UNSPECIFIED, pb.TOOL_CHOICE_REQUIRED):
        raise _invalid("tool_name", f"is {_shown(chat.tool_name)}; if it is set, tool_choice must be REQUIRED or unset")
    if must_call(chat) and not chat.tools_json:
        field_name = "tool_name" if chat.tool_name else "tool_choice"
        raise _invalid(field_name, "requires a call, but the chat has no tools; send the tools")
    if chat.continue_final_message and any(part.HasField("image") for part in chat.messages[-1].parts):
        raise _invalid("continue_final_message", "is true, but the last message has an image; only text is continued")
    if chat.continue_final_message and chat.add_generation_prompt:
        raise _invalid("add_generation_prompt", "is true with continue_final_message; set only one of them")


def must_call(chat: pb.Chat) -> bool:
    """Whether the answer must have a tool call."""
    return bool(chat.tool_name) or chat.tool_choice == pb.TOOL_CHOICE_REQUIRED


def _check_message(where: str, message: pb.ChatMessage) -> None:
    if message.role not in ROLES:
        raise _invalid(f"{where}.role", f"is {_shown(message.role)}; must be one of {', '.join(ROLES)}")
    if message.tool_calls and message.role != "assistant":
        raise _invalid(
            f"{where}.tool_calls", f"is set, but the role is {message.role}; only assistant messages have it"
        )
    if message.reasoning and message.role != "assistant":
        raise _invalid(f"{where}.reasoning", f"is set, but the role is {message.role}; only assistant messages have it")
    if message.tool_call_id and message.role != "tool":
        raise _invalid(f"{where}.tool_call_id", f"is set, but the role is {message.role}; only tool messages have it")
    if message.content and message.parts:
        raise _invalid(f"{where}.parts", "is set, and content too; set only one of them")
    for i, part in enumerate(message.parts):
        if part.WhichOneof("kind") is None:
            raise _invalid(f"{where}.parts[{i}]", "has neither text nor image; set one of them")
    for i, call in enumerate(message.tool_calls):
        if not call.name:
            raise _invalid(f"{where}.tool_calls[{i}].name", "is empty; send the name of the tool")


def images_size(chat: pb.Chat) -> int:
    """Bytes of the images of a chat."""
    return sum(len(part.image) for message in chat.messages for part in message.parts)


def chat_frame(chat: pb.Chat, model: ServedModel) -> bytes:
    """The message that renders a chat (template_renderer.py). Raises InvalidRequestError."""
    tokenizer = model.require_tokenizer(CHAT)
    options: RenderOptions = {
        "template_kwargs": _parse_json("template_kwargs_json", chat.template_kwargs_json, dict, "an object"),
        "tools": list(read_tools(chat).given) or None,
        "continue_final_message": chat.continue_final_message,
        "add_generation_prompt": chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
    }
    try:
        template = tokenizer.template_name(chat.chat_template, has_tools=bool(options["tools"]))
    except ChatTemplateError as error:
        raise InvalidRequestError(f"{CHAT}: {error}", field=CHAT) from None
    messages = [_message_variables(message) for message in chat.messages]
    return render_frame(template, messages, options, chat.ByteSize() - images_size(chat))


def _message_variables(message: pb.ChatMessage) -> dict[str, Any]:
    """The message as templates expect it. Fields that are not set are missing, because templates test for them."""
    content: Any = message.content
    if any(part.HasField("image") for part in message.parts):
        content = [_part_variables(part) for part in message.parts]
    elif message.parts:
        content = "\n".join(part.text for part in message.parts)
    variables: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        variables["tool_calls"] = [_call_variables(call) for call in message.tool_calls]
    if message.reasoning:
        variables |= {"reasoning": message.reasoning, "reasoning_content": message.reasoning}
    given = {"tool_call_id": message.tool_call_id, "name": message.name}
    return variables | {name: value for name, value in given.items() if value}


def _part_variables(part: pb.ContentPart) -> dict[str, Any]:
    return {"type": "image"} if part.HasField("image") else {"type": "text", "text": part.text}


def _call_variables(call: pb.ToolCall) -> dict[str, Any]:
    """Arguments are a JSON value, which templates serialize; text that is not JSON stays text."""
    try:
        arguments = json.loads(call.arguments) if call.arguments else {}
    except (ValueError, RecursionError):
        arguments = call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def read_tools(chat: pb.Chat) -> Tools:
    """Parse and check the tools. Raises InvalidRequestError."""
    given = _parse_json("tools_json", chat.tools_json, list, "an array") or []
    if len(given) > MAX_TOOLS:
        raise _invalid("tools_json", f"has {len(given)} tools; at most {MAX_TOOLS} are allowed")
    schemas: dict[str, Mapping[str, Any]] = {}
    for i, tool in enumerate(given):
        name, schema = _read_tool(f"tools_json[{i}]", tool)
        if name in schemas:
            raise _invalid(
                f"tools_json[{i}].function.name", f"is {_shown(name)}, the name of an earlier tool; use another name"
            )
        schemas[name] = schema
    if chat.tool_name and chat.tool_name not in schemas:
        have = ", ".join(schemas)[:MAX_SHOWN]
        raise _invalid("tool_name", f"is {_shown(chat.tool_name)}; must be the name of a tool of the request: {have}")
    if must_call(chat) and not schemas:
        raise _invalid("tool_choice", "requires a call, but the chat has no tools; send the tools")
    if chat.tool_choice == pb.TOOL_CHOICE_NONE:
        return Tools()
    strict = frozenset(tool["function"]["name"] for tool in given if tool["function"].get("strict"))
    return Tools(tuple(given), schemas, strict)


def _read_tool(where: str, tool: Any) -> tuple[str, Mapping[str, Any]]:
    """Name and schema of the parameters of one tool."""
    if not isinstance(tool, dict):
        raise _invalid(where, 'must be an object: {"type": "function", "function": {"name": ..., "parameters": ...}}')
    if tool.get("type") != "function":
        raise _invalid(f"{where}.type", f"is {_shown(tool.get('type'))}; must be 'function', the only supported type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _invalid(f"{where}.function", "must be an object with a name")
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise _invalid(
            f"{where}.function.name", f"is {_shown(name)}; must be 1 to 128 characters of A-Z a-z 0-9 _ . : / -"
        )
    if schema is not None and not isinstance(schema, dict):
        raise _invalid(f"{where}.function.parameters", "must be a JSON schema of an object")
    if not isinstance(function.get("strict"), bool | None):
        raise _invalid(f"{where}.function.strict", f"is {_shown(function['strict'])}; must be true or false")
    return name, schema or {}


def answer_plan(request: pb.GenerateRequest, model: ServedModel, prompt_ids: Sequence[int]) -> AnswerPlan | None:
    """How to parse the answers; None: the request wants plain text. Raises InvalidRequestError."""
    if not request.output.parse_chat or model.text.tokenizer is None:
        return None
    chat = request.prompt.chat
    tools = read_tools(chat)
    format = model.chat_format(chat.chat_template, has_tools=bool(tools.given))
    if not tools.given:
        format = ChatFormat(format.reasoning, None)
    return AnswerPlan(
        format,
        tools.schemas,
        is_parallel=_is_parallel(chat),
        is_reasoning_begun=_is_reasoning_begun(chat, format, model.text.tokenizer, prompt_ids),
    )


def call_grammar(request: pb.GenerateRequest, model: ServedModel, prompt_ids: Sequence[int]) -> Grammar | None:
    """The grammar of the answer, if it must have a tool call or if a tool is strict; None: no grammar.

    Raises InvalidRequestError.
    """
    if not request.prompt.HasField("chat"):
        return None
    chat = request.prompt.chat
    tools = read_tools(chat)
    if not (must_call(chat) or tools.strict):
        return None
    name = "tool_choice" if must_call(chat) else "tools_json"
    if has_grammar(request.sampling):
        raise _invalid(name, "needs a grammar for the calls, but sampling has one too; set only one of them")
    format = model.chat_format(chat.chat_template, has_tools=True)
    if format.tools is None:
        words = "needs a grammar for the calls, but their format is not known for this model"
        raise _invalid(name, f"{words}; set --tool-parser of the gateway")
    tokenizer = model.require_tokenizer(CHAT)
    rules = CallRules(_constrained(chat, tools), must_call(chat), _is_parallel(chat) and not chat.tool_name)
    is_begun = _is_reasoning_begun(chat, format, tokenizer, prompt_ids)
    text = tool_grammar(format, rules, tokenizer.token_id, is_reasoning_begun=is_begun)
    size = len(text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise _invalid("tools_json", f"needs a grammar of {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")
    return Grammar(GrammarKind.LARK, text, f"{CHAT}.tools_json")


def _constrained(chat: pb.Chat, tools: Tools) -> Mapping[str, Mapping[str, Any]]:
    """The schema of each tool that may be called. With AUTO, only the schemas of strict tools are enforced."""
    if chat.tool_name:
        return {chat.tool_name: tools.schemas[chat.tool_name]}
    if must_call(chat):
        return tools.schemas
    return {name: schema if name in tools.strict else ANY_OBJECT for name, schema in tools.schemas.items()}


def _is_parallel(chat: pb.Chat) -> bool:
    return chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else True


def _is_reasoning_begun(chat: pb.Chat, format: ChatFormat, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool:
    """Whether the prompt ends inside reasoning: with the start marker, or in a final message that is continued."""
    if format.reasoning is None:
        return False
    if chat.continue_final_message and chat.messages:
        return format.reasoning.is_open_in(chat.messages[-1].content)
    tail = tokenizer.decode(prompt_ids[-TAIL_TOKENS:], skip_special_tokens=False)
    return tail.rstrip().endswith(format.reasoning.start)


def _parse_json(name: str, text: str, kind: type, words: str) -> Any:
    if not text:
        return None
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # a lone \ud800 is valid JSON but cannot be encoded
    except (ValueError, RecursionError) as error:
        raise _invalid(name, f"is not JSON: {error}") from None
    if not isinstance(value, kind):
        raise _invalid(name, f"is a JSON {type(value).__name__}; it must be {words}")
    return value


def _shown(value: Any) -> str:
    return repr(value)[:MAX_SHOWN]


def _invalid(name: str, words: str) -> InvalidRequestError:
    return InvalidRequestError(f"{CHAT}.{name} {words}", field=f"{CHAT}.{name}")
