"""The format of answers is detected from template and vocabulary, and flags override it; templates from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway_svc.flags import make_parser
from gateway_svc.process.schedulers import TemplateFileError, chat_templates, parser_names
from gateway_svc.text.bundle import Tokenizer
from gateway_svc.text.chat_output import ChatFormat, ParserNames, detect_format
from gateway_svc.text.reasoning import COHERE, GEMMA4, GPT_OSS, MAGISTRAL, THINK
from gateway_svc.text.tool_formats import TOOL_FORMATS
from svc_common import config
from tests.chat_templates import TEMPLATES
from tests.unit.gateway.rendering import render_chat
from tests.unit.gateway.tokenizer_kinds import bundle_files, byte_level

QWEN3_CODER = "{{ tools }}<tool_call>\n<function=name>\n<parameter=a>"


@pytest.mark.parametrize(
    ("template", "tokens", "tools", "reasoning"),
    [
        (TEMPLATES["hermes"], (), "hermes", THINK),
        (TEMPLATES["llama3"], (), "llama3", None),
        (TEMPLATES["mistral"], (), "mistral", None),
        (TEMPLATES["mistral"], ("[THINK]", "[/THINK]"), "mistral", MAGISTRAL),
        (QWEN3_CODER, (), "qwen3_coder", None),
        ("{{ tools }}<tool_call>name\n<arg_key>a</arg_key>\n<arg_value>", (), "glm45", None),
        ("{{ tools }}<tool_call>name<arg_key>a</arg_key><arg_value></think>", (), "glm47", THINK),
        ("{{ tools }}<minimax:tool_call><think></think>", (), "minimax_m2", THINK),
        ("{{ tools }}<｜tool▁calls▁begin｜>{{ name }}\n```json", ("<think>", "</think>"), "deepseek_v3", THINK),
        ("{{ tools }}<｜tool▁calls▁begin｜></think>", (), "deepseek_v31", THINK),
        ("{{ tools }}<|tool_calls_section_begin|></think>", (), "kimi_k2", THINK),
        ("{{ tools }}functions <|start|>assistant<|channel|>analysis<|message|>", (), "openai", GPT_OSS),
        ("{{ messages }}<|user|>a<|end|>", (), None, None),
        ("{{ tools }}<|tool_call>call:<tool_call|><|channel>thought<channel|>", (), "gemma4", GEMMA4),
        ("{{ tools }}<steptml:invoke name=", (), "step3", None),
        ("{{ tools }}<|START_ACTION|><|START_THINKING|><|END_THINKING|>", (), "cohere", COHERE),
        ("{{ tools }}<|tool|>{{ tools }}<|/tool|>", (), "phi4_mini", None),
        ("{{ tools }}<|tool_call|>", (), "granite", None),
        ("{{ tools }}<tool_calls></tool_calls>", (), "hunyuan", None),
        ("{{ tools }}<|tool_list_start|>", (), "lfm2", None),
        ("{{ tools }}<function_calls>", (), "olmo3", None),
        ("{{ tools }}[func_name1(params_name1=x)]<|python_tag|>", (), "pythonic", None),
        ("{{ messages }}", (), None, None),
        ("{{ messages }}", ("<think>",), None, None),
        ("{{ messages }}", ("<think>", "</think>"), None, THINK),
    ],
)
def test_the_format_is_detected(template: str, tokens: tuple[str, ...], tools: str | None, reasoning: object) -> None:
    found = detect_format(template, tokens.__contains__)
    assert found == ChatFormat(reasoning, None if tools is None else TOOL_FORMATS[tools])  # type: ignore[arg-type]


def flags(*words: str) -> ParserNames:
    return parser_names(config.parse(make_parser(), ["--scheduler", "a:1", *words]))


def test_flags_choose_parsers_for_one_model_or_all() -> None:
    names = flags("--tool-parser", "hermes", "--tool-parser", "b/c=none", "--reasoning-parser", "b/c=think")
    detected = ChatFormat(MAGISTRAL, TOOL_FORMATS["mistral"])
    assert names.format_of("a", detected) == ChatFormat(MAGISTRAL, TOOL_FORMATS["hermes"])
    assert names.format_of("b/c", detected) == ChatFormat(THINK, None)
    assert flags().format_of("a", detected) == detected


@pytest.mark.parametrize("flag", ["--tool-parser", "--reasoning-parser"])
def test_an_unknown_parser_is_refused(flag: str) -> None:
    with pytest.raises(config.SettingError, match=f"{flag} 'a=other': no parser 'other'; use one of auto, none, "):
        flags(flag, "a=other")


def test_templates_from_files(tmp_path: Path) -> None:
    file = tmp_path / "a.jinja"
    file.write_text("{{ tools }}<tool_call>")
    args = config.parse(make_parser(), ["--scheduler", "a:1", "--chat-template", f"named={file}"])
    templates = chat_templates(args)
    assert templates == {"named": "{{ tools }}<tool_call>"}
    tokenizer = Tokenizer.from_files(bundle_files(byte_level(), {"chat_template": "plain"}), templates)
    assert render_chat(tokenizer, [], template="named") == "None<tool_call>"
    assert render_chat(tokenizer, []) == "plain"
    assert tokenizer.chat_format("named").tools == TOOL_FORMATS["hermes"]
    assert tokenizer.chat_format().tools is None


def test_a_template_without_a_name_is_the_default(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("text")
    assert chat_templates(config.parse(make_parser(), ["--scheduler", "a:1", "--chat-template", str(file)])) == {
        "default": "text"
    }


@pytest.mark.parametrize("value", ["file.jinja", "=x", "a=", "a=/does/not/exist"])
def test_a_wrong_template_flag_is_refused(value: str) -> None:
    args = config.parse(make_parser(), ["--scheduler", "a:1", "--chat-template", value])
    with pytest.raises(TemplateFileError, match="--chat-template"):
        chat_templates(args)


@pytest.mark.parametrize("value", ['{"chat_template": "a"}', '{"chat_template": {"default": "a", "b": "c"}}'])
def test_templates_of_chat_template_json(value: str) -> None:
    files = bundle_files(byte_level(), {"chat_template": "old"}) | {"chat_template.json": value.encode()}
    tokenizer = Tokenizer.from_files(files)
    assert render_chat(tokenizer, []) == "a"
    if '"b"' in value:
        assert render_chat(tokenizer, [], template="b") == "c"
