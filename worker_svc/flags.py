"""Flags of quire-worker, and their conversion to settings."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from svc_common import config
from svc_common.config import Flag, FlagGroup, address, in_range, one_of, path, size_bytes, switch, text
from svc_common.observe.tracing import TRACE_FLAGS
from svc_common.security.trust import TRUST_FLAGS
from worker_svc.engine.config import (
    ALL_REDUCE,
    ATTENTION,
    CPU_SIZES,
    CUDA_GRAPHS,
    CUDA_SIZES,
    DTYPES,
    KERNELS,
    KV_CACHE_DTYPES,
    MAX_DRAFTS,
    QUANTIZING_BACKENDS,
    SPECULATE,
    EngineConfig,
    Speculate,
)
from worker_svc.engine.kernels.machine import total_memory
from worker_svc.kv_store.nixl_memory import has_nixl
from worker_svc.simulator.model import SimConfig

GIB = 1 << 30
DESCRIPTION = "Loads one Hugging Face checkpoint, holds its KV blocks and runs its steps for a scheduler."
EPILOG = """examples:
  quire-worker --model ./Qwen3-0.6B --scheduler 127.0.0.1:50052 --dtype bfloat16 --kv-cache-memory 2G
  quire-worker --model ./Qwen3-0.6B --scheduler sched-0:50052,sched-1:50052
  quire-worker --model ./Qwen3-0.6B --scheduler dns:///schedulers.example.com:50052
  quire-worker --model ./Qwen3-0.6B --scheduler 127.0.0.1:50052 --executor sim --sim-step-ms 20
