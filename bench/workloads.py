"""The serving workloads of all benchmarks: token ids and output lengths from fixed seeds, and the models.

w1: 64 requests of 25-256 input and 25-256 output tokens, small model.
w2: 16 requests of 32-128 input and 16-64 output tokens, shape of Qwen3-0.6B.
w3: 64 requests with a common prefix of 1,024 tokens, 32 unique tokens and 32 output tokens, small model.
All requests arrive at the start, are greedy by default and ignore the end-of-sequence token. Weights are random: the
output is meaningless, but a real model of this shape takes the same time.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

Model = dict[str, Any]

SMALL: Model = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    "intermediate_size": 768, "vocab_size": 4096, "max_position_embeddings": 4096,
}  # fmt: skip
QWEN3_06B: Model = {
    "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "vocab_size": 151936, "max_position_embeddings": 40960,
}  # fmt: skip
COMMON: Model = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "rope_theta": 1e6,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "attention_bias": False, "initializer_range": 0.02,
    "eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip

INT4_GROUP = 128
PACK_QUANTIZED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": INT4_GROUP},
        }
    },
}


class Request(NamedTuple):
    """One prompt and its number of output tokens."""

    prompt: list[int]
    num_output: int


class Workload(NamedTuple):
    """Requests, their model, and the length of their common prefix."""

    requests: list[Request]
    model: Model
    shared_len: int

    @property
    def num_output(self) -> int:
        return sum(request.num_output for request in self.requests)


def _random_requests(rng: random.Random, count: int, vocab: int, prompt: tuple[int, int], output: tuple[int, int]):
    requests = []
    for _ in range(count):
        ids = [rng.randrange(3, vocab) for _ in range(rng.randint(*prompt))]
        requests.append(Request(ids, rng.randint(*output)))
    return requests


def w1() -> Workload:
    return Workload(_random_requests(random.Random(0), 64, 4096, (25, 256), (25, 256)), SMALL, 0)


def w2() -> Workload:
    return Workload(_random_requests(random.Random(1), 16, 8192, (32, 128), (16, 64)), QWEN3_06B, 0)


def w3() -> Workload:
    rng = random.Random(2)
    prefix = [rng.randrange(3, 4096) for _ in range(1024)]
    requests = [Request(prefix + [rng.randrange(3, 4096) for _ in range(32)], 32) for _ in range(64)]
    return Workload(requests, SMALL, 1024)


def nano(model: Model = QWEN3_06B) -> Workload:
    """nano-vllm's benchmark: 256 requests, 100-1024 tokens in and out. For GPUs; not in WORKLOADS."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    return Workload([Request(prompt, rng.randint(100, 1024)) for prompt in prompts], model, 0)


WORKLOADS: dict[str, Callable[[], Workload]] = {"w1": w1, "w2": w2, "w3": w3}


def make_model(folder: Path, model: Model, dtype: str = "bfloat16", *, is_int4: bool = False) -> Path:
    """Write a random Hugging Face checkpoint of that shape in `dtype`; returns its folder. `is_int4`: its linear layers
    are `pack-quantized`.

    It has no tokenizer: requests contain token ids. Requires torch but not transformers.
    """
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    torch_dtype = getattr(torch, dtype)
    tensors = {}
    for name, shape in weight_shapes(model).items():
        if is_int4 and name.endswith("_proj"):
            tensors |= {f"model.{name}.{part}": tensor for part, tensor in _int4_parts(shape, generator).items()}
            continue
        is_norm = len(shape) == 1
        weight = torch.ones(shape) if is_norm else torch.empty(shape).normal_(0, 0.02, generator=generator)
        tensors[f"model.{name}.weight"] = weight.to(torch_dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = COMMON | model | {"dtype": dtype, "torch_dtype": dtype}
    if is_int4:
        fields["quantization_config"] = PACK_QUANTIZED
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def _int4_parts(shape: tuple[int, int], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random weights in 4 bits with a standard deviation of about 0.02."""
    import torch

    outputs, inputs = shape
    words = torch.randint(-(1 << 31), 1 << 31, (outputs, inputs // 8), dtype=torch.int32, generator=generator)
    scales = torch.full((outputs, inputs // INT4_GROUP), 0.02 / 4.6, dtype=torch.bfloat16)
    return {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor(shape)}


def weight_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of the Qwen3 architecture, or of Qwen3-MoE, with tied embeddings."""
    hidden, head_dim = model["hidden_size"], model["head_dim"]
    q_size = model["num_attention_heads"] * head_dim
    kv_size = model["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (model["vocab_size"], hidden), "norm": (hidden,)}
    for index in range(model["num_hidden_layers"]):
        layer = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_norm": (head_dim,),
            "self_attn.k_norm": (head_dim,),
            "self_attn.q_proj": (q_size, hidden),
            "self_attn.k_proj": (kv_size, hidden),
            "self_attn.v_proj": (kv_size, hidden),
            "self_attn.o_proj": (hidden, q_size),
        }
        layer |= _feed_forward_shapes(model)
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _feed_forward_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    hidden, num_experts = model["hidden_size"], model.get("num_experts", 0)
    inner = model["moe_intermediate_size"] if num_experts else model["intermediate_size"]
    parts = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    if not num_experts:
        return {f"mlp.{name}": shape for name, shape in parts.items()}
    experts = {f"mlp.experts.{index}.{name}": shape for index in range(num_experts) for name, shape in parts.items()}
    return {"mlp.gate": (num_experts, hidden)} | experts
