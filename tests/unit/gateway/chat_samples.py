# ruff: noqa: E501
"""Answers of models, as text, for the parser's tests: well formed, malformed and cut off."""

from __future__ import annotations

THINKING = "<think>\nThe user wants the weather. Is 3 < 4?\n</think>\n\n"

HERMES = (
    "Hello, world.\n", "  leading and trailing space \n\n",
    'I look it up.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2.5e1, null]}}\n</tool_call>',
    '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "b", "arguments": {"x": "}\\"{"}}\n</tool_call>\n',
    '<tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call> and then text <tool_call>{"name":"b","arguments":{}}</tool_call>',
    '<tool_call>{"arguments": {"x": {"y": true}}, "name": "late"}</tool_call>',
    '<tool_call>{"name": "text", "arguments": "{\\"x\\": 1}"}</tool_call>', '<tool_call>{"name": "none"}</tool_call>',
    '<tool_call>{"type": "function", "id": "1", "name": "typed", "arguments": {"x": 1}, "more": [1]}</tool_call>tail',
    '<tool_call>{"name": "broken", "arguments": {"x": oops}}</tool_call>after',
    '<tool_call>{"name": "quotes", "arguments": {"x": "say "hi" now"}}</tool_call>after',
    '<tool_call>{"name": "open", "arguments": {"x": 1}\n</tool_call>after',
    '<tool_call>{"name": "extra", "arguments": {"x": 1}}}\n</tool_call>after',
    "text <tool_call> is not a call </tool_call> here", 'text <tool_call>{"nam": 1}</tool_call> here',
    '<tool_call><tool_call>{"name": "twice", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "cut", "arguments": {"x": "abc', '<tool_call>{"name": "cut", "arg',
    '<tool_call>{"name": "cut", "arguments": {}}\n</tool_c',
    '<tool_call>{"name": "bad name!", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "s", "arguments": "\\ud800"}</tool_call>', "a <tool_ca b <tool_call", "the end: <",
    f'{THINKING}<tool_call>\n{{"name": "f", "arguments": {{}}}}\n</tool_call>', f"{THINKING}The answer.",
    "<think></think>none", "<think>never ends <tool_call> </thin", "text, then <think>not reasoning</think>",
    "reasoning without its start</think>\n\nThe answer.",
    '<tool_call>{"name": "f", "arguments": {"x": "a\tb\nc\x00", "y": [True, None, NaN, -Infinity,], }}</tool_call>z',
    '<tool_call>{"name": "f", "arguments": {"x": Tru, "y": 1}}</tool_call>z',
    '<tool_call>{"name": "f", "arguments": {"x": Tr',
    '<tool_call>{"name": "f", "arguments": {"x": 1,                    }}</tool_call>z',
    '<tool_call>{"arguments": {"x": "a\tb", "y": None}, "name": "f"}</tool_call>',
)  # fmt: skip

QWEN3_CODER = (
    "Plain.",
    "I call.\n<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>\nDone.",
    '<tool_call><function=a></function></tool_call>\n<tool_call><function=b><parameter=x>{"y": 1}</parameter></function></tool_call>',
    '<tool_call>\n<function=f>\n<parameter=code>\nif a < b:\n    print("x")\n</parameter>\n</function>\n</tool_call>',
    "<tool_call>\n<function=f>\n<parameter=x>\ncut",
    "<tool_call>\n<function=f>\n<para",
    "<tool_call>\n<function=f>\n</func",
    "<tool_call>\n<function=f>\noops</tool_call>rest",
    "<tool_call>\n<function",
    "<tool_call>not a function</tool_call>",
    "<tool_call><function=bad name></function></tool_call>",
    "Sure.\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    "Sure. <function=unknown>\n<parameter=x>\n1\n</parameter>\n</function>",
    "<tool_call><function=f><parameter=code>x </parameter> y</parameter></function></tool_call>",
    "<tool_call><function=f><parameter=code>x </parameter> y",
    "<tool_call><function=f><parameter=x>null</parameter><parameter=code>\n\nnull\n\n</parameter></function></tool_call>",
)

LLAMA3 = (
    "Plain.", '{"name": "weather", "parameters": {"city": "Paris"}}',
    ' {"name": "weather", "parameters": {"city": "Paris"}}; {"name": "weather", "parameters": {}} tail',
    '{"type": "function", "name": "weather", "parameters": {"city": "Paris"}}',
    '{"name": "unknown", "parameters": {"city": "Paris"}}', '{"parameters": {"city": "Paris"}, "name": "weather"}',
    '{"answer": {"name": "weather", "parameters": {}}}', "{not json}",
    '<|python_tag|>{"name": "anything", "parameters": {"x": "<|python_tag|>"}}', "<|python_tag|>print(1)",
    'Text. <|python_tag|>{"name": "weather", "parameters": {}};{"oops"', '{"name": "weather", "parameters": {"city": ',
)  # fmt: skip

MISTRAL = (
    "Plain.", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}]',
    'Text [TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": "]"}}]',
    '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]b[CALL_ID]abc123def[ARGS]{"x": [1]}',
    '[TOOL_CALLS]weather{"city": "Paris"}', '[TOOL_CALLS]weather[ARGS]{"city": oops}[TOOL_CALLS]b[ARGS]{}',
    "[TOOL_CALLS]hello there", "[TOOL_CALLS]", '[TOOL_CALLS][{"name": "a", "arguments": {}}, oops',
    "[TOOL_CALLS][1, 2]", "[TOOL_CALLS]weather[AR", '[THINK]Hm.[/THINK]So: [TOOL_CALLS]weather[ARGS]{"city"',
)  # fmt: skip