"""


def _addresses(text: str) -> list[str]:
    return [config.scheduler_address(part.strip()) for part in text.split(",")]


def _speculate(text: str) -> str:
    Speculate.parse(text)
    return text


def _adapter(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise ValueError("must be NAME=DIR")
    return name, Path(folder)


_PROPOSER = config.FlagKind(_speculate, SPECULATE)
_ADAPTER = config.FlagKind(_adapter, "NAME=DIR")
_ADDRESSES = config.FlagKind(_addresses, config.scheduler_address.allowed)


def _unset(size: str) -> str:
    return f"unset: {getattr(CPU_SIZES, size)}, cuda: {getattr(CUDA_SIZES, size)}"


_AT_LEAST_0 = config.in_range(float, 0.0, 1e9)
_AT_LEAST_1 = config.in_range(int, 1, 2**31 - 1)
_TOKENS_OR_0 = config.in_range(int, 0, 2**31 - 1)

FLAGS = (
    FlagGroup("model", (
        Flag("--model", path,
            "folder with config.json, *.safetensors; or a model of the Hugging Face Hub, which is downloaded unless "
            "the local cache (HF_HUB_CACHE) has it", metavar="DIR|ORG/NAME[@REVISION]", is_required=True,
        ),
        Flag("--model-name", text,
            "name that clients use in requests; unset: the folder's name, or ORG/NAME of the Hub", metavar="NAME",
        ),
        Flag("--dtype", one_of(*DTYPES),
            "type of weights and KV; auto: the checkpoint's, but on CPUs bfloat16 for float16; float16: cuda only",
            default="auto",
        ),
        Flag("--quantize", one_of(*QUANTIZING_BACKENDS),
            "round weights and the inputs of linear layers to 8 bits: int8, or fp8 on GPUs (cuda); faster, "
            "less accurate; all workers of a model must agree; unset: no rounding",
        ),
        Flag("--determinism", one_of("exact", "best_effort"),
            "exact: the tokens of a request never depend on other requests", default="exact",
        ),
        Flag("--max-model-len", _AT_LEAST_1, "longest prompt + output; unset: the limit of model and pool"),
    )),
    FlagGroup("LoRA adapters", (
        Flag("--adapter", _ADAPTER,
            "a PEFT folder to load at the start, and its name in requests (repeat the flag for more)",
            metavar="NAME=DIR", is_list=True,
        ),
        Flag("--adapter-dir", path,
            "folder below which LoadAdapter finds adapters; unset: adapters are loaded at the start only",
            metavar="DIR",
        ),
        Flag("--max-adapters", _AT_LEAST_1,
            "adapters that rows may use at the same time; more are swapped from host memory", default=8,
        ),
        Flag("--max-adapter-rank", _AT_LEAST_1, "largest rank of an adapter", default=64),
        Flag("--max-loaded-adapters", _AT_LEAST_1, "adapters in host memory", default=256),
    ), "see docs/adapters.md"),
    FlagGroup("updates of the weights", (
        Flag("--weights-dir", path,
            "folder of the files of updates, the same for all workers of a model; unset: weights cannot be updated",
            metavar="DIR",
        ),
    ), "see docs/rollouts.md"),
    FlagGroup("KV pool and batches", (
        Flag("--block-size", _AT_LEAST_1, f"tokens per block, a power of two; {_unset('block_size')}"),
        Flag("--num-blocks", _AT_LEAST_1, "blocks; overrides --kv-cache-memory"),
        Flag("--kv-cache-memory", size_bytes,
            "memory for blocks (2G, 512M); unset: 1G, or half of the free memory if that is less",
        ),
        Flag("--image-cache-memory", size_bytes,
            "memory for embeddings of images, so that an image of a later turn is not computed again; the default "
            "size of the pool leaves it free. Only for models that take images", default="256M",
        ),
        Flag("--snapshot-memory", size_bytes,
            "memory for snapshots of states: a prefix is reused only from a snapshot. The default size of the pool "
            "leaves it free. Only for models with recurrent layers", default="256M",
        ),
        Flag("--kv-cache-dtype", one_of(*KV_CACHE_DTYPES),
            "cuda: fp8 stores keys and values in 8 bits: twice as many fit, and reading them takes half as long; "
            "all workers of a model must agree; auto: same as --dtype", default="auto",
        ),
        Flag("--max-num-seqs", _AT_LEAST_1, f"sequences that run at once; {_unset('max_num_seqs')}"),
        Flag("--max-num-batched-tokens", _AT_LEAST_1, f"tokens per step; {_unset('max_num_batched_tokens')}"),
    )),
    FlagGroup("KV blocks outside the pool", (
        Flag("--kv-host-memory", size_bytes,
            "memory for copies of cached blocks: a prefix that the pool has evicted is read instead of computed. With "
            "--kv-disk, what it evicts goes there; unset: no tier in memory",
        ),
        Flag("--kv-disk", path,
            "folder for copies of cached blocks: a prefix that the pool has evicted, or that a restart has emptied, is "
            "read instead of computed. One worker per folder; unset: no disk tier", metavar="DIR",
        ),
        Flag("--kv-disk-size", size_bytes, "size of the files in --kv-disk", default="20G"),
        Flag("--kv-transfer", switch,
            "exchange cached blocks with the other workers of the scheduler: a sequence that moves takes its blocks "
            "along; workers call each other at the addresses that they registered",
        ),
        Flag("--kv-nixl", switch,
            "exchange blocks between hosts over NIXL (RDMA where the network has it) instead of gRPC. Needs "
            "--kv-transfer and the package nixl; its connections are neither authenticated nor encrypted",
        ),
        Flag("--role", one_of("both", "prefill", "decode"),
            "which work placement prefers for this worker: prompts, whose streams then leave for a decode worker with "
            "their blocks (prefill), streams (decode), or both. Needs --kv-transfer", default="both",
        ),
    ), "all backends; see docs/kv-moves.md"),
    FlagGroup("compute", (
        Flag("--backend", text, "cpu, cuda, or reference (plain torch, slow)", default="cpu", metavar="NAME"),
        Flag("--attention", one_of(*ATTENTION),
            "cuda: our kernel (triton), flash-attn 2 (flash; needs --block-size 256) or 3 (flash3), "
            "plain torch; auto: the fastest available", default="auto",
        ),
        Flag("--gpu-memory-utilization", in_range(float, 0.01, 1),
            "cuda: fraction of the device memory for weights, one step and the KV pool", default=0.9,
            metavar="FRACTION",
        ),
        Flag("--tensor-parallel-size", _AT_LEAST_1, "cuda: number of devices that share one model", default=1),
        Flag("--all-reduce", one_of(*ALL_REDUCE),
            "cuda, several devices: auto adds up small messages in memory that the devices of a host share, if "
            "NVLink connects them; nccl: NCCL adds up all", default="auto",
        ),
        Flag("--kernels", one_of(*KERNELS),
            "cuda: auto replaces kernels of Triton that fail at the start by plain torch; triton: such a start fails; "
            "torch: plain torch for all, slow, on any device", default="auto",
        ),
        Flag("--cuda-graphs", one_of(*CUDA_GRAPHS),
            "cuda: record CUDA graphs at start-up, lazily when a size first occurs, or never (off)", default="start",
        ),
        Flag("--cuda-graph-tokens", _TOKENS_OR_0,
            "cuda: largest step with prompts that is recorded as a graph; 0: decode steps only", default=8192,
        ),
        Flag("--speculate", _PROPOSER,
            "compute drafts of the next tokens with each token, which are kept if they are right: the output is the "
            "same. suffix: from earlier text of the request; mtp: from the layer of the checkpoint that predicts "
            "further tokens; draft:DIR: a smaller model; eagle:DIR: an EAGLE-3 head; unset: none. "
            "cuda: suffix only (docs/speculation.md)", metavar="PROPOSER",
        ),
        Flag("--max-drafts", in_range(int, 1, MAX_DRAFTS), "drafts of a sequence in one step, at most", default=8),
        Flag("--threads", _AT_LEAST_1, "compute threads; unset: one per core that this process may use"),
    )),
    FlagGroup("several hosts", (
        Flag("--nnodes", _AT_LEAST_1, "hosts that share the model", default=1),
        Flag("--node-rank", in_range(int, 0, 2**31 - 1),
            "number of this host; 0 is the leader: it serves, and has no --leader-address", default=0,
        ),
        Flag("--node-listen", address, "of the leader: where the other hosts connect"),
        Flag("--leader-address", address, "of the other hosts: the leader's --node-listen"),
        Flag("--node-timeout-s", in_range(float, 1.0, 86400.0),
            "a host that is missing for so long at the start ends this process, with exit code 2", default=600.0,
        ),
    ), "cuda: the ranks of one worker on several hosts, see docs/gpu.md"),
    FlagGroup("simulation", (
        Flag("--executor", one_of("model", "sim"),
            "sim: no model runs; tokens are a function of context and seed, and KV blocks are checked", default="model",
        ),
        Flag("--sim-step-ms", _AT_LEAST_0, "duration of every step with rows", default=5.0),
        Flag("--sim-prefill-tokens-per-s", in_range(float, 1.0, 1e12),
            "prompt tokens per second; their time is added to a step", default=50_000.0, metavar="N",
        ),
        Flag("--sim-token-us", _AT_LEAST_0, "time that each decoding row adds to a step", default=0.0, metavar="US"),
        Flag("--sim-eos-probability", in_range(float, 0.0, 1.0),
            "probability that a token ends its sequence", default=0.0, metavar="P",
        ),
    ), "for load and failure tests: no weights are read, no model runs"),
    FlagGroup("network", (
        Flag("--listen", address, "port 0: any free port", default="127.0.0.1:0"),
        Flag("--scheduler", _ADDRESSES,
            "scheduler to register with; several (repeat the flag or use commas) are replicas, and one leases this "
            "worker; dns:///NAME:PORT: all addresses of NAME, looked up again every few seconds; unset: wait until "
            "a scheduler leases this worker", metavar="HOST:PORT", is_list=True,
        ),
        Flag("--advertise", address,
            "address at which the scheduler reaches this worker; unset: the port of --listen at the address that "
            "this host uses to reach the scheduler",
        ),
        Flag("--replace-revision", switch,
            "register although another scheduler serves another revision of this model; gateways use the new revision "
            "when the old one has no worker",
        ),
        Flag("--worker-id", text, "name in logs and status; unset: host name and process id", metavar="ID"),
    )),
    TRUST_FLAGS,
    TRACE_FLAGS,
    FlagGroup("steps and shutdown", (
        Flag("--stuck-after-s", in_range(float, 1.0, 86400.0),
            "steps are in flight, but none has ended for this long: the engine hangs. Liveness fails, so that the "
            "kubelet restarts the worker; a busy worker ends steps", default=600.0,
        ),
        Flag("--pipeline-depth", in_range(int, 1, 16), "steps accepted before the first one is answered", default=2),
        Flag("--drain-timeout-s", in_range(float, 0.0, 86400.0),
            "time that open rows get to finish after SIGTERM", default=60.0,
        ),
    )),
)  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """All flags of a worker."""
    return config.make_parser("worker", DESCRIPTION, EPILOG, FLAGS)


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


def check_transfer(args: argparse.Namespace) -> None:
    """Raises ValueError if blocks cannot move, or streams could not leave or reach a worker of this role."""
    if args.role != "both" and not args.kv_transfer:
        raise ValueError(f"--role {args.role} needs --kv-transfer: streams take their blocks along")
    if args.tensor_parallel_size > 1 and (args.kv_host_memory or args.kv_disk or args.kv_transfer):
        raise ValueError(
            f"--tensor-parallel-size {args.tensor_parallel_size} cannot be set together with --kv-host-memory, "
            "--kv-disk or --kv-transfer: each device has a part of every block"
        )
    if args.kv_nixl and not args.kv_transfer:
        raise ValueError("--kv-nixl needs --kv-transfer: it is a way to exchange blocks")
    if args.kv_nixl and not has_nixl():
        raise ValueError("--kv-nixl needs the package nixl: pip install 'quire[nixl]'")


def check_memory(args: argparse.Namespace) -> None:
    """Raises ValueError for a pool that a CPU worker cannot have, before torch and the weights are loaded."""
    size, memory = args.kv_cache_memory, total_memory()
    if size is None or args.num_blocks is not None or args.backend == "cuda" or args.executor == "sim":
        return
    if size > memory:
        raise ValueError(
            f"--kv-cache-memory is {size / GIB:.1f} GiB, but this machine or its control group has {memory / GIB:.1f} "
            "GiB; use a smaller pool"
        )


def scheduler_addresses(args: argparse.Namespace) -> list[str]:
    """All addresses of all --scheduler flags."""
    return [scheduler for part in args.scheduler or () for scheduler in part]


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Settings of the engine. Raises ValueError with the field's name."""
    sizes = (CUDA_SIZES if args.backend == "cuda" else CPU_SIZES)._asdict()
    own = {
        "model_dir": args.model,
        "model_name": args.model_name or args.model.resolve().name,
        "adapters": tuple(args.adapter or ()),
        "max_adapters": args.max_adapters if args.adapter or args.adapter_dir else 0,
        "has_groups": args.speculate in (None, "suffix"),  # proposers that compute read the table of the first group
    } | {name: getattr(args, name) or size for name, size in sizes.items()}
    names = {field.name for field in fields(EngineConfig)} - own.keys()  # these flags have the names of settings
    return EngineConfig(**own, **{name: getattr(args, name) for name in names})


def sim_config(args: argparse.Namespace) -> SimConfig:
    """Settings of the simulation."""
    return SimConfig(**{field.name: getattr(args, f"sim_{field.name}") for field in fields(SimConfig)})
