"""The tools of a chat: their schemas, the grammar of calls that must match them, and the parser of the answers; and
after how many tokens the reasoning of an answer is ended, which a worker applies (step_protocol/features.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.v1 import inference_pb2 as pb

from gateway_svc.request.field_errors import CHAT, invalid
from gateway_svc.request.models import ServedModel
from gateway_svc.text.bundle import Tokenizer
from gateway_svc.text.chat_output import ChatFormat, ChatParser
from gateway_svc.text.reasoning import ReasoningFormat
from gateway_svc.text.tool_grammar import CallRules, tool_grammar
from grammars.schemas import INPUT_GRAMMAR, GrammarError, schema_of
from request_fields.fields import MAX_GRAMMAR_BYTES, MAX_MARKER_IDS, MAX_THINKING_LAST_IDS, MAX_UINT32
from request_fields.parameters import Grammar, GrammarKind, GrammarSchema
from svc_common.errors import InvalidRequestError

MAX_TOOLS = 1024
MAX_SHOWN = 80  # characters of a wrong value in an error
TAIL_TOKENS = 16  # tokens at the end of a prompt that are searched for the start of reasoning
TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")  # the parsers find no other names
WHOLE = (GrammarKind.LARK, GrammarKind.STRUCTURAL_TAG)  # grammars of the whole answer, calls included
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ChatTools:
    """The tools that the template and the parser get: none with tool_choice NONE."""

    given: tuple[Mapping[str, Any], ...] = ()  # tools in the form of tools_json
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # schema of the parameters, by tool name
    strict: frozenset[str] = frozenset()  # names of the tools whose calls must match their schema


NO_TOOLS = ChatTools()


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How the answers to a chat are parsed."""

    format: ChatFormat
    schemas: Mapping[str, Mapping[str, Any]]
    is_parallel: bool
    is_reasoning_begun: bool  # the prompt ends with the start of reasoning
    must_call: bool = False

    def new_parser(self) -> ChatParser:
        return ChatParser(
            self.format,
            is_reasoning_begun=self.is_reasoning_begun,
            tools=self.schemas,
            is_parallel=self.is_parallel,
            must_call=self.must_call,
        )


def must_call(chat: pb.Chat) -> bool:
    """Whether the answer must have a tool call."""
    return bool(chat.tool_name) or chat.tool_choice == pb.TOOL_CHOICE_REQUIRED


def read_tools(chat: pb.Chat) -> ChatTools:
    """Parse and check the tools. Raises InvalidRequestError."""
    given = parse_json("tools_json", chat.tools_json, list, "an array") or []
    if len(given) > MAX_TOOLS:
        raise refused("tools_json", f"has {len(given)} tools; at most {MAX_TOOLS} are allowed")
    schemas: dict[str, Mapping[str, Any]] = {}
    for i, tool in enumerate(given):
        name, schema = _read_tool(f"tools_json[{i}]", tool)
        if name in schemas:
            raise refused(
                f"tools_json[{i}].function.name", f"is {shown(name)}, the name of an earlier tool; use another name"
            )
        schemas[name] = schema
    if chat.tool_name and chat.tool_name not in schemas:
        have = ", ".join(schemas)[:MAX_SHOWN]
        raise refused("tool_name", f"is {shown(chat.tool_name)}; must be the name of a tool of the request: {have}")
    if must_call(chat) and not schemas:
        raise refused("tool_choice", "requires a call, but the chat has no tools; send the tools")
    if chat.tool_choice == pb.TOOL_CHOICE_NONE:
        return NO_TOOLS
    strict = frozenset(tool["function"]["name"] for tool in given if tool["function"].get("strict"))
    return ChatTools(tuple(map(_as_shown, given)), schemas, strict)


