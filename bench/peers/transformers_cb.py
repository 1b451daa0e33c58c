"""transformers' continuous batching: output tokens per second of one workload. Runs in the peers' venv.

    $PEERS_VENV/bin/python bench/peers/transformers_cb.py MODEL_DIR REQUESTS.jsonl --threads 2

Each request has its own length: `generate_batch` takes one length for all, so the manager behind it is used. The last
line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("requests", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    import torch
    import transformers
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    torch.set_num_threads(args.threads)
    requests = [json.loads(line) for line in args.requests.read_text().splitlines()]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    manager = model.init_continuous_batching(
        generation_config=transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(page_size=32, num_blocks=2304, max_batch_tokens=1024),
    )
    manager.start()
    try:
        run(manager, requests[:2])
        started = time.perf_counter()
        num_tokens = run(manager, requests)
        seconds = time.perf_counter() - started
    finally:
        manager.stop(block=True)
    print(json.dumps({"tok_s": round(num_tokens / seconds, 1), "version": transformers.__version__}), flush=True)


def run(manager, requests) -> int:
    for request in requests:
        manager.add_request(request["token_ids"], max_new_tokens=request["max_tokens"])
    finished = num_tokens = 0
    while finished < len(requests):
        result = manager.get_result(timeout=60)
        if result is None:
            raise RuntimeError("no result for 60 s")
        if result.is_finished():
            finished += 1
            num_tokens += len(result.generated_tokens)
    return num_tokens


if __name__ == "__main__":
    main()
