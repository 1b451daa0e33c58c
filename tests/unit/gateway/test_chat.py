"""Chat templates give the same ids as transformers' apply_chat_template; their errors have the template's message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway_svc.text.bundle import Tokenizer
from gateway_svc.text.chat import ChatTemplate, ChatTemplateError
from tests.unit.gateway.rendering import encode_chat, render_chat
from tests.unit.gateway.tokenizer_kinds import bundle_files, byte_fallback, byte_level

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\n\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif message.role == "tool" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and reasoning_content %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- endif %}
{%- endfor %}
"""

GENERATION = """{% for m in messages %}
{% if m.role == 'assistant' %}
    {% generation %}{{ m.content }}{% endgeneration %}
{% elif m.role == 'tool' %}{% continue %}
{% else %}
{{ m.role }}: {{ m.content }}
{% endif %}
{% endfor %}
"""

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hello <world> & \"you\" 'there' 你好 😀"}],
    [{"role": "system", "content": "  Be brief. "}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\ntwo "},
        {"role": "user", "content": "three"},
    ],
]
OPEN_CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "one"}, {"role": "assistant", "content": "The answer is"}],
    [{"role": "user", "content": "one"}, {"role": "assistant", "content": "The answer is "}],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é> & 'x'", "parameters": {}}}]

TOKENS: dict[str, Any] = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True}}


def both(folder: Path, template: str, *, kind: Any = byte_level) -> tuple[Tokenizer, Any]:
    """Our tokenizer and transformers' from the same files."""
    transformers = pytest.importorskip("transformers")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **TOKENS}
    files = bundle_files(kind(), config, chat_template=template)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return Tokenizer.from_files(files), transformers.AutoTokenizer.from_pretrained(folder)


def theirs(tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> list[int]:
    options = {"add_generation_prompt": True, "return_dict": False, **options}
    return list(tokenizer.apply_chat_template(messages, **options))


@pytest.mark.parametrize("template", [LLAMA3, QWEN3, MISTRAL, GENERATION], ids=["llama3", "qwen3", "mistral", "plain"])
@pytest.mark.parametrize("kind", [byte_level, byte_fallback], ids=["byte_level", "byte_fallback"])
def test_same_ids_as_transformers(tmp_path: Path, template: str, kind: Any) -> None:
    ours, reference = both(tmp_path, template, kind=kind)
    for messages in CHATS:
        assert encode_chat(ours, messages) == theirs(reference, messages)


@pytest.mark.parametrize("template", [LLAMA3, QWEN3], ids=["llama3", "qwen3"])
def test_same_ids_with_tools_and_template_variables(tmp_path: Path, template: str) -> None:
    ours, reference = both(tmp_path, template)
    variables = {"enable_thinking": False, "date_string": "1 Jan 2030"}
    expected = theirs(reference, CHATS[0], tools=TOOLS, **variables)
    assert encode_chat(ours, CHATS[0], tools=TOOLS, template_kwargs=variables) == expected


@pytest.mark.parametrize("template", [LLAMA3, QWEN3, MISTRAL], ids=["llama3", "qwen3", "mistral"])
@pytest.mark.parametrize("messages", OPEN_CHATS)
def test_same_ids_when_the_last_message_is_continued(
    tmp_path: Path, template: str, messages: list[dict[str, str]]
) -> None:
    ours, reference = both(tmp_path, template)
    expected = theirs(reference, messages, add_generation_prompt=False, continue_final_message=True)
    assert encode_chat(ours, messages, continue_final_message=True) == expected


@pytest.mark.parametrize("text", ["Hello world", " two  spaces", "naïve 你好 😀", "<|im_start|>x"])
@pytest.mark.parametrize("kind", [byte_level, byte_fallback], ids=["byte_level", "byte_fallback"])
def test_same_ids_of_plain_text(tmp_path: Path, text: str, kind: Any) -> None:
    ours, reference = both(tmp_path, MISTRAL, kind=kind)
    for add_special_tokens in (True, False):
        expected = reference.encode(text, add_special_tokens=add_special_tokens)
        assert ours.encode(text, add_special_tokens=add_special_tokens) == expected


def test_the_tool_template_is_used_with_tools() -> None:
    config = {
        "chat_template": [
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "{{ tools[0].type }}"},
        ]
    }
    tokenizer = Tokenizer.from_files(bundle_files(byte_level(), config))
    assert render_chat(tokenizer, CHATS[0]) == "plain"
    assert render_chat(tokenizer, CHATS[0], tools=TOOLS) == "function"


def test_the_separate_template_file_is_preferred() -> None:
    files = bundle_files(byte_level(), {"chat_template": "inline"}, chat_template="file")
    assert render_chat(Tokenizer.from_files(files), CHATS[0]) == "file"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[0].content.nothing.more }}", "uses an undefined value"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% if %}", "syntax error in line 1"),
        ("{{ " + "+".join(["1"] * 3000) + " }}", "cannot be compiled: RecursionError"),
        ("{% for x in y %}" * 25 + "{% endfor %}" * 25, "cannot be compiled: SyntaxError"),
        ("{{ messages.append(1) }}", "sandbox forbids"),
        ("{{ ''.__class__.__mro__ }}", "sandbox forbids|undefined value"),
        ("{% set ns = namespace(_x=1) %}", "sandbox forbids"),
        ("{% for i in range(10000000) %}{% endfor %}", "OverflowError"),
    ],
)
def test_a_failing_template_reports_the_cause(source: str, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        ChatTemplate(source, {}).render(CHATS[0])


def test_a_message_that_the_template_drops_cannot_be_continued() -> None:
    with pytest.raises(ChatTemplateError, match="continue_final_message"):
        ChatTemplate("nothing", {}).render(OPEN_CHATS[0], continue_final_message=True)


def test_server_variables_cannot_be_overwritten() -> None:
    with pytest.raises(ChatTemplateError, match="add_generation_prompt"):
        ChatTemplate("x", {}).render(CHATS[0], template_kwargs={"add_generation_prompt": False})


def test_without_a_template_the_error_says_what_to_send() -> None:
    with pytest.raises(ChatTemplateError, match=r"prompt\.text"):
        render_chat(Tokenizer.from_files(bundle_files(byte_level())), CHATS[0])


DEMO_MODEL = Path(__file__).parents[3] / "client" / "quire_client" / "demo_model"


@pytest.mark.skipif(not (DEMO_MODEL / "tokenizer.json").exists(), reason="the demo model is not in this checkout")
def test_the_demo_model_gives_the_same_ids_as_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
    files = {name: (DEMO_MODEL / name).read_bytes() for name in names if (DEMO_MODEL / name).exists()}
    ours, reference = Tokenizer.from_files(files), transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)
    for messages in (CHATS[0], [{"role": "user", "content": "What does abs do?"}]):
        assert encode_chat(ours, messages) == theirs(reference, messages)
    assert ours.encode("What does abs do?", add_special_tokens=True) == reference.encode("What does abs do?")
