"""The interface of a backend. cpu/backend.py makes those of CPUs.

A backend computes and makes no decisions. Every operation works on all tokens of a step at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from step_protocol.columns import F32, I32, I64, U32, Bools

if TYPE_CHECKING:
    import torch  # rows and plans use these types even if torch is not installed

    from worker_svc.engine.checkpoint.architecture import NormKind, SharedKind
    from worker_svc.engine.recurrent import StatePool


Cache: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"  # keys and values of one layer
SITES = ("qkv", "o", "gate_up", "down")  # the linear layers of a layer; the order of `Site` in forward.cpp


class BackendUnavailableError(RuntimeError):
    """The requested backend cannot run here; the message says which one can."""


class NoDeviceError(BackendUnavailableError):
    """No GPU can be used, whatever the model. `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; use --backend cpu")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Embedded:
    """Input embeddings of some tokens of a step that are not those of the vocabulary."""

    tokens: I64  # [E] ascending indices of the tokens
    rows: torch.Tensor  # [E, hidden] in the number type of the model


@dataclass(frozen=True, slots=True)
class EncoderColumns:
    """The encoder positions at the head of each row of an encoder-decoder model."""

    lens: I32  # [B] positions with keys and values of cross-attention
    ends: I32  # [B] where the decoder's positions begin: `lens`, padded to whole blocks
    inputs: Mapping[int, torch.Tensor]  # row -> log-mel features [num_mel_bins, frames] of an audio input


@dataclass(frozen=True, slots=True)
class DeepRows:
    """What is added to some tokens of a step after each of the first layers (DeepStack)."""

    tokens: I64  # [V] ascending indices of the tokens
    rows: torch.Tensor  # [num_layers, V, hidden] in the number type of the model


@dataclass(frozen=True, slots=True)
class SnapshotColumns:
    """The snapshots that a step of B rows takes: those of row i are starts[i] to starts[i + 1], ascending."""

    starts: I32  # [B + 1]
    ends: I32  # [N] number of the row's tokens of this step that they include
    slots: I32  # [N] slots of the state pool


@dataclass(frozen=True, slots=True)
class GroupColumns:
    """`slots` and `tables` of a batch in the cache groups after the first one."""

    slots: I64  # [G, T]
    tables: I32  # [G, max_num_seqs, max_blocks]


@dataclass(slots=True)
class ForwardBatch:
    """The rows of one forward pass: B rows, T tokens, all valid."""

    token_ids: I64  # [T] a valid id also for tokens that `embedded` replaces
    positions: I32  # [T] of the rotation or the learned positions
    slots: I64  # [T] destinations of keys and values
    rows: I32  # [B] rows of `tables`
    query_starts: I32  # [B + 1] first token of each row
    context_lens: I32  # [B] tokens in the pool before this step
    tables: I32  # [max_num_seqs, max_blocks] block tables of all rows
    head_tokens: I64  # [S] tokens that need logits, ascending
    encoders: EncoderColumns | None = None  # of an encoder-decoder model
    hidden_tokens: I64 | None = None  # [H] tokens whose hidden states are returned, ascending
    token_types: I64 | None = None  # [T] for models with token types. None: all 0
    key_lens: I32 | None = None  # [B] if not causal: keys that each row sees. None: those of its tokens
    embedded: Embedded | None = None
    deep: DeepRows | None = None
    rotary: RotaryTable | None = None  # in place of that of the layers; `positions` are rows of it
    adapters: Sequence[AdapterRows] = ()  # no token has two
    snapshots: SnapshotColumns | None = None  # of a model with recurrent layers
    groups: GroupColumns | None = None  # of a pool with several cache groups

    def of_group(self, group: int) -> ForwardBatch:
        """The same batch with the slots and tables of a cache group; 0: the first one."""
        if self.groups is None or not group:
            return self
        return replace(self, slots=self.groups.slots[group - 1], tables=self.groups.tables[group - 1])

    def merged_heads(self) -> tuple[I64, I64, I64]:
        """Head tokens and hidden tokens together, ascending; the lines of the head tokens and of the hidden tokens."""
        if self.hidden_tokens is None:
            return self.head_tokens, np.arange(len(self.head_tokens)), self.head_tokens[:0]
        merged: I64 = np.union1d(self.head_tokens, self.hidden_tokens)
        return merged, np.searchsorted(merged, self.head_tokens), np.searchsorted(merged, self.hidden_tokens)


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Sampling parameters of S rows of logits, as indices into the columns of the row table."""

    params: Mapping[str, npt.NDArray[Any]]  # one column per field of SamplingParams, and `sample_index`: [max_num_seqs]
    rows: I64  # [S] indices into these columns
    positions: U32  # [S] output positions

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """The values of one parameter for the S rows."""
        return self.params[name][self.rows]


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Log probabilities of the chosen token and of the k most likely tokens, for n rows of logits."""

    values: F32  # [n, 1 + k] the chosen token first
    token_ids: U32  # [n, 1 + k]
    ranks: U32  # [n] of the chosen tokens
    is_bad: Bools  # [n] the logits have NaN, +inf or no finite number; the other columns have NaN and 0


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of an attention layer."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int


LATENT_LANES = 16  # the rows of latents in the pool are whole vectors


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Heads of latent attention (decoder/latents.py). A key is the `rank` numbers of a latent and `rope_dim` rotated
    ones, the value is the latent; all heads share them. A head's query and output have `key_dim` + `rope_dim` and
    `value_dim` numbers before and after the heads' own linear layers."""

    num_heads: int
    rank: int
    rope_dim: int
    key_dim: int
    value_dim: int
    is_interleaved: bool  # a rotated pair is two neighbours; else a number of each half

    @property
    def width(self) -> int:
        """Numbers of a token in the pool: its key, filled up with zeros."""
        return -(-(self.rank + self.rope_dim) // LATENT_LANES) * LATENT_LANES

    @property
    def query_dim(self) -> int:
        """Numbers of a head's query."""
        return self.key_dim + self.rope_dim


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What a layer keeps of each token in the KV pool."""

    num_kv_heads: int
    key_dim: int
    value_dim: int  # 0: a value is the beginning of its key
    owner: int | None = None  # the layer whose keys and values this one reads. None: it has its own

    @classmethod
    def of(cls, heads: HeadShape, owner: int | None = None) -> KVLayout:
        """Keys and values of equal size."""
        return cls(heads.num_kv_heads, heads.head_dim, heads.head_dim, owner)

    def shapes(self, block_size: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of a block's keys and values, or of its latents."""
        if self.num_kv_heads and not self.value_dim:
            return ((block_size, self.key_dim),)
        return (self.num_kv_heads, self.key_dim, block_size), (self.num_kv_heads, block_size, self.value_dim)


NO_KV = KVLayout(0, 0, 0)  # the layer keeps nothing of a token


@dataclass(frozen=True, slots=True)
class PositionBias:
    """Biases of attention scores that depend on the distance of key and query: the score of query position p and key
    position k gets values[head, zero + k - p]."""

    values: torch.Tensor  # float32 [q_heads, width]; 127 numbers more than the largest distance needs
    zero: int


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of one layer."""

    heads: HeadShape
    scale: float
    soft_cap: float | None = None  # scores become cap * tanh(score / cap)
    # A token attends to this many tokens, itself included. If not causal: to those at most window // 2 away.
    window: int | None = None
    is_causal: bool = True  # False: a token attends to all tokens of its row, also those after it
    bias: PositionBias | None = None  # added to scores after the soft cap
    chunk: int | None = None  # a token attends to those from the last multiple of this position on
    sinks: torch.Tensor | None = None  # float32 [q_heads] a further score of each softmax, of a key without value

    @classmethod
    def plain(cls, heads: HeadShape) -> AttentionShape:
        """Causal attention with the usual scale."""
        return cls(heads, heads.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over the last dimension.

    rms: round(x / rms(x)) * weight. rms_offset: x / rms(x) * (1 + weight), rounded once. layer: (x - mean) / deviation
    * weight + bias, rounded once.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    kind: NormKind = "rms"


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos and sin of every position, float32 [max_model_len, dims / 2]; `dims` of each head are rotated."""

    cos: torch.Tensor
    sin: torch.Tensor
    axes: I64 | None = None  # [dims / 2] the axis whose position each frequency rotates by; None: there is one axis
    q_scales: torch.Tensor | None = None  # float32 [max_model_len] queries are multiplied by it at the end
    is_interleaved: bool = False  # neighbours are rotated together. False: the same places of two halves
    is_first: bool = False  # heads are rotated before their norms. False: after them

    def to(self, device: torch.device) -> RotaryTable:
        """The same table on a device."""
        q_scales = None if self.q_scales is None else self.q_scales.to(device)
        return replace(self, cos=self.cos.to(device), sin=self.sin.to(device), q_scales=q_scales)


@dataclass(frozen=True, slots=True)
class QkvPart:
    """How the queries and keys of a layer are made from its projections [q | k | v]."""

    heads: HeadShape
    rotary: RotaryTable | None  # None: they are not rotated
    norms: tuple[Norm, Norm] | None = None  # each spans as many numbers as its weight has. None: there are none


class Linear(Protocol):
    """A loaded weight. Maps [n, in] to [n, out]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Routing:
    """How the experts of a token are chosen from its router logits, and what their shares are.

    The `top_k` experts with the highest score plus correction are chosen, in this order; of equal ones the lower index
    comes first. With groups (of neighbours, of equal size) they are chosen from the `top_groups` groups whose
    `group_best` highest values have the highest sum. The score of a chosen expert is its share. A shared expert has the
    index `num_experts`; all tokens use it, after those that they choose.
    """

    num_experts: int
    top_k: int
    is_normalized: bool  # shares are divided by their sum
    is_sigmoid: bool = False  # a score is the sigmoid of its logit. False: the softmax of all logits
    scale: float = 1.0  # of the shares, after that
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    shared: SharedKind = "none"  # gated: its share is the sigmoid of the last router logit. whole: 1
    scales_inputs: bool = False  # a share multiplies what goes into its expert, not what comes out
    is_float32: bool = False  # router logits are computed in float32

    @property
    def num_used(self) -> int:
        """The number of experts that a token uses."""
        return self.top_k + (self.shared != "none")

    @property
    def num_logits(self) -> int:
        """The number of outputs of the router."""
        return self.num_experts + (self.shared == "gated")


@dataclass(frozen=True, slots=True)
class ExpertLinears:
    """Weights of a layer's experts, the shared one last. Those of one expert are [gate | up], [2 * inner, dim], or up
    alone, and down, [dim, inner]."""

    gate_up: Sequence[Linear]
    down: Sequence[Linear]
    routing: Routing
    correction: torch.Tensor | None  # float32 [num_experts], added to scores for the choice alone
    is_gated: bool
    # float32 [num_experts] of the shares, after that of `Routing`
    scales: torch.Tensor | None = field(default=None, kw_only=True)

    def pair(self, number: int) -> tuple[Linear, Linear] | None:
        """The linear layers of an expert; None: another rank has them."""
        return self.gate_up[number], self.down[number]


@dataclass(frozen=True, slots=True)
class RecurrentWeights:
    """The tensors of a recurrent layer besides its two linear layers, in float32."""

    conv: torch.Tensor  # [kernel, channels]
    conv_bias: torch.Tensor | None  # [channels]
    decay: torch.Tensor | None  # [num_heads] -e^A; None: a short convolution
    step_bias: torch.Tensor | None  # [num_heads]
    skip: torch.Tensor | None  # [num_heads]
    norm: torch.Tensor | None  # [norm_width], or [num_values]


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Weights of latent attention after the first linear layer, whose output is [source of queries | latent | rotated].
    The source is normed and goes through `query`, or has the queries themselves."""

    shape: LatentShape
    query_norm: Norm | None
    query: Linear | None  # None: the queries are computed already
    norm: Norm  # applied to latents
    absorb: list[Linear]  # [rank, key_dim] of each head: K_h^T
    expand: list[Linear]  # [value_dim, rank] of each head: V_h

    def linears(self) -> Iterator[Linear]:
        """All linear layers."""
        yield from (*(() if self.query is None else (self.query,)), *self.absorb, *self.expand)


class LatentTokens(NamedTuple):
    """Projections of T tokens for latent attention. Rows may be parts of longer ones."""

    q: torch.Tensor  # [T, heads * query_dim]
    latents: torch.Tensor  # [T, rank + rope_dim]
    rotary: RotaryTable


class Module(NamedTuple):
    """A linear layer that an adapter may change: some of the outputs of a site of the decoder."""

    layer: int
    site: int
    first_output: int
    num_outputs: int
    num_inputs: int


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """A change of some outputs of a site by an adapter: b @ (a @ x) is added."""

    module: Module
    a: torch.Tensor  # [rank, inputs]
    b: torch.Tensor  # [outputs, rank], times the scale


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded adapter. `digest` identifies its content: equal adapters have equal digests."""

    digest: bytes  # 16 bytes
    max_rank: int
    parts: tuple[AdapterPart, ...]  # in the order of layers and sites

    @property
    def num_bytes(self) -> int:
        """Size of its tensors."""
        return sum(tensor.nbytes for part in self.parts for tensor in (part.a, part.b))

    def by_site(self) -> Iterator[tuple[int, int, list[AdapterPart]]]:
        """Layer, site and parts of each site that it changes."""
        for (layer, site), parts in groupby(self.parts, key=lambda part: (part.module.layer, part.module.site)):
            yield layer, site, list(parts)


@dataclass(frozen=True, slots=True)
class Expansion:
    """Maps some of the outputs of `shrink` to some outputs of a site."""

    linear: Linear
    first_rank: int
    rank: int
    first_output: int
    num_outputs: int


@dataclass(frozen=True, slots=True)
class LowRank:
    """A change of a site by an adapter: for each expansion, linear(shrink(x)[ranks]) is added."""

    shrink: Linear
    rank: int  # outputs of `shrink`
    expansions: tuple[Expansion, ...]


class PackedAdapter:
    """The matrices of an adapter for one backend, by layer and site."""

    def __init__(self, sites: Sequence[LowRank | None]) -> None:
        self.sites = sites  # [layers * SITES]; None: the adapter does not change it

    def at(self, layer: int, site: int) -> LowRank | None:
        """What the adapter adds to a site of a layer."""
        return self.sites[layer * len(SITES) + site]


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """An adapter that a step uses, and its tokens."""

    adapter: PackedAdapter
    tokens: I32  # [n] among all tokens of the step
    heads: I32  # [m] among its head tokens


class LinearMaker(Protocol):
    """Prepares weights for use."""

    @property
    def copies_weights(self) -> bool:
        """`make_linear` keeps a copy of the weight, not of the bias."""

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Prepares a weight [out, in]. Without `copies_weights` the result may refer to it, so it must not change."""


class RowOperations(Protocol):
    """Operations on each row of a tensor."""

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None, out: torch.Tensor) -> None:
        """x [n, dim] += residual (if any), out = norm of x, or x if there is no norm. `out` may be x."""

    def gated_activation(self, gate_up: torch.Tensor, out: torch.Tensor, activation: str) -> None:
        """out [n, dim] = activation(gate) * up, for gate_up [n, 2 * dim]. `clamped_swiglu`: that of GPT-OSS."""

    def activation(self, x: torch.Tensor, activation: str) -> None:
        """x [n, dim] = activation(x)."""


class DecoderRowOperations(RowOperations, Protocol):
    """Operations on each row that only decoders need."""

    def gate_outputs(self, out: torch.Tensor, gate: torch.Tensor) -> None:
        """out [n, dim] *= sigmoid(gate), rounded once."""

    def soft_cap(self, x: torch.Tensor, cap: float) -> None:
        """x = cap * tanh(x / cap)."""


class LayerBackend(LinearMaker, RowOperations, Protocol):
    """Operations of the layers of encoders, encoder-decoders and towers. Tensors are contiguous and have the engine's
    dtype unless stated otherwise. The columns of batches are in host memory.

    k_cache is [num_blocks, kv_heads, head_dim, block_size], v_cache [num_blocks, kv_heads, block_size, head_dim]. A
    backend may order the numbers within a block differently.
    """

    name: str
    arithmetic: str  # identifies everything its rounding depends on; part of `numerics`
    device: torch.device  # of weights and results
    is_batched: bool  # False: rows, and the tokens of a decoder, must be computed one by one to be independent

    def qk_norm_rope_store(
        self, qkv: torch.Tensor, part: QkvPart, batch: ForwardBatch, cache: Cache, q_out: torch.Tensor
    ) -> None:
        """Splits fused qkv [T, heads, dim]; norms, rotates and scales q and k. Writes q to q_out [T, q_heads, dim], k
        and v to the slots of the batch."""

    def paged_attention(
        self, q: torch.Tensor, cache: Cache, batch: ForwardBatch, out: torch.Tensor, shape: AttentionShape
    ) -> None:
        """Attention of q [T, q_heads, dim] over each row's table, into out of the same shape."""

    def copy_blocks(self, pool: torch.Tensor, src: I64, dst: I64) -> None:
        """Copies blocks of pool [layers, num_blocks, ...] in all layers, in the given order."""


class Backend(LayerBackend, DecoderRowOperations, Protocol):
    """Operations of the decoder, in host memory."""

    formats: set[str]  # of weights that are multiplied in 4 bits; part of `numerics`

    @property
    def num_weight_bytes(self) -> int:
        """Size of the weights that the backend has packed."""

    def end_load(self) -> None:
        """The weights of the model are complete. Work on their memory that serving needs not wait for begins."""

    def pack_adapter(self, adapter: Adapter, num_layers: int) -> PackedAdapter:
        """Prepares an adapter. May be called by any thread."""

    def add_adapters(
        self, layer: int, site: int, rows: Sequence[tuple[PackedAdapter, I32]], x: torch.Tensor, y: torch.Tensor
    ) -> None:
        """y [n, out] += what each adapter adds to its rows of x [n, in] at one site: b(a(x)), rounded after a, and once
        more with y. No row has two adapters."""

    def recurrent(
        self, weights: RecurrentWeights, states: StatePool, index: int, batch: ForwardBatch, projected: torch.Tensor
    ) -> torch.Tensor:
        """The outputs [T, num_values] of recurrent layer `index` for the projections of all tokens. Advances the states
        of the batch's rows, and takes its snapshots."""

    def latent_rope_store(
        self, tokens: LatentTokens, part: LatentAttention, batch: ForwardBatch, cache: torch.Tensor, q_out: torch.Tensor
    ) -> None:
        """Norms the latents and rotates the rest, into the slots of cache [num_blocks, block_size, width]. Rotates the
        last numbers of each query, into those of q_out [T, heads, width] after the first `rank`. Fills both up with
        zeros."""

    def latent_attention(
        self, q: torch.Tensor, cache: torch.Tensor, batch: ForwardBatch, shape: LatentShape, scale: float
    ) -> torch.Tensor:
        """Causal attention of q [T, heads, width] over each row's latents: [T, heads, rank]."""

    def experts(
        self, x: torch.Tensor, router_logits: torch.Tensor, experts: ExpertLinears, activation: str, out: torch.Tensor
    ) -> None:
        """out [n, dim] = the sum of the outputs of each token's experts times their shares, in the order of `Routing`,
        for router_logits [n, num_logits]."""

    def process_logits(self, logits: torch.Tensor, selected: Any) -> None:
        """Changes float32 logits [S, vocab] in place, of the `ProcessedRows` that processors.py selects, as it says."""

    def sample(self, logits: torch.Tensor, columns: SamplingColumns) -> tuple[U32, npt.NDArray[np.bool_]]:
        """Tokens [S] for processed logits [S, vocab] as noise.py specifies, and a mask of rows with NaN or no finite
        number."""

    def logprobs(self, logits: torch.Tensor, lines: I64, token_ids: U32, num_top: int) -> TopLogprobs:
        """Log probabilities of `token_ids` [n] and of the `num_top` most likely tokens, from the rows `lines` [n] of
        logits [.., vocab], as logprobs.py specifies."""

    def filter_logits(self, logits: torch.Tensor, lines: I64, columns: SamplingColumns) -> tuple[torch.Tensor, U32]:
        """The values [n, vocab], float32, of the processed distributions of the rows `lines` [n] of processed logits
        [.., vocab], as logprobs.py specifies, and the number of ids [n] that have one. `columns` are of these n rows.
        A row with NaN, +inf or no finite number has NaN and 0."""
