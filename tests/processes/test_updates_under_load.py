"""Updates of the weights under load, while workers and the scheduler are killed in every phase: no stream fails, and
the tokens of each span are those of its weights. The workers are simulated."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np
from quire_client import Sample
from quire_client.demo import demo_model_dir
from safetensors.numpy import save_file

from tests.processes.redis_server import RedisServer
from tests.processes.stack import Stack
from tests.processes.update_load import Load, update_with_kill
from tests.simulated_tokens import MASK, context_digest, extend_digest, sim_token
from worker_svc.simulator.tokens import SimVocabulary, read_vocabulary

NUM_UPDATES = 6


def check_spans(prompt: list[int], seed: int, sample: Sample, vocabulary: SimVocabulary) -> None:
    """Contexts of a simulated worker begin with the digest of its weights."""
    ids, starts = sample.token_ids, {0: 0}
    spans = [(span.weights.version, span.start, span.end) for span in sample.weight_versions] or [(0, 0, len(ids))]
    starts |= {
        span.weights.version: int(span.weights.weights_digest[:16] or "0", 16) for span in sample.weight_versions
    }
    assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans[:-1])]
    assert spans[-1][2] == len(ids)
    digest = context_digest(prompt)
    for version, first, last in spans:
        for place in range(first, last):
            found = sim_token((digest + starts[version]) & MASK, seed, 0, place, vocabulary)
            assert ids[place] == found, (place, spans)
            digest = extend_digest(digest, len(prompt) + place, ids[place])


async def test_no_stream_fails_and_spans_are_right(tmp_path: Path) -> None:
    rng, files = random.Random(7), tmp_path / "weights"
    files.mkdir()
    for version in range(1, NUM_UPDATES + 1):
        save_file({"w": np.full(4, version, np.float32)}, files / f"{version}.safetensors")
    with RedisServer(tmp_path) as redis, Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler("--redis", redis.url)
        flags = ("--executor", "sim", "--sim-step-ms", "4", "--weights-dir", str(files))
        workers = [stack.start_worker(scheduler, demo_model_dir(), *flags) for _ in range(2)]
        gateway = stack.start_gateway(scheduler)
        async with await stack.connect(gateway, workers=2) as client:
            load = Load(client, rng)
            running = asyncio.create_task(load.run(8))
            for version in range(1, NUM_UPDATES + 1):
                phase = ("begin", "put", "commit", "commit")[version % 4]
                victim = scheduler if version % 4 == 3 else rng.choice(workers)
                await update_with_kill(client, f"{version}.safetensors", version, victim, phase, rng)
                await asyncio.sleep(0.1)
                assert not running.done(), running.exception()
            load.stop()
            await running
            assert (await client.weights()).weights.version == NUM_UPDATES
    assert any(len(sample.weight_versions) > 1 for _, _, sample in load.samples)
    vocabulary = read_vocabulary(demo_model_dir())
    for prompt, seed, sample in load.samples:
        check_spans(prompt, seed, sample, vocabulary)
