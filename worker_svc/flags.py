"""Flags of quire-worker, and their conversion to settings."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from svc_common import config
from svc_common.tracing import add_flags as add_trace_flags
from svc_common.trust import add_flags
from worker_svc.engine.config import (
    ALL_REDUCE,
    ATTENTION,
    CUDA_GRAPHS,
    DTYPES,
    KV_CACHE_DTYPES,
    QUANTIZING_BACKENDS,
    EngineConfig,
)
from worker_svc.simulator.runner import SimConfig

EPILOG = """examples:
  quire-worker --model ./Qwen3-0.6B --scheduler 127.0.0.1:50052 --dtype bfloat16 --kv-cache-memory 2G
  quire-worker --model ./Qwen3-0.6B --scheduler sched-0:50052,sched-1:50052
  quire-worker --model ./Qwen3-0.6B --scheduler dns:///schedulers.example.com:50052
  quire-worker --model ./Qwen3-0.6B --scheduler 127.0.0.1:50052 --executor sim --sim-step-ms 20
"""


def _addresses(text: str) -> list[str]:
    return [config.scheduler_address(part.strip()) for part in text.split(",")]


def _adapter(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise ValueError("must be NAME=DIR")
    return name, Path(folder)


_ADAPTER = config.Kind(_adapter, "NAME=DIR")
_ADDRESSES = config.Kind(_addresses, config.scheduler_address.allowed)


class Sizes(NamedTuple):
    """Sizes that are not set by flags."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


CPU_SIZES = Sizes(16, 64, 1024)
CUDA_SIZES = Sizes(64, 256, 8192)  # a GPU needs large steps, and blocks that hold a whole tile of keys

_AT_LEAST_0 = config.in_range(float, 0.0, 1e9)
_AT_LEAST_1 = config.in_range(int, 1, 2**31 - 1)
_TOKENS_OR_0 = config.in_range(int, 0, 2**31 - 1)


