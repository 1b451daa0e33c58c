"""vLLM's CPU backend, driven in its own process: output tokens per second of one workload. Runs in the peers' venv.

    $PEERS_VENV/bin/python bench/peers/vllm_offline.py MODEL_DIR REQUESTS.jsonl --threads 2 [--eager] [--repeats 3]

REQUESTS.jsonl has {"token_ids": [...], "max_tokens": N} per line. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("requests", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="no torch.compile")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # runs the engine in this process
    from vllm import LLM, SamplingParams, __version__

    requests = [json.loads(line) for line in args.requests.read_text().splitlines()]
    llm = LLM(
        args.model,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=64,
        enforce_eager=args.eager,
        disable_log_stats=True,
    )

    def run(salt: str) -> tuple[float, int]:
        prompts = [{"prompt_token_ids": r["token_ids"], "cache_salt": salt} for r in requests]
        params = [
            SamplingParams(temperature=0.0, max_tokens=r["max_tokens"], ignore_eos=True, detokenize=False)
            for r in requests
        ]
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started, sum(len(output.outputs[0].token_ids) for output in outputs)

    salts = [str(random.random()) for _ in range(args.repeats + 1)]
    run(salts[0])
    seconds, num_tokens = min(run(salt) for salt in salts[1:])
    print(
        json.dumps({"tok_s": round(num_tokens / seconds, 1), "version": __version__, "eager": args.eager}), flush=True
    )


if __name__ == "__main__":
    main()