GLM45 = (
    f"{THINKING}I call.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>clock\n</tool_call>",
    "<tool_call>f\n<arg_key>code</arg_key>\n<arg_value>a < b\n\n</arg_value>\n<arg_key>x</arg_key>\n<arg_value>[1]</arg_value>\n</tool_call>z",
    "<tool_call>f<arg_key>code</arg_key><arg_value>cut",
    "<tool_call>f\n<arg_key>a<b</arg_key>\n<arg_value>1</arg_value></tool_call>",
    "<tool_call>two words</tool_call>",
    "<tool_call>f oops</tool_call>",
    "<tool_call>f\n<arg_key>x</arg_",
    "<tool_call>f",
)

MINIMAX_M2 = (
    'Hm.\n</think>\n\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n</invoke>\n'
    '<invoke name="clock">\n</invoke>\n</minimax:tool_call>\nDone.',
    '<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">{"y": "</"}</parameter>\n<parameter name="code">a\nb',
    '<minimax:tool_call>\n<invoke name="f',
    '<minimax:tool_call><invoke name="f g"></invoke></minimax:tool_call>',
    '<minimax:tool_call><invoke name="f"><parameter x>1</parameter></invoke></minimax:tool_call>',
)

DEEPSEEK_V31 = (
    'Hm.</think>I call.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": oops}<｜tool▁call▁end｜>after',
    "<｜tool▁calls▁begin｜>none<｜tool▁calls▁end｜>",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁se",
)
DEEPSEEK_V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"x": "```"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{"x": [',
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```",
)

KIMI_K2 = (
    "Hm.</think>I call.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Rome"}<|tool_call_end|><|tool_call_begin|>clock:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>',
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_arg",
    "<think>Hm. <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
)

HARMONY = (
    "<|channel|>analysis<|message|>Is 3 < 4?<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
    "<|channel|>analysis<|message|>A.<|end|><|start|>assistant<|channel|>analysis<|message|>B.<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>',
    "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
    ' to=functions.f<|channel|>commentary<|message|>{"x": oops}<|call|>',
    "<|channel|>commentary to=functions.f<|message|>no object<|call|>",
    "<|channel|>final<|message|>cut off",
    "plain <|channel|>no message",
    "<|channel|><|end|><|message|>x",
)

GEMMA4 = (
    '<|tool_call>call:f{code:<|"|>a "b"\n{}<|"|>,x:[1,{y:true,z:[]},<|"|>s<|"|>],n:null}<tool_call|><|tool_call>call:clock{}<tool_call|>',
    "I call. <|tool_call>call:weather{city:New York,days:3}<tool_call|>Done.",
    '<|tool_call>call:f{<|"|>x<|"|>: 1 , code : <|"|>cut',
    "<|tool_call>call:f{x:}<tool_call|>after",
    "<|tool_call>call:f{x:[1}<tool_call|>after",
    "<|tool_call>call:f{x:12",
    "<|tool_call>call f{}<tool_call|>",
    "<|tool_call>call:f{:1}<tool_call|>",
)

STEP3 = (
    'Hm.<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">\n'
    '<steptml:parameter name="city">a < b\n</steptml:parameter>\n<steptml:parameter name="days">3</steptml:parameter>\n'
    '</steptml:invoke><｜tool_call_end｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="clock">\n'
    "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>",
    '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f"><steptml:parameter na',
)

LIST = '[{"name": "weather", "arguments": {"city": "Zürich"}}, {"name": "f", "arguments": {"x": [1]}}]'
LISTS = (
    f"{LIST}", '[{"name": "f", "arguments": {"x": "a', "[1, 2]", "[]", "[", '{"name": "f", "arguments": {}}', "text",
)  # fmt: skip


def lists(start: str, end: str = "") -> tuple[str, ...]:
    """Answers with a list of calls between markers."""
    return (*(f"T.\n{start}{one}{end} z" for one in LISTS[:3]), f"{start}{LISTS[-2]}", f"a {start[:-1]}")


PYTHONIC = (
    "[weather(city='Zürich', days=3), f(x=[1, {'y': True}], code=\"a\\nb\")]",
    '[weather(city="a, b)", days=None), clock()] tail', "[f(x=oops, code='it\\'s')]", "[f(x=1", "[f(code='cut", "[f(x",
    "[weather(city 1)]", "[other(x=1)]", "[1, 2]", "[", "Plain [weather(city='x')].",
)  # fmt: skip

SAMPLES = {
    "step3": STEP3,
    "cohere": tuple(
        text.replace('"name"', '"tool_call_id": "0", "tool_name"').replace('"arguments"', '"parameters"')
        for text in lists("<|START_ACTION|>", "<|END_ACTION|>")
    ),
    "granite": lists("<|tool_call|>"),
    "hunyuan": lists("<tool_calls>", "</tool_calls>"),
    "phi4_mini": lists("functools"),
    "xlam": LISTS,
    "pythonic": PYTHONIC,
    "lfm2": tuple(f"Text. <|tool_call_start|>{text}<|tool_call_end|>" for text in PYTHONIC),
    "olmo3": tuple(
        f"Text.\n<function_calls>\n{text.strip('[]').replace('), ', ')' + chr(10))}\n</function_calls>"
        for text in PYTHONIC
    ),
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "gemma4": GEMMA4,
    "functiongemma": tuple(
        text.replace("<|tool_call>", "<start_function_call>")
        .replace("<tool_call|>", "<end_function_call>")
        .replace('<|"|>', "<escape>")
        for text in GEMMA4
    ),
    "glm45": GLM45,
    "kimi_k2": KIMI_K2,
    "openai": HARMONY,
    "minimax_m2": MINIMAX_M2,
    "glm47": tuple(text.replace("\n<", "<") for text in GLM45[:3]),
}