def make_parser() -> argparse.ArgumentParser:
    """All flags of a worker."""
    parser = config.make_parser(
        "worker", "Loads one Hugging Face checkpoint, holds its KV blocks and runs its steps for a scheduler.", EPILOG
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="DIR|ORG/NAME[@REVISION]",
        help="folder with config.json, *.safetensors; or a model of the Hugging Face Hub, which is downloaded unless "
        "the local cache (HF_HUB_CACHE) has it",
    )
    model.add_argument(
        "--model-name",
        metavar="NAME",
        help="name that clients use in requests; unset: the folder's name, or ORG/NAME of the Hub",
    )
    model.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="type of weights and KV; auto: the checkpoint's, but on CPUs bfloat16 for float16; float16: cuda only",
    )
    model.add_argument(
        "--quantize",
        choices=tuple(QUANTIZING_BACKENDS),
        help="round weights and the inputs of linear layers to 8 bits: int8 on CPUs, fp8 on GPUs (cuda); faster, less "
        "accurate; all workers of a model must agree; unset: no rounding",
    )
    model.add_argument(
        "--determinism",
        choices=("exact", "best_effort"),
        default="exact",
        help="exact: the tokens of a request never depend on other requests",
    )
    model.add_argument(
        "--max-model-len",
        type=_AT_LEAST_1,
        metavar="N",
        help="longest prompt + output; unset: the limit of model and pool",
    )
    _add_adapter_flags(parser)
    pool = parser.add_argument_group("KV pool and batches")
    pool.add_argument(
        "--block-size", type=_AT_LEAST_1, metavar="N", help="tokens per block, a power of two; unset: 16, cuda: 64"
    )
    pool.add_argument("--num-blocks", type=_AT_LEAST_1, metavar="N", help="blocks; overrides --kv-cache-memory")
    pool.add_argument(
        "--kv-cache-memory",
        type=config.size_bytes,
        metavar="SIZE",
        help="memory for blocks (2G, 512M); unset: 1G, or half of the free memory if that is less",
    )
    pool.add_argument(
        "--image-cache-memory",
        type=config.size_bytes,
        default="256M",
        metavar="SIZE",
        help="memory for embeddings of images, so that an image of a later turn is not computed again; the default "
        "size of the pool leaves it free. Only for models that take images",
    )
    pool.add_argument(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default="auto",
        help="cuda: fp8 stores keys and values in 8 bits: twice as many fit, and reading them takes half as long; "
        "all workers of a model must agree; auto: same as --dtype",
    )
    pool.add_argument(
        "--max-num-seqs", type=_AT_LEAST_1, metavar="N", help="sequences that run at once; unset: 64, cuda: 256"
    )
    pool.add_argument(
        "--max-num-batched-tokens", type=_AT_LEAST_1, metavar="N", help="tokens per step; unset: 1024, cuda: 8192"
    )
    compute = parser.add_argument_group("compute")
    compute.add_argument("--backend", default="cpu", metavar="NAME", help="cpu, cuda, or reference (plain torch, slow)")
    compute.add_argument(
        "--attention",
        choices=ATTENTION,
        default="auto",
        help="cuda: our kernel (triton), flash-attn 2 (flash; needs --block-size 256) or 3 (flash3), FlashInfer, plain "
        "torch; auto: the fastest available",
    )
    compute.add_argument(
        "--gpu-memory-utilization",
        type=config.in_range(float, 0.01, 1),
        default=0.9,
        metavar="FRACTION",
        help="cuda: fraction of the device memory for weights, one step and the KV pool",
    )
    compute.add_argument(
        "--tensor-parallel-size",
        type=_AT_LEAST_1,
        default=1,
        metavar="N",
        help="cuda: number of devices that share one model",
    )
    compute.add_argument(
        "--all-reduce",
        choices=ALL_REDUCE,
        default="auto",
        help="cuda, several devices: auto adds up small messages in memory that the devices of a host share, if NVLink "
        "connects them; nccl: NCCL adds up all",
    )
    compute.add_argument(
        "--cuda-graphs",
        choices=CUDA_GRAPHS,
        default="start",
        help="cuda: record CUDA graphs at start-up, lazily when a size first occurs, or never (off)",
    )
    compute.add_argument(
        "--cuda-graph-tokens",
        type=_TOKENS_OR_0,
        default=8192,
        metavar="N",
        help="cuda: largest step with prompts that is recorded as a graph; 0: decode steps only",
    )
    compute.add_argument(
        "--threads",
        type=_AT_LEAST_1,
        metavar="N",
        help="compute threads; unset: one per core that this process may use",
    )
    _add_node_flags(parser)
    sim = parser.add_argument_group("simulation", "for load and failure tests: no weights are read, no model runs")
    sim.add_argument(
        "--executor",
        choices=("model", "sim"),
        default="model",
        help="sim: no model runs; tokens are a function of context and seed, and KV blocks are checked",
    )
    sim.add_argument(
        "--sim-step-ms", type=_AT_LEAST_0, default=5.0, metavar="MS", help="duration of every step with rows"
    )
    sim.add_argument(
        "--sim-prefill-tokens-per-s",
        type=config.in_range(float, 1.0, 1e12),
        default=50_000.0,
        metavar="N",
        help="prompt tokens per second; their time is added to a step",
    )
    sim.add_argument(
        "--sim-token-us", type=_AT_LEAST_0, default=0.0, metavar="US", help="time that each decoding row adds to a step"
    )
    sim.add_argument(
        "--sim-eos-probability",
        type=config.in_range(float, 0.0, 1.0),
        default=0.0,
        metavar="P",
        help="probability that a token ends its sequence",
    )
    net = parser.add_argument_group("network")
    net.add_argument(
        "--listen", type=config.address, default="127.0.0.1:0", metavar="HOST:PORT", help="port 0: any free port"
    )
    net.add_argument(
        "--scheduler",
        type=_ADDRESSES,
        action="append",
        metavar="HOST:PORT",
        help="scheduler to register with; several (repeat the flag or use commas) are replicas, and one leases this "
        "worker; dns:///NAME:PORT: all addresses of NAME, looked up again every few seconds; unset: wait until a "
        "scheduler leases this worker",
    )
    net.add_argument(
        "--advertise",
        type=config.address,
        metavar="HOST:PORT",
        help="address at which the scheduler reaches this worker; unset: the port of --listen at the address that this "
        "host uses to reach the scheduler",
    )
    net.add_argument("--worker-id", metavar="ID", help="name in logs and status; unset: host name and process id")
    add_flags(parser)
    add_trace_flags(parser)
    life = parser.add_argument_group("steps and shutdown")
    life.add_argument(
        "--stuck-after-s",
        type=config.in_range(float, 1.0, 86400.0),
        default=600.0,
        metavar="S",
        help="steps are in flight, but none has ended for this long: the engine hangs. Liveness fails, so that the "
        "kubelet restarts the worker; a busy worker ends steps",
    )
    life.add_argument(
        "--pipeline-depth",
        type=config.in_range(int, 1, 16),
        default=2,
        metavar="N",
        help="steps accepted before the first one is answered",
    )
    life.add_argument(
        "--drain-timeout-s",
        type=config.in_range(float, 0.0, 86400.0),
        default=60.0,
        metavar="S",
        help="time that open rows get to finish after SIGTERM",
    )
    return parser


