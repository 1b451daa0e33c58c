"""The bundled model matches its README: small, loadable by transformers, exact answers to learned questions."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from quire_client.demo import demo_model_dir
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

FILES = {
    "LICENSE-PSF",
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "pairs.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
EXACT = {
    "What does json.dumps do?": "Serialize ``obj`` to a JSON formatted ``str``.",
    "What does len do?": "Return the number of items in a container.",
    "Explain str.upper.": "Return a copy of the string converted to uppercase.",
    "What does os.path.join do?": "Join two or more pathname components, inserting '/' as needed.",
    "What is the csv module?": "CSV parsing and writing.",
    "What does shutil.copytree do?": "Recursively copy a directory tree and return the destination directory.",
    "What does heapq.heappush do?": "Push item onto heap, maintaining the heap invariant.",
    "What is ZeroDivisionError?": "Second argument to a division or modulo operation was zero.",
    "Thank you!": "You are welcome.",
    "Who are you?": (
        "I am the demo model of Quire: about one million parameters that learned more than a thousand sentences of "
        "Python's own documentation by heart."
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo_model_dir())


@pytest.fixture(scope="module")
def model() -> Any:
    """The shipped bfloat16 weights, computed in float32."""
    return AutoModelForCausalLM.from_pretrained(demo_model_dir(), dtype=torch.float32).eval()


def test_the_folder_is_complete_and_small() -> None:
    sizes = {path.name: path.stat().st_size for path in demo_model_dir().iterdir() if path.is_file()}
    assert set(sizes) == FILES
    assert sizes["model.safetensors"] < 2_200_000
    assert sum(sizes.values()) < 2_600_000


def test_the_weights_are_bfloat16_and_the_sizes_match_the_readme(model: Any) -> None:
    with safe_open(demo_model_dir() / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim) == (4, 128, 32)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert (config.vocab_size, config.max_position_embeddings) == (2048, 4096)
    assert config.tie_word_embeddings
    assert 1_000_000 < sum(parameter.numel() for parameter in model.parameters()) < 1_100_000
    assert model.generation_config.do_sample is False


def test_the_template_is_chatml(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    without = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == without + "<|im_start|>assistant\n"


def test_the_template_takes_tools(tokenizer: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert text.startswith(f"<|im_start|>system\nTools:\n{json.dumps(tools[0])}\n")
    called = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert text.endswith(f"<|im_start|>assistant\n{called}<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n")
    assert "system" not in tokenizer.apply_chat_template(messages[:1], tokenize=False)


@pytest.mark.parametrize("question", EXACT)
def test_learned_answers_are_exact(question: str, model: Any, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=80)[0, inputs["input_ids"].shape[1] :]
    assert output[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(output, skip_special_tokens=True) == EXACT[question]


def test_any_text_survives_the_tokenizer(tokenizer: Any) -> None:
    for text in ("def f(x): return x\n\n", "Grüße 世界 🙂", "  two  spaces ", "\t\0"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_the_pair_list_is_well_formed() -> None:
    content = json.loads((demo_model_dir() / "pairs.json").read_text(encoding="utf-8"))
    assert len(content["pairs"]) > 1000
    for pair in content["pairs"]:
        assert pair["answer"].strip() == pair["answer"] != ""
        assert pair.get("questions") or content["wordings"][pair["kind"]], pair


def test_the_training_script_has_help() -> None:
    script = demo_model_dir().parents[2] / "scripts" / "train_demo.py"
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, check=True)
    for flag in ("--out", "--pairs", "--make-pairs", "--check", "--steps", "--seed"):
        assert flag in done.stdout
