"""Settings of an engine, and the facts about a loaded one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from request_fields.fields import SamplingParams
from step_protocol.types import AnnouncedModel, CacheGroup, EncoderInfo, ImageInfo, PoolingInfo

ComputeDtype = Literal["float32", "bfloat16", "float16"]
Dtype = Literal[ComputeDtype, "auto"]
KvCacheDtype = Literal["auto", "fp8"]
Determinism = Literal["exact", "best_effort"]
Quantization = Literal["int8", "fp8"]
CudaGraphs = Literal["start", "lazy", "off"]
Kernels = Literal["auto", "triton", "torch"]
AllReduce = Literal["auto", "nccl"]

MAX_BLOCK_SIZE = 256
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8")
ATTENTION = ("auto", "triton", "flash", "flash3", "torch")
CUDA_GRAPHS = ("start", "lazy", "off")
KERNELS = ("auto", "triton", "torch")
ALL_REDUCE = ("auto", "nccl")
PROPOSERS = {"suffix": False, "mtp": False, "draft": True, "eagle": True}  # whether a folder is named
MAX_DRAFTS = 16  # of one row in one step
SPECULATE = "suffix, mtp, draft:DIR or eagle:DIR"
QUANTIZING_BACKENDS: Mapping[Quantization, tuple[str, ...]] = {
    "int8": ("cpu", "reference", "cuda"), "fp8": ("cuda",),
}  # fmt: skip


class Speculate(NamedTuple):
    """How drafts are proposed: `suffix`, `mtp`, or `draft:DIR` and `eagle:DIR` with the folder of a model."""

    proposer: str
    folder: Path | None

    @classmethod
    def parse(cls, text: str) -> Speculate:
        """Raises ValueError."""
        proposer, colon, folder = text.partition(":")
        if PROPOSERS.get(proposer) != bool(colon) or bool(colon) != bool(folder):
            raise ValueError(f"speculate must be {SPECULATE}, got {text!r}")
        return cls(proposer, Path(folder) if folder else None)


class Sizes(NamedTuple):
    """Sizes of an engine whose settings name none."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