def _as_shown(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool as templates show it: without the grammar of its input."""
    parameters = tool["function"].get("parameters") or {}
    if INPUT_GRAMMAR not in parameters:
        return tool
    own = {key: value for key, value in parameters.items() if key != INPUT_GRAMMAR}
    return {**tool, "function": {**tool["function"], "parameters": own}}


def _read_tool(where: str, tool: Any) -> tuple[str, Mapping[str, Any]]:
    """Name and schema of the parameters of one tool."""
    if not isinstance(tool, dict):
        raise refused(where, 'must be an object: {"type": "function", "function": {"name": ..., "parameters": ...}}')
    if tool.get("type") != "function":
        raise refused(f"{where}.type", f"is {shown(tool.get('type'))}; must be 'function', the only supported type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise refused(f"{where}.function", "must be an object with a name")
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise refused(
            f"{where}.function.name", f"is {shown(name)}; must be 1 to 128 characters of A-Z a-z 0-9 _ . : / -"
        )
    if schema is not None and not isinstance(schema, dict):
        raise refused(f"{where}.function.parameters", "must be a JSON schema of an object")
    grammar = (schema or {}).get(INPUT_GRAMMAR, "")
    if not isinstance(grammar, str) or len(grammar.encode()) > MAX_GRAMMAR_BYTES:
        words = f"must be a text of at most {MAX_GRAMMAR_BYTES} bytes"
        raise refused(f"{where}.function.parameters.{INPUT_GRAMMAR}", words)
    if not isinstance(function.get("strict"), bool | None):
        raise refused(f"{where}.function.strict", f"is {shown(function['strict'])}; must be true or false")
    return name, schema or {}


def answer_plan(
    request: pb.GenerateRequest, model: ServedModel, tools: ChatTools, prompt_ids: Sequence[int]
) -> AnswerPlan | None:
    """How to parse the answers as messages of a chat; None without a tokenizer."""
    if model.text.tokenizer is None:
        return None
    chat = request.prompt.chat
    format = model.chat_format(chat.chat_template, has_tools=bool(tools.given))
    if not tools.given:
        format = ChatFormat(format.reasoning, None)
    return AnswerPlan(
        format,
        tools.schemas,
        is_parallel=_is_parallel(chat),
        is_reasoning_begun=is_reasoning_begun(chat, format, model.text.tokenizer, prompt_ids),
        must_call=must_call(chat),
    )


def answer_grammar(
    request: pb.GenerateRequest,
    model: ServedModel,
    tools: ChatTools,
    prompt_ids: Sequence[int],
    content: Grammar | None,
) -> Grammar | None:
    """The grammar of the answer to a chat. `content`: the grammar of the request, which answers without a call match.

    It is `content` alone if no call has to match a grammar. Raises InvalidRequestError.
    """
    chat = request.prompt.chat
    if not (must_call(chat) or tools.strict or (tools.given and content and content.kind not in WHOLE)):
        return _framed(request, model, prompt_ids, content)
    format = model.chat_format(chat.chat_template, has_tools=True)
    if format.tools is None:
        if not (must_call(chat) or tools.strict):
            return _framed(request, model, prompt_ids, content)  # calls cannot be parsed
        name = "tool_choice" if must_call(chat) else "tools_json"
        words = "needs a grammar for the calls, but their format is not known for this model"
        raise refused(name, f"{words}; set --tool-parser of the gateway")
    constrained = _constrained(chat, tools)
    is_parallel = _is_parallel(chat) and not chat.tool_name
    rules = CallRules(constrained, must_call(chat), is_parallel, None if must_call(chat) else _rule(content))
    shared = content.schemas if rules.content and content else ()
    schemas = (*_schemas_of(tools, constrained), *shared)
    _check_schemas(schemas)
    tokenizer = model.require_tokenizer(CHAT)
    is_begun = is_reasoning_begun(chat, format, tokenizer, prompt_ids)
    try:
        text = tool_grammar(format, rules, tokenizer.token_id, is_reasoning_begun=is_begun)
    except GrammarError as error:
        raise refused("tools_json", f"cannot be used: {error}") from None
    size = len(text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise refused("tools_json", f"needs a grammar of {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")
    return Grammar(GrammarKind.LARK, text, f"{CHAT}.tools_json", schemas)


def _framed(
    request: pb.GenerateRequest, model: ServedModel, prompt_ids: Sequence[int], content: Grammar | None
) -> Grammar | None:
    """The grammar of content, after the reasoning that precedes it: without this, reasoning that the prompt began would
    have to match the grammar, and so would the header of a message.
    """
    chat = request.prompt.chat
    if content is None or content.kind is GrammarKind.LARK or not request.output.parse_chat:
        return content
    format = ChatFormat(model.chat_format(chat.chat_template, has_tools=False).reasoning)
    tokenizer = model.require_tokenizer(CHAT)
    is_begun = is_reasoning_begun(chat, format, tokenizer, prompt_ids)
    if format.reasoning is None or not (is_begun or format.reasoning.after):
        return content
    _check_schemas(content.schemas)
    rules = CallRules({}, needs_call=False, is_parallel=False, content=content.key)
    return _of_content(content, format, rules, tokenizer, is_begun=is_begun)


def tag_grammar(content: Grammar, model: ServedModel) -> Grammar:
    """The grammar of a structural tag without reasoning before it. Raises InvalidRequestError."""
    rules = CallRules({}, needs_call=False, is_parallel=False, content=content.key)
    return _of_content(content, ChatFormat(), rules, model.require_tokenizer(content.field), is_begun=False)


def _of_content(
    content: Grammar, format: ChatFormat, rules: CallRules, tokenizer: Tokenizer, *, is_begun: bool
) -> Grammar:
    try:
        text = tool_grammar(format, rules, tokenizer.token_id, is_reasoning_begun=is_begun)
    except GrammarError as error:
        raise invalid(content.field, f"cannot be used: {error}") from None
    if (size := len(text.encode())) > MAX_GRAMMAR_BYTES and content.kind is GrammarKind.STRUCTURAL_TAG:
        words = f"needs a grammar of {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed"
        raise invalid(content.field, words)
    return Grammar(GrammarKind.LARK, text, content.field, content.schemas)


def _schemas_of(tools: ChatTools, constrained: Mapping[str, Mapping[str, Any]]) -> Iterator[GrammarSchema]:
    """The schemas of the calls, for error messages."""
    for i, name in enumerate(tools.schemas):
        if name in constrained:
            part = f".{INPUT_GRAMMAR}" if INPUT_GRAMMAR in constrained[name] else ""
            field = f"{CHAT}.tools_json[{i}].function.parameters{part}"
            yield GrammarSchema(field, json.dumps(constrained[name]), f" of tool {name!r}")


def _check_schemas(schemas: Iterable[GrammarSchema]) -> None:
    for schema in schemas:
        try:
            schema_of(schema.text)
        except GrammarError as error:
            message = f"{schema.field}{schema.owner} cannot be used: {error}"
            raise InvalidRequestError(message, field=schema.field) from None


def _rule(content: Grammar | None) -> tuple[GrammarKind, str] | None:
    """The grammar of content as a rule beside the calls."""
    if content is None:
        return None
    if content.kind in WHOLE:
        words = "is set, but strict tools need a grammar too; use json_schema, or tools that are not strict"
        raise invalid(content.field, words)
    return content.key


def _constrained(chat: pb.Chat, tools: ChatTools) -> Mapping[str, Mapping[str, Any]]:
    """The schema of each tool that may be called. With AUTO, only the schemas of strict tools are enforced."""
    if chat.tool_name:
        return {chat.tool_name: tools.schemas[chat.tool_name]}
    if must_call(chat):
        return tools.schemas
    return {name: schema if name in tools.strict else ANY_OBJECT for name, schema in tools.schemas.items()}


def _is_parallel(chat: pb.Chat) -> bool:
    return chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else True


def is_reasoning_begun(chat: pb.Chat, format: ChatFormat, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool:
    """Whether the prompt ends inside reasoning: with the start marker, or in a final message that is continued."""
    if format.reasoning is None:
        return False
    if chat.continue_final_message and chat.messages:
        return format.reasoning.is_open_in(chat.messages[-1].content)
    tail = tokenizer.decode(prompt_ids[-TAIL_TOKENS:], skip_special_tokens=False)
    return tail.rstrip().endswith(format.reasoning.start)


def parse_json(name: str, text: str, kind: type, words: str) -> Any:
    """The value of a JSON field of a chat; None if it is not set. `words`: what it must be."""
    if not text:
        return None
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # a lone \ud800 is valid JSON but cannot be encoded
    except (ValueError, RecursionError) as error:
        raise refused(name, f"is not JSON: {error}") from None
    if not isinstance(value, kind):
        raise refused(name, f"is a JSON {type(value).__name__}; it must be {words}")
    return value


def shown(value: Any) -> str:
    """A wrong value in an error."""
    return repr(value)[:MAX_SHOWN]


def refused(name: str, words: str) -> InvalidRequestError:
    """The error for an invalid field of a chat."""
    return invalid(f"{CHAT}.{name}", words)


FIELD = "sampling.thinking_token_budget"
MARKERS = "thinking_start_ids", "thinking_end_ids", "thinking_last_ids", "thinking_repeats"


def set_budget(
    request: pb.GenerateRequest, model: ServedModel, tools: ChatTools, prompt_ids: Sequence[int], max_tokens: int
) -> None:
    """Set the budget of a new request and the token ids of the markers: the budget that it asks for, else that of its
    template's variables, but not so much that --min-answer-tokens do not fit in `max_tokens`.

    Raises InvalidRequestError if the request asks for a budget that the model cannot have, or for a part of one.
    """
    sampling, settings, chat = request.sampling, model.parsers.thinking, request.prompt.chat
    is_asked = sampling.HasField("thinking_token_budget")
    needed = "thinking_end_ids" if not sampling.thinking_end_ids else "" if is_asked else "thinking_token_budget"
    for name in MARKERS if needed else ():
        if getattr(sampling, name):
            raise invalid(f"sampling.{name}", f"is set, but sampling.{needed} is not; set both or none")
    if not (is_asked or chat.template_kwargs_json or (settings.answer_tokens and request.prompt.HasField("chat"))):
        return
    if sampling.thinking_end_ids or sampling.beam_width > 1:
        return  # the client has its own markers, or beams, for which `checks` refuses a budget
    found = model.chat_format(chat.chat_template, has_tools=bool(tools.given))
    variables = parse_json("template_kwargs_json", chat.template_kwargs_json, dict, "an object") or {}
    budget = sampling.thinking_token_budget if is_asked else _budget_of(variables, found.reasoning, settings.budgets)
    if budget is None and not settings.answer_tokens:
        return
    tokenizer = model.require_tokenizer(FIELD) if is_asked else model.text.tokenizer
    if found.reasoning is None or tokenizer is None or not (ends := _end_ids(found, tokenizer)):
        if is_asked:
            raise invalid(FIELD, f"is set, but {_why_not(found, model)}; leave it unset, or send thinking_end_ids")
        return
    prompt = prompt_ids[: len(prompt_ids) - sampling.num_forced_tokens]
    if not is_reasoning_begun(chat, found, tokenizer, prompt):
        start = tokenizer.encode(found.reasoning.start, add_special_tokens=False)
        sampling.thinking_start_ids.extend(start[:MAX_MARKER_IDS])
    last = tokenizer.encode(settings.end_text, add_special_tokens=False)[:MAX_THINKING_LAST_IDS]
    if settings.answer_tokens:
        taken = len(sampling.thinking_start_ids) + len(last) + 1 + settings.answer_tokens
        budget = min(MAX_UINT32 if budget is None else budget, max(0, max_tokens - taken))
    sampling.thinking_token_budget = budget or 0
    sampling.thinking_end_ids.extend(ends)
    sampling.thinking_last_ids.extend(last if budget else ())
    sampling.thinking_repeats = found.reasoning.repeats


def _budget_of(
    variables: Mapping[str, Any], format: ReasoningFormat | None, chosen: Mapping[str, int | None]
) -> int | None:
    """The budget that the variables of a template mean: `thinking_budget`, else that of `reasoning_effort`."""
    budget, effort = variables.get("thinking_budget"), variables.get("reasoning_effort")
    if type(budget) is int and 0 <= budget <= MAX_UINT32:
        return budget
    return None if format is None or not isinstance(effort, str) else {**format.budgets, **chosen}.get(effort)


def _end_ids(format: ChatFormat, tokenizer: Tokenizer) -> list[int]:
    """The token of the end marker, and those of the markers of calls that end reasoning; empty: it is not one token."""
    end = None if format.reasoning is None else tokenizer.token_id(format.reasoning.end)
    stops = () if format.tools is None else map(tokenizer.token_id, format.tools.ends_reasoning)
    return [] if end is None else [end, *(id_ for id_ in stops if id_ is not None)]


def _why_not(format: ChatFormat, model: ServedModel) -> str:
    if format.reasoning is None:
        return f"the format of reasoning of model {model.name!r} is not known (--reasoning-parser of the gateway)"
    return f"the end marker {format.reasoning.end} is not one token of model {model.name!r}"
