"""How models write tool calls: one row per format.

A call begins when its name and the first brace of its arguments were read. Text without them stays content, with its
markers. After the brace, the text up to the end marker belongs to the call: incomplete arguments and arguments that
cannot be mended (`calls.json_scan`) are returned unchanged. A call whose arguments precede the name, or are not an
object, is returned when it is complete.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum

from gateway_svc.text.answer import NAME, AnswerReader, ItemKind, Steps
from gateway_svc.text.calls.gemma import GemmaCalls
from gateway_svc.text.calls.json_calls import MISTRAL, JsonCalls, MarkedCalls, Schemas, write_arguments
from gateway_svc.text.calls.python import PythonCalls
from gateway_svc.text.calls.xml import XmlCalls

START, CHANNEL, MESSAGE, CONSTRAIN = (f"<|{one}|>" for one in ("start", "channel", "message", "constrain"))
ENDS = ("<|end|>", "<|call|>", "<|return|>")
BREAKS = (*ENDS, START, CHANNEL)
HARMONY_MARKERS = (*BREAKS, MESSAGE, CONSTRAIN)
MAX_HEADER = 256  # characters of a message before its text
ROLE = r"(?:<\|start\|>)?\s*(?:[\w.-]+\s*)?(?:to=\S+?\s*)?"
CHANNEL_NAME = re.compile(ROLE + r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(rf"\bto=functions\.({NAME.pattern})(?=[\s<]|$)")


@dataclass(frozen=True, slots=True)
class _Header:
    channel: str
    tool: str  # "": the message is not a call
    end: int  # offset of the text of the message


def read_harmony(reader: AnswerReader, *, has_reasoning: bool, has_calls: bool, is_begun: bool = False) -> Steps:
    """Read an answer. `is_begun`: it begins inside of reasoning. Without `has_calls`, calls are content."""
    messages = _HarmonyMessages(reader, ItemKind.REASONING if has_reasoning else ItemKind.CONTENT, has_calls=has_calls)
    if is_begun:
        yield from messages.read_text(messages.analysis)
    elif (yield from reader.has("to=", (yield from reader.space_end()))):  # the prompt has the start of the header
        yield from messages.read(0, 0)
    while marker := (yield from reader.write_until(ItemKind.CONTENT, BREAKS)):
        at = yield from reader.space_end()
        if marker in ENDS:
            reader.skip(at + len(marker))
        else:
            yield from messages.read(at, at + len(marker))


class _HarmonyMessages:
    """Reads messages of Harmony, the format of GPT-OSS: an answer is a sequence of messages, each in a channel.

        <|channel|>analysis<|message|>...<|end|>                                                        reasoning
        <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>   a call
        <|start|>assistant<|channel|>final<|message|>...<|return|>                                      content

    Messages to the user in the channel `commentary` are content, and so is text outside of messages. Adjacent messages
    of one kind are one item, with a line break between them.
    """

    def __init__(self, reader: AnswerReader, analysis: ItemKind, *, has_calls: bool) -> None:
        self.analysis = analysis  # kind of this channel
        self._reader = reader
        self._has_calls = has_calls
        self._last: ItemKind | None = None  # kind of the last message, if it was text

    def read(self, at: int, marker_end: int) -> Steps:
        """Read the message at an offset. If it is not one, the text up to `marker_end` is content."""
        header = yield from self._header(at)
        if header is None:
            self._reader.keep(marker_end)
        elif not header.tool:
            self._reader.skip(header.end)
            self._reader.is_past_reasoning = header.channel == "final"
            yield from self.read_text(self.analysis if header.channel == "analysis" else ItemKind.CONTENT)
        elif not (yield from self._read_call(header)):
            self._reader.keep(header.end)

    def _header(self, at: int) -> Generator[None, None, _Header | None]:
        while (end := self._reader.find(MESSAGE, at)) is None:
            if self._reader.is_ended or self._reader.num_pending - at > MAX_HEADER + len(MESSAGE):
                return None
            yield
        text = self._reader.pending(at, end)
        channel, recipient = CHANNEL_NAME.match(text), RECIPIENT.search(text)
        if end - at > MAX_HEADER or channel is None or any(one in text[channel.end() :] for one in BREAKS):
            return None
        return _Header(channel[1], "" if recipient is None else recipient[1], end + len(MESSAGE))

    def read_text(self, kind: ItemKind) -> Steps:
        """Read the text of a message, with its end."""
        reader = self._reader
        reader.is_reasoning = kind is ItemKind.REASONING
        yield from reader.skip_space()
        is_empty = (yield from reader.has_any(BREAKS)) or not reader.num_pending
        if kind is self._last and not is_empty:
            reader.write(kind, "\n")
        self._last = self._last if is_empty else kind
        marker = yield from reader.write_until(kind, BREAKS)
        yield from self._skip_end(marker)
        reader.is_reasoning = False

    def _read_call(self, header: _Header) -> Generator[None, None, bool]:
        """Read a call. False: it is not one, or calls are content; nothing was read."""
        reader = self._reader
        start = yield from reader.space_end(header.end)
        if not self._has_calls or not (yield from reader.has("{", start)):
            return False
        reader.skip(start)
        reader.begin_call(header.tool)
        yield from write_arguments(reader, BREAKS)
        yield from self._skip_end((yield from reader.has_any(ENDS, (yield from reader.space_end()))))
        self._last = None
        return True

    def _skip_end(self, marker: str) -> Steps:
        if marker in ENDS:
            self._reader.skip((yield from self._reader.space_end()) + len(marker))
            self._reader.is_reasoning = False
            yield from self._reader.skip_space()


class CallIds(Enum):
    """The ids of calls that the chat template accepts."""

    OPAQUE = "call_ and 32 hex digits"
    SHORT = "9 letters and digits"
    NUMBERED = "functions.NAME:NUMBER, numbered through the chat"


class HarmonyCalls:
    """Messages of a channel (`read_harmony`)."""

    def read(self, reader: AnswerReader, tools: Schemas) -> Steps:
        return read_harmony(reader, has_reasoning=False, has_calls=True)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format. `markers` may be special tokens. A template that has all the words of one of `words` makes the model
    use this format. `layout`: how calls are written; its type decides their grammar, and its `read` reads an answer
    after its reasoning. `aliases`: other names, which vLLM uses.
    """

    name: str
    models: str
    example: str
    markers: tuple[str, ...]
    words: tuple[tuple[str, ...], ...]
    layout: XmlCalls | JsonCalls | MarkedCalls | PythonCalls | GemmaCalls | HarmonyCalls
    aliases: tuple[str, ...] = ()
    ids: CallIds = CallIds.OPAQUE
    ends_reasoning: tuple[str, ...] = ()  # markers that end reasoning whose end is missing