CPU_SIZES = Sizes(16, 64, 1024)
CUDA_SIZES = Sizes(64, 256, 8192)  # a GPU needs large steps, and blocks that hold a whole tile of keys


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine. Values are checked at construction; ValueError names the field.

    num_blocks None: the number that fits `kv_cache_memory` bytes.
    kv_cache_memory None: 1 GiB, or half of the free RAM if that is less.
    max_model_len None: the model's limit, capped by the size of the pool.
    threads None: one per core that this process may use.
    speculate: how drafts are proposed, as `Speculate` reads it (docs/speculation.md); None: there are none.
    max_drafts: of one row in one step.
    adapters: names and PEFT folders that are loaded at the start (docs/adapters.md).
    max_adapters: adapters that rows may use at the same time; 0: none can be loaded.
    image_cache_memory: bytes of embeddings of images that are kept. The default size of the pool leaves them free.
    snapshot_memory: bytes of snapshots of the states of recurrent layers; a prefix is reused only from a snapshot.
    max_adapter_rank: their largest rank. Their memory is reserved for this rank.
    max_loaded_adapters: adapters in host memory.
    has_groups: layers with attention windows may have blocks of their own (decoder/cache_groups.py).
    quantize: weights and inputs of linear layers are rounded to int8 (docs/adr/0003-cpu-kernels.md) or to fp8
    (backend cuda, docs/adr/0043-a-checkpoint-becomes-data.md). None: they are not.

    Only backend cuda (docs/adr/0013-gpu-engine.md) uses attention, tensor_parallel_size, dtype float16, and:
    gpu_memory_utilization: a fraction of the memory of the whole device.
    cuda_graphs: recorded at start-up (start), when a size first occurs (lazy), or never (off).
    cuda_graph_tokens: the largest step with prompts that is recorded as a graph; 0: decode steps only.
    kernels: auto replaces kernels of Triton that fail at the start by plain torch; triton fails instead; torch replaces
    all, on any device.
    kv_cache_dtype fp8: keys and values in 8 bits.
    all_reduce nccl: NCCL adds up all messages between ranks; auto: small ones are added up in shared memory.
    nnodes: hosts that share the model; node_rank: the number of this one. Each has an equal share of the ranks.
    """

    model_dir: Path
    dtype: Dtype = "auto"
    block_size: int = CPU_SIZES.block_size
    num_blocks: int | None = None
    max_num_seqs: int = CPU_SIZES.max_num_seqs
    max_num_batched_tokens: int = CPU_SIZES.max_num_batched_tokens
    max_model_len: int | None = None
    determinism: Determinism = "exact"
    threads: int | None = None
    backend: str = "cpu"
    quantize: Quantization | None = None
    kv_cache_memory: int | None = None
    model_name: str | None = None
    image_cache_memory: int = 256 << 20
    snapshot_memory: int = 256 << 20
    adapters: tuple[tuple[str, Path], ...] = ()
    max_adapters: int = 0
    max_adapter_rank: int = 64
    max_loaded_adapters: int = 256
    attention: str = "auto"
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    all_reduce: AllReduce = "auto"
    nnodes: int = 1
    node_rank: int = 0
    cuda_graphs: CudaGraphs = "start"
    cuda_graph_tokens: int = 8192
    kv_cache_dtype: KvCacheDtype = "auto"
    kernels: Kernels = "auto"
    speculate: str | None = None
    max_drafts: int = 8
    has_groups: bool = False

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _check_choice("determinism", self.determinism, ("exact", "best_effort"))
        _check_choice("attention", self.attention, ATTENTION)
        _check_choice("cuda_graphs", self.cuda_graphs, CUDA_GRAPHS)
        _check_choice("kernels", self.kernels, KERNELS)
        _check_choice("all_reduce", self.all_reduce, ALL_REDUCE)
        if self.cuda_graph_tokens < 0:
            raise ValueError(f"cuda_graph_tokens must be 0 (none) or more, got {self.cuda_graph_tokens}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}")
        size = self.block_size
        if not 1 <= size <= MAX_BLOCK_SIZE or size & (size - 1):
            raise ValueError(f"block_size must be a power of two from 1 to {MAX_BLOCK_SIZE}, got {size}")
        for name in ("num_blocks", "max_model_len", "threads", "kv_cache_memory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs {self.max_num_seqs}, so that a step has a token "
                f"for every running sequence, got {self.max_num_batched_tokens}"
            )
        if self.speculate is not None:
            proposer = Speculate.parse(self.speculate).proposer
            backends = ("cpu", "reference", "cuda") if proposer == "suffix" else ("cpu", "reference")
            _check_choice(f"backend with speculate={self.speculate}", self.backend, backends)
        if not 1 <= self.max_drafts <= MAX_DRAFTS:
            raise ValueError(f"max_drafts must be from 1 to {MAX_DRAFTS}, got {self.max_drafts}")
        self._check_nodes()
        for name in ("image_cache_memory", "snapshot_memory"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.max_adapters < 0 or self.max_adapter_rank < 1 or self.max_loaded_adapters < 1:
            raise ValueError(
                "max_adapters must be 0 or more, max_adapter_rank and max_loaded_adapters at least 1, got "
                f"{self.max_adapters}, {self.max_adapter_rank} and {self.max_loaded_adapters}"
            )
        if self.dtype == "float16":
            _check_choice("backend with dtype=float16", self.backend, ("cuda",))
        if self.kv_cache_dtype != "auto":
            _check_choice(f"backend with kv_cache_dtype={self.kv_cache_dtype}", self.backend, ("cuda",))
        if self.quantize is not None:
            _check_choice("quantize", self.quantize, tuple(QUANTIZING_BACKENDS))
            _check_choice(f"backend with quantize={self.quantize}", self.backend, QUANTIZING_BACKENDS[self.quantize])

    def _check_nodes(self) -> None:
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(f"node_rank must be from 0 to nnodes - 1 = {self.nnodes - 1}, got {self.node_rank}")
        if self.tensor_parallel_size % self.nnodes:
            raise ValueError(
                f"tensor_parallel_size must be a multiple of nnodes {self.nnodes}, got {self.tensor_parallel_size}"
            )
        if self.nnodes > 1:
            _check_choice(f"backend with nnodes={self.nnodes}", self.backend, ("cuda",))

    @property
    def proposer(self) -> str | None:
        """What proposes drafts; None: nothing does."""
        return None if self.speculate is None else Speculate.parse(self.speculate).proposer

    @property
    def draft_dir(self) -> Path | None:
        """The folder of what proposes drafts."""
        return None if self.speculate is None else Speculate.parse(self.speculate).folder

    @property
    def ranks_per_node(self) -> int:
        return self.tensor_parallel_size // self.nnodes


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{field} must be one of {', '.join(choices)}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class EngineInfo(AnnouncedModel):
    """Facts about a loaded engine. They are announced at registration, and callers may rely on them.

    `revision`: hex digest of configuration, weights, dtypes, quantization; in exact mode also of `numerics`, the kind
    of worker: a different kind may produce different tokens.
    """

    num_blocks: int
    max_num_batched_tokens: int
    default_sampling: SamplingParams  # from generation_config.json; seed 0
    dtype: ComputeDtype
    determinism: Determinism
    backend: str
    quantize: Quantization | None = None
    kv_cache_dtype: KvCacheDtype = "auto"  # auto: same as `dtype`
    pooling: PoolingInfo | None = None  # None: embeddings and scores are refused
    images: ImageInfo | None = None  # None: requests cannot have images
    max_adapters: int = 0  # adapters that its rows may use at the same time
    attention_window: int | None = None  # a token attends to so many tokens, itself included; None: to all
    encoder: EncoderInfo | None = None  # of an encoder-decoder model
    num_snapshots: int | None = None  # of states that a worker can keep; None: the model has no recurrent layers
    snapshot_tokens: int = 0  # tokens whose keys and values have as many bytes as a snapshot
    groups: tuple[CacheGroup, ...] = ()  # beside the layers whose blocks `num_blocks` counts
    degradations: tuple[str, ...] = ()  # why it serves slower than it could

    @property
    def num_all_blocks(self) -> int:
        """Of all groups. The block ids of a group follow those of the groups before it."""
        return self.num_blocks + sum(group.num_blocks for group in self.groups)


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """Weights that a runner has loaded and does not compute with yet."""

    info: EngineInfo  # with these weights
    used: frozenset[Path]  # the updates that some tensor comes from
    weights: Any  # of the runner
