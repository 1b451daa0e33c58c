"""A checkpoint of bench/workloads.py (Qwen3, bf16, tied embeddings) as GGUF for llama.cpp. Runs in the peers' venv.

    $PEERS_VENV/bin/python bench/peers/make_gguf.py MODEL_DIR OUT.gguf [bf16|q8_0|q4_0]

The checkpoint has no tokenizer but llama.cpp requires one: every id gets a made-up word.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import gguf.quants
import torch
from safetensors.torch import load_file

NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "embed_tokens": "token_embd", "norm": "output_norm",
}  # fmt: skip


def main() -> None:
    folder, out = Path(sys.argv[1]), sys.argv[2]
    weights = sys.argv[3] if len(sys.argv) > 3 else "bf16"
    writer = gguf.GGUFWriter(out, "qwen3")
    add_settings(writer, json.loads((folder / "config.json").read_text()))
    for name, tensor in load_file(folder / "model.safetensors").items():
        add_tensor(writer, name.removeprefix("model.").removesuffix(".weight"), tensor, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_settings(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    alphabet = list(byte_alphabet())
    words = alphabet + [f"t{i}" for i in range(len(alphabet), config["vocab_size"])]
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))
    writer.add_token_merges([f"{alphabet[0]} {alphabet[1]}"])
    writer.add_eos_token_id(config["eos_token_id"])


def byte_alphabet() -> str:
    """The 256 characters that represent bytes in a byte-level vocabulary."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return "".join(map(chr, shown)) + "".join(chr(256 + i) for i in range(len(hidden)))


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, weights: str) -> None:
    """Norms in float32 as llama.cpp requires, matrices in bf16, or in 8 or 4 bits."""
    _, _, in_layer = name.partition("layers.")
    number, _, part = in_layer.partition(".")
    target = f"blk.{number}.{NAMES[part]}.weight" if in_layer else f"{NAMES[name]}.weight"
    if tensor.dim() == 1:
        writer.add_tensor(target, tensor.float().numpy())
        return
    if weights != "bf16":
        kind = gguf.GGMLQuantizationType[weights.upper()]
        writer.add_tensor(target, gguf.quants.quantize(tensor.float().numpy(), kind), raw_dtype=kind)
        return
    data = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    writer.add_tensor(target, data, raw_dtype=gguf.GGMLQuantizationType.BF16)


if __name__ == "__main__":
    main()