def _add_node_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several hosts", "cuda: the ranks of one worker on several hosts, see docs/gpu.md"
    )
    group.add_argument("--nnodes", type=_AT_LEAST_1, default=1, metavar="N", help="hosts that share the model")
    group.add_argument(
        "--node-rank",
        type=config.in_range(int, 0, 2**31 - 1),
        default=0,
        metavar="N",
        help="number of this host; 0 is the leader: it serves, and has no --leader-address",
    )
    group.add_argument(
        "--node-listen", type=config.address, metavar="HOST:PORT", help="of the leader: where the other hosts connect"
    )
    group.add_argument(
        "--leader-address",
        type=config.address,
        metavar="HOST:PORT",
        help="of the other hosts: the leader's --node-listen",
    )
    group.add_argument(
        "--node-timeout-s",
        type=config.in_range(float, 1.0, 86400.0),
        default=600.0,
        metavar="S",
        help="a host that is missing for so long at the start ends this process, with exit code 2",
    )


def check_node_flags(args: argparse.Namespace) -> None:
    """Raises ValueError if the addresses do not fit the number of this host."""
    is_leader, is_other = args.nnodes > 1 and args.node_rank == 0, args.node_rank > 0
    for flag, value, is_needed, whom in (
        ("--node-listen", args.node_listen, is_leader, "--node-rank 0 with --nnodes of 2 or more"),
        ("--leader-address", args.leader_address, is_other, "--node-rank 1 or more"),
    ):
        if is_needed and value is None:
            raise ValueError(f"{flag} is required for {whom}")
        if value is not None and not is_needed:
            raise ValueError(
                f"{flag} {value} is only for {whom}; got --node-rank {args.node_rank}, --nnodes {args.nnodes}"
            )
    if args.nnodes > 1 and args.executor == "sim":
        raise ValueError(f"--nnodes {args.nnodes} needs --executor model: the simulation has one process")


def _add_adapter_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("LoRA adapters", "see docs/adapters.md")
    group.add_argument(
        "--adapter",
        type=_ADAPTER,
        action="append",
        metavar="NAME=DIR",
        help="a PEFT folder to load at the start, and its name in requests (repeat the flag for more)",
    )
    group.add_argument(
        "--adapter-dir",
        type=Path,
        metavar="DIR",
        help="folder below which LoadAdapter finds adapters; unset: adapters are loaded at the start only",
    )
    group.add_argument(
        "--max-adapters",
        type=_AT_LEAST_1,
        default=8,
        metavar="N",
        help="adapters that rows may use at the same time; more are swapped from host memory",
    )
    group.add_argument(
        "--max-adapter-rank", type=_AT_LEAST_1, default=64, metavar="N", help="largest rank of an adapter"
    )
    group.add_argument(
        "--max-loaded-adapters", type=_AT_LEAST_1, default=256, metavar="N", help="adapters in host memory"
    )


def scheduler_addresses(args: argparse.Namespace) -> list[str]:
    """All addresses of all --scheduler flags."""
    return [scheduler for part in args.scheduler or () for scheduler in part]


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Settings of the engine. Raises ValueError with the field's name."""
    sizes = CUDA_SIZES if args.backend == "cuda" else CPU_SIZES
    return EngineConfig(
        model_dir=args.model,
        model_name=args.model_name or args.model.resolve().name,
        adapters=tuple(args.adapter or ()),
        max_adapters=args.max_adapters if args.adapter or args.adapter_dir else 0,
        max_adapter_rank=args.max_adapter_rank,
        max_loaded_adapters=args.max_loaded_adapters,
        dtype=args.dtype,
        block_size=args.block_size or sizes.block_size,
        num_blocks=args.num_blocks,
        kv_cache_memory=args.kv_cache_memory,
        max_num_seqs=args.max_num_seqs or sizes.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens or sizes.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        determinism=args.determinism,
        threads=args.threads,
        backend=args.backend,
        attention=args.attention,
        gpu_memory_utilization=args.gpu_memory_utilization,
        tensor_parallel_size=args.tensor_parallel_size,
        all_reduce=args.all_reduce,
        nnodes=args.nnodes,
        node_rank=args.node_rank,
        cuda_graphs=args.cuda_graphs,
        kv_cache_dtype=args.kv_cache_dtype,
        cuda_graph_tokens=args.cuda_graph_tokens,
        quantize=args.quantize,
        image_cache_memory=args.image_cache_memory,
    )


def sim_config(args: argparse.Namespace) -> SimConfig:
    """Settings of the simulation."""
    return SimConfig(
        step_ms=args.sim_step_ms,
        prefill_tokens_per_s=args.sim_prefill_tokens_per_s,
        token_us=args.sim_token_us,
        eos_probability=args.sim_eos_probability,
    )