TOOL_CALL = ("<tool_call>", "</tool_call>")
QWEN3_CODER = XmlCalls(
    ("<tool_call>\n", "</tool_call>"),
    ("<function={name}>\n", "</function>\n"),
    ("<parameter={key}>\n", "\n</parameter>\n"),
)
GLM45 = XmlCalls(TOOL_CALL, ("{name}\n", ""), ("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"))
GLM47 = XmlCalls(TOOL_CALL, ("{name}", ""), ("<arg_key>{key}</arg_key><arg_value>", "</arg_value>"))
GLM_MARKERS = (*TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
MINIMAX_M2 = XmlCalls(
    ("<minimax:tool_call>\n", "</minimax:tool_call>"),
    ('<invoke name="{name}">\n', "</invoke>\n"),
    ('<parameter name="{key}">', "</parameter>\n"),
    has_many=True,
)
STEP3_MARKERS = tuple(
    f"<｜{one}｜>" for one in ("tool_calls_begin", "tool_calls_end", "tool_call_begin", "tool_call_end", "tool_sep")
)
STEP3 = XmlCalls(
    ("<｜tool_calls_begin｜>\n", "<｜tool_calls_end｜>"),
    (
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">\n',
        "</steptml:invoke><｜tool_call_end｜>\n",
    ),
    ('<steptml:parameter name="{key}">', "</steptml:parameter>\n"), has_many=True,
)  # fmt: skip
DEEPSEEK_MARKERS = tuple(
    f"<｜{one}｜>" for one in ("tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep")
)
DEEPSEEK_V31 = MarkedCalls(
    (DEEPSEEK_MARKERS[0], DEEPSEEK_MARKERS[1]), ("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
)
DEEPSEEK_V3 = MarkedCalls(
    (DEEPSEEK_MARKERS[0], DEEPSEEK_MARKERS[1]),
    ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n", "\n```<｜tool▁call▁end｜>"),
    separator="\n",
)
KIMI_MARKERS = tuple(
    f"<|{one}|>"
    for one in (
        "tool_calls_section_begin",
        "tool_calls_section_end",
        "tool_call_begin",
        "tool_call_argument_begin",
        "tool_call_end",
    )
)
KIMI_K2 = MarkedCalls(
    (KIMI_MARKERS[0], KIMI_MARKERS[1]),
    ("<|tool_call_begin|>{name}<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    is_numbered=True,
)

GEMMA4 = GemmaCalls("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTIONGEMMA = GemmaCalls("<start_function_call>", "<end_function_call>", "<escape>")

HERMES = JsonCalls(("<tool_call>\n", "\n</tool_call>"), separator="\n")
LLAMA3 = JsonCalls(("<|python_tag|>", ""), '{"name": {name}, "parameters": ', "; ", is_bare=True)
COHERE = JsonCalls(
    ("<|START_ACTION|>", "<|END_ACTION|>"),
    '{"tool_call_id": "0", "tool_name": {name}, "parameters": ',
    separator=", ",
    is_list=True,
)
GRANITE = JsonCalls(("<|tool_call|>", ""), separator=", ", is_list=True)
HUNYUAN = JsonCalls(("<tool_calls>", "</tool_calls>"), separator=", ", is_list=True)
PHI4_MINI = JsonCalls(("functools", ""), separator=", ", is_list=True)
XLAM = JsonCalls(("", ""), separator=", ", is_list=True, is_bare=True)
LFM2 = PythonCalls(("<|tool_call_start|>", "<|tool_call_end|>"), is_list=True)
OLMO3 = PythonCalls(("<function_calls>", "</function_calls>"), separator="\n")
PYTHONIC = PythonCalls(("", ""), is_list=True, is_bare=True)
HARMONY = HarmonyCalls()


OPENAI = "openai"

# In the order in which a template is searched for their words.
ROWS = (
    ToolFormat(
        OPENAI, "GPT-OSS", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
        HARMONY_MARKERS, (("<|channel|>", "<|message|>", "functions"),), HARMONY,
    ),
    ToolFormat(
        "mistral", "Mistral, Magistral, Ministral",
        '[TOOL_CALLS][{"name": "f", "arguments": {}}], or [TOOL_CALLS]f[ARGS]{}',
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), (("[TOOL_CALLS]",),), MISTRAL, ids=CallIds.SHORT,
    ),
    ToolFormat(
        "deepseek_v3", "DeepSeek V3 and R1",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f ```json {} ```<｜tool▁call▁end｜>", DEEPSEEK_MARKERS,
        (("<｜tool▁calls▁begin｜>", "```json"),), DEEPSEEK_V3,
    ),
    ToolFormat(
        "deepseek_v31", "DeepSeek V3.1", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>", DEEPSEEK_MARKERS,
        (("<｜tool▁calls▁begin｜>",),), DEEPSEEK_V31,
    ),
    ToolFormat(
        "kimi_k2", "Kimi K2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        KIMI_MARKERS, (("<|tool_calls_section_begin|>",),), KIMI_K2, ids=CallIds.NUMBERED,
        ends_reasoning=KIMI_MARKERS[:1],
    ),
    ToolFormat(
        "gemma4", "Gemma 4", '<|tool_call>call:f{a:<|"|>text<|"|>}<tool_call|>',
        (GEMMA4.start, GEMMA4.end, GEMMA4.quote), ((GEMMA4.start, GEMMA4.end),), GEMMA4,
    ),
    ToolFormat(
        "functiongemma", "FunctionGemma", "<start_function_call>call:f{a:<escape>text<escape>}<end_function_call>",
        (FUNCTIONGEMMA.start, FUNCTIONGEMMA.end, FUNCTIONGEMMA.quote), ((FUNCTIONGEMMA.start,),), FUNCTIONGEMMA,
    ),
    ToolFormat(
        "qwen3_coder", "Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5",
        "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>", TOOL_CALL,
        (("<function=", "<parameter="),), QWEN3_CODER, aliases=("qwen3_xml", "step3p5"),
    ),
    ToolFormat(
        "glm47", "GLM-4.7", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", GLM_MARKERS,
        (("<arg_key>", "</arg_key><arg_value>"),), GLM47,
    ),
    ToolFormat(
        "glm45", "GLM-4.5, GLM-4.6", "the same, with a line break after the name and each element", GLM_MARKERS,
        (("<arg_key>",),), GLM45,
    ),
    ToolFormat(
        "minimax_m2", "MiniMax M2",
        '<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke></minimax:tool_call>',
        ("<minimax:tool_call>", "</minimax:tool_call>"), (("<minimax:tool_call>",),), MINIMAX_M2,
    ),
    ToolFormat(
        "step3", "Step 3",
        '<steptml:invoke name="f"><steptml:parameter name="a">1</steptml:parameter></steptml:invoke>', STEP3_MARKERS,
        (("<steptml:invoke",),), STEP3,
    ),
    ToolFormat(
        "cohere", "Command R7B, Command A",
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {}}]<|END_ACTION|>',
        ("<|START_ACTION|>", "<|END_ACTION|>"), (("<|START_ACTION|>",),), COHERE, aliases=("cohere_command3",),
    ),
    ToolFormat(
        "phi4_mini", "Phi-4-mini", 'functools[{"name": "f", "arguments": {}}]', ("functools",),
        (("<|tool|>", "<|/tool|>"),), PHI4_MINI, aliases=("phi4_mini_json",),
    ),
    ToolFormat(
        "granite", "Granite 3", '<|tool_call|>[{"name": "f", "arguments": {}}]', ("<|tool_call|>",),
        (("<|tool_call|>",),), GRANITE,
    ),
    ToolFormat(
        "hunyuan", "Hunyuan A13B", '<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>',
        ("<tool_calls>", "</tool_calls>"), (("<tool_calls>",),), HUNYUAN, aliases=("hunyuan_a13b",),
    ),
    ToolFormat(
        "lfm2", "LFM2", "<|tool_call_start|>[f(a=1)]<|tool_call_end|>", ("<|tool_call_start|>", "<|tool_call_end|>"),
        (("<|tool_call_start|>",), ("<|tool_list_start|>",)), LFM2,
    ),
    ToolFormat(
        "olmo3", "OLMo 3", "<function_calls>f(a=1)</function_calls>, one call a line",
        ("<function_calls>", "</function_calls>"), (("<function_calls>",),), OLMO3,
    ),
    ToolFormat(
        "hermes", "Hermes, Qwen2.5, Qwen3, Granite 4", '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        TOOL_CALL, (("<tool_call>",),), HERMES, aliases=("granite4",),
    ),
    ToolFormat(
        "pythonic", "Llama 3.2 and 4 with such a template, ToolACE", "[f(a=1), g()] as the whole answer", (),
        (("[func_name1(",),), PYTHONIC, aliases=("llama4_pythonic",),
    ),
    ToolFormat(
        "llama3", "Llama 3.1 to 3.3",
        '{"name": "f", "parameters": {}}, several with ;, as the whole answer or after <|python_tag|>',
        ("<|python_tag|>",), (("<|python_tag|>",), ("<|start_header_id|>", '"parameters":')), LLAMA3,
        aliases=("llama3_json",),
    ),
    ToolFormat(
        "xlam", "xLAM; chosen by --tool-parser only", '[{"name": "f", "arguments": {}}] as the whole answer', (), (),
        XLAM,
    ),
)  # fmt: skip
TOOL_FORMATS = {one.name: one for one in ROWS}
TOOL_PARSERS = TOOL_FORMATS | {alias: one for one in ROWS for alias in one.aliases}
