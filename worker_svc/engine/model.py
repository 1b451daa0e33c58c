"""The decoder: its weights, concatenated and prepared for a backend, and the forward pass over a mixed batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from worker_svc.engine.architectures import ModelConfig
from worker_svc.engine.backend import Backend, ForwardBatch, Linear, RotaryTable
from worker_svc.engine.checkpoint import Checkpoint
from worker_svc.engine.exact_ops import cos_sin
from worker_svc.engine.kv_cache import KVCachePool
from worker_svc.engine.model_folder import CheckpointError

Progress = Callable[[float], None]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
IGNORED_ENDINGS = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer. qkv is [q | k | v] of all heads, gate_up is [gate | up]."""

    input_norm: torch.Tensor
    qkv: Linear
    qk_norms: tuple[torch.Tensor, torch.Tensor] | None
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """Everything that a forward pass reads."""

    config: ModelConfig
    embedding: torch.Tensor
    layers: list[Layer]
    final_norm: torch.Tensor
    head: Linear
    rotary: RotaryTable


class FusedForward(Protocol):
    """A whole forward pass in one call."""

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [S, vocab], valid until the next call."""
        ...

    def in_slices(self, batch: ForwardBatch, size: int) -> Iterator[torch.Tensor]:
        """The same logits, `size` rows at a time. Each slice overwrites the previous one."""
        ...


@runtime_checkable
class Fuser(Protocol):
    """A backend that may run a whole forward pass in one call."""

    def fuse(self, parts: DecoderParts, pool: KVCachePool) -> FusedForward | None:
        """None if this model must run operation by operation."""
        ...


def rotary_table(inv_freq: torch.Tensor, length: int) -> RotaryTable:
    """cos and sin of float32 angles, as in transformers, for positions below `length`; the same on every machine."""
    angles = torch.arange(length).float()[:, None] * inv_freq[None]
    return RotaryTable(*cos_sin(angles))


class LinearMaker(Protocol):
    """Prepares weights for use. Every backend implements it."""

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear: ...


class WeightLoader:
    """Reads the tensors of a model from a checkpoint, concatenates them and prepares them with the backend."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, backend: LinearMaker, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._backend = backend
        self._dtype = dtype
        heads = config.heads
        q_size, kv_size = heads.num_q_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        qkv_bias, mlp_bias = config.has_qkv_bias, config.has_mlp_bias
        # name within a layer: (out, in, has a bias)
        self._linears = {
            "self_attn.q_proj": (q_size, hidden, qkv_bias),
            "self_attn.k_proj": (kv_size, hidden, qkv_bias),
            "self_attn.v_proj": (kv_size, hidden, qkv_bias),
            "self_attn.o_proj": (hidden, q_size, config.has_o_bias),
            "mlp.gate_proj": (inner, hidden, mlp_bias),
            "mlp.up_proj": (inner, hidden, mlp_bias),
            "mlp.down_proj": (hidden, inner, mlp_bias),
        }
        self._norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if config.architecture.has_qk_norm:
            self._norms |= {"self_attn.q_norm": heads.head_dim, "self_attn.k_norm": heads.head_dim}

    def check(self) -> None:
        """Raises CheckpointError unless the checkpoint has all tensors and no others."""
        ignored = (*IGNORED_ENDINGS, HEAD) if self._config.is_tied else IGNORED_ENDINGS
        self._checkpoint.check_names(self._expected_names(), ignored)
        if self._config.is_tied and HEAD in self._checkpoint.tensor_names and not self._is_same(HEAD, EMBEDDING):
            raise CheckpointError(
                f"tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}; set tie_word_embeddings to false "
                f"in config.json to use {HEAD}, or remove {HEAD} from the checkpoint"
            )

    def _is_same(self, one: str, other: str) -> bool:
        shape = self._config.vocab_size, self._config.hidden_size
        return torch.equal(self._checkpoint.tensor(one, shape, None), self._checkpoint.tensor(other, shape, None))

    def embedding(self) -> torch.Tensor:
        """[vocab, hidden]; left memory-mapped where the dtype allows it."""
        return self._tensor(EMBEDDING, self._config.vocab_size, self._config.hidden_size)

    def final_norm(self) -> torch.Tensor:
        return self._tensor(FINAL_NORM, self._config.hidden_size)

    def head(self) -> Linear:
        name = EMBEDDING if self._config.is_tied else HEAD
        weight = self._tensor(name, self._config.vocab_size, self._config.hidden_size)
        return self._backend.make_linear(weight, None)

    def layer(self, index: int) -> Layer:
        prefix = f"model.layers.{index}."
        norms = {name: self._tensor(f"{prefix}{name}.weight", size) for name, size in self._norms.items()}
        qk_norms = None
        if self._config.architecture.has_qk_norm:
            qk_norms = (norms["self_attn.q_norm"], norms["self_attn.k_norm"])
        return Layer(
            input_norm=norms["input_layernorm"],
            qkv=self._fused(prefix, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            qk_norms=qk_norms,
            o=self._fused(prefix, "self_attn.o_proj"),
            post_norm=norms["post_attention_layernorm"],
            gate_up=self._fused(prefix, "mlp.gate_proj", "mlp.up_proj"),
            down=self._fused(prefix, "mlp.down_proj"),
        )

    def _expected_names(self) -> list[str]:
        names = [EMBEDDING, FINAL_NORM] if self._config.is_tied else [EMBEDDING, FINAL_NORM, HEAD]
        for index in range(self._config.num_layers):
            prefix = f"model.layers.{index}."
            names += [f"{prefix}{name}.weight" for name in (*self._norms, *self._linears)]
            names += [f"{prefix}{name}.bias" for name, (*_, has_bias) in self._linears.items() if has_bias]
        return names

    def _fused(self, prefix: str, *names: str) -> Linear:
        weights, biases = [], []
        for name in names:
            out_size, in_size, has_bias = self._linears[name]
            weights.append(self._tensor(f"{prefix}{name}.weight", out_size, in_size))
            if has_bias:
                biases.append(self._tensor(f"{prefix}{name}.bias", out_size))
        return self._backend.make_linear(torch.cat(weights), torch.cat(biases) if biases else None)

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self._checkpoint.tensor(name, shape, self._dtype)


class DecoderModel:
    """A loaded decoder. `forward` computes a step; `forward_in_slices` does the same for many rows of logits."""

    def __init__(
        self,
        loader: WeightLoader,
        config: ModelConfig,
        backend: Backend,
        max_model_len: int,
        progress: Progress | None = None,
    ) -> None:
        self._config = config
        self._backend = backend
        self._rotary = rotary_table(config.inv_freq, max_model_len)
        total = config.num_layers + 1
        report = progress or (lambda fraction: None)
        self._embedding = loader.embedding()
        self._final_norm = loader.final_norm()
        self._layers = []
        for index in range(config.num_layers):
            self._layers.append(loader.layer(index))
            report((index + 1) / total)
        self._head = loader.head()
        self._fused: FusedForward | None = None
        report(1.0)

    def fuse(self, pool: KVCachePool) -> None:
        """Makes each forward pass one call, if the backend supports it. `forward` must then be called with this pool,
        and its result is overwritten by the next call."""
        if isinstance(self._backend, Fuser):
            parts = (self._embedding, self._layers, self._final_norm, self._head, self._rotary)
            self._fused = self._backend.fuse(DecoderParts(self._config, *parts), pool)

    def forward(self, batch: ForwardBatch, pool: KVCachePool) -> torch.Tensor:
        """Stores keys and values of all tokens; returns logits [S, vocab] of the head tokens."""
        if self._fused is not None:
            return self._fused(batch)
        return self._logits(*self._hidden(batch, pool))

    def forward_in_slices(self, batch: ForwardBatch, pool: KVCachePool, size: int) -> Iterator[torch.Tensor]:
        """As `forward`, but returns the logits `size` rows at a time. Each slice may overwrite the previous one."""
        if self._fused is not None:
            yield from self._fused.in_slices(batch, size)
            return
        x, residual = self._hidden(batch, pool)
        for start in range(0, len(x), size):
            end = start + size
            yield self._logits(x[start:end], None if residual is None else residual[start:end])

    def _hidden(self, batch: ForwardBatch, pool: KVCachePool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Stores keys and values of all tokens; returns the output of the last layer for the head tokens, [S, hidden],
        as two terms of a sum."""
        x = self._embedding[torch.from_numpy(batch.token_ids)]
        heads = torch.from_numpy(batch.head_tokens)
        last = len(self._layers) - 1
        residual: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            attended = self._attend(x, residual, layer, batch, pool.layer(index))
            if index == last and len(heads) < len(x):
                x, attended = x[heads], attended[heads]  # the remaining operations need only these tokens
            if not len(x):
                return x, None
            residual = self._feed_forward(x, layer.o(attended), layer)
        return x, residual

    def _attend(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        layer: Layer,
        batch: ForwardBatch,
        cache: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Adds the residual to x; returns the attention output [T, q_heads * head_dim]."""
        backend, heads, eps = self._backend, self._config.heads, self._config.rms_norm_eps
        normed = torch.empty_like(x)
        backend.add_rms_norm(x, residual, layer.input_norm, normed, eps)
        qkv = layer.qkv(normed)
        q = x.new_empty(len(x), heads.num_q_heads, heads.head_dim)
        backend.qk_norm_rope_store(qkv, layer.qk_norms, self._rotary, batch, cache, q, heads, eps)
        attended = torch.empty_like(q)
        backend.paged_attention(q, cache, batch, attended, heads)
        return attended.view(len(x), -1)

    def _feed_forward(self, x: torch.Tensor, residual: torch.Tensor, layer: Layer) -> torch.Tensor:
        """Adds the residual to x; returns the MLP output [n, hidden]."""
        normed = torch.empty_like(x)
        self._backend.add_rms_norm(x, residual, layer.post_norm, normed, self._config.rms_norm_eps)
        activated = x.new_empty(len(x), self._config.intermediate_size)
        self._backend.gated_activation(layer.gate_up(normed), activated, self._config.activation)
        return layer.down(activated)

    def _logits(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if not len(x):
            return x.new_empty(0, self._config.vocab_size)
        normed = torch.empty_like(x)
        self._backend.add_rms_norm(x, residual, self._final_norm, normed, self._config.rms_norm_eps)
        return self._head(normed)
