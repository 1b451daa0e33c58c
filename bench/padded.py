"""The baseline of bench/worker.py: the fastest plain PyTorch loop for a workload that is known in advance.

Dense KV of the longest length, one batch, scaled_dot_product_attention, requests sorted so that finished ones can be
dropped from the end. No paging, no scheduler, argmax only.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from bench.workloads import Workload


class PaddedLoop:
    """One model in one dtype. `run` takes a whole workload and returns the seconds it took."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        config = json.loads((folder / "config.json").read_text())
        weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
        self.dtype = dtype
        self.heads = [config["num_attention_heads"], config["num_key_value_heads"], config["num_key_value_heads"]]
        self.dim, self.eps = config["head_dim"], config["rms_norm_eps"]
        self.embedding, self.final_norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
        self.layers = [self._layer(weights, i) for i in range(config["num_hidden_layers"])]
        inv_freq = 1.0 / config["rope_theta"] ** (torch.arange(0, self.dim, 2).float() / self.dim)
        angles = torch.arange(4096).float()[:, None] * inv_freq[None]
        self.cos, self.sin = (torch.cat((f, f), -1).to(dtype) for f in (angles.cos(), angles.sin()))

    def _layer(self, weights: dict[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
        prefix, suffix = f"model.layers.{index}.", ".weight"
        own = {k[len(prefix) : -len(suffix)]: w for k, w in weights.items() if k.startswith(prefix)}
        own["qkv"] = torch.cat([own.pop(f"self_attn.{name}_proj") for name in "qkv"])
        own["gate_up"] = torch.cat([own.pop(f"mlp.{name}_proj") for name in ("gate", "up")])
        return own

    @torch.inference_mode()
    def run(self, workload: Workload) -> float:
        """Computes every prompt, and the number of output tokens of each request."""
        requests = sorted(workload.requests, key=lambda r: -r.num_output)
        lens = torch.tensor([len(r.prompt) for r in requests])
        wanted = [r.num_output for r in requests]
        longest = max(len(r.prompt) + r.num_output for r in requests)
        prompts = torch.zeros(len(requests), int(lens.max()), dtype=torch.long)
        for i, request in enumerate(requests):
            prompts[i, : len(request.prompt)] = torch.tensor(request.prompt)
        shape = (2, len(self.layers), len(requests), self.heads[1], longest, self.dim)
        cache = torch.zeros(shape, dtype=self.dtype)
        started = time.perf_counter()
        shared = workload.shared_len
        if shared:
            self._forward(prompts[:1, :shared], torch.arange(shared)[None], cache[:, :, :1])
            cache[:, :, 1:, :, :shared] = cache[:, :, :1, :, :shared]
        positions = torch.arange(shared, prompts.shape[1])[None].expand(len(requests), -1)
        tokens = self._next(self._forward(prompts[:, shared:], positions, cache), lens - shared - 1)
        num_done, running = 1, len(requests)
        while True:
            while running and wanted[running - 1] <= num_done:
                running -= 1
            if not running:
                return time.perf_counter() - started
            positions = (lens[:running] + num_done - 1)[:, None]
            hidden = self._forward(tokens[:running, None], positions, cache[:, :, :running])
            tokens = self._next(hidden, torch.zeros(running, dtype=torch.long))
            num_done += 1

    def _next(self, hidden: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        x = hidden[torch.arange(len(hidden)), last]
        logits = F.linear(F.rms_norm(x, x.shape[-1:], self.final_norm, self.eps), self.embedding)
        return logits.float().argmax(-1)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, T, hidden]; keys and values go to their positions."""
        x = F.embedding(ids, self.embedding)
        end = int(positions.max()) + 1
        mask = (torch.arange(end) <= positions[:, :, None])[:, None]
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        rows = torch.arange(len(ids))[:, None]
        for layer, keys, values in zip(self.layers, *cache, strict=True):
            h = F.rms_norm(x, x.shape[-1:], layer["input_layernorm"], self.eps)
            qkv = F.linear(h, layer["qkv"]).view(*ids.shape, -1, self.dim)
            q, k, v = (part.transpose(1, 2) for part in qkv.split(self.heads, 2))
            q = self._rotate(F.rms_norm(q, (self.dim,), layer["self_attn.q_norm"], self.eps), cos, sin)
            k = self._rotate(F.rms_norm(k, (self.dim,), layer["self_attn.k_norm"], self.eps), cos, sin)
            keys[rows, :, positions] = k.transpose(1, 2)
            values[rows, :, positions] = v.transpose(1, 2)
            attended = F.scaled_dot_product_attention(
                q, keys[:, :, :end], values[:, :, :end], attn_mask=mask, enable_gqa=True
            )
            x = x + F.linear(attended.transpose(1, 2).flatten(2), layer["self_attn.o_proj"])
            h = F.rms_norm(x, x.shape[-1:], layer["post_attention_layernorm"], self.eps)
            gate, up = F.linear(h, layer["gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer["mlp.down_proj"])
        return x

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin
