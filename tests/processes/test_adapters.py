"""LoRA adapters through gateway, scheduler and workers: tokens equal those of weights that PEFT merged, also when
processes are killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
from quire_client import AsyncClient, GenerateResult
from quire_client.errors import InvalidRequest, ModelNotFound, NotConfigured, QuireError

from tests.processes.models import SHAPES, VOCAB_SIZE, Reference, make_checkpoint
from tests.processes.ports import free_port
from tests.processes.stack import Service, Stack, num_ready
from tests.unit.engine.adapters import ATTENTION, FEED_FORWARD, load_merged, make_adapter

RANKS = (1, 2, 4, 8, 12, 16, 24, 32)
BLOCK_SIZE = 16
MAX_RESIDENT = 3  # below the number of adapters: they are swapped
MAX_TOKENS = 24
WORKER_FLAGS = (
    *("--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--num-blocks", "64", "--max-num-seqs", "12"),
    *("--max-num-batched-tokens", "48", "--max-adapters", str(MAX_RESIDENT)),
)


@dataclass(frozen=True)
class Model:
    """A checkpoint, its adapters below one folder, and their references. The base model has the name ""."""

    folder: Path
    adapters: Path
    references: dict[str, Reference]

    @property
    def names(self) -> list[str]:
        return list(self.references)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    root = tmp_path_factory.mktemp("adapters")
    folder = make_checkpoint(root / "model", SHAPES[1])
    references = {"": Reference(folder)}
    for rank in RANKS:
        targets = ATTENTION if rank % 3 else [*ATTENTION, *FEED_FORWARD]
        path = make_adapter(folder, root / "all" / f"a{rank}", seed=rank, r=rank, strength=3.0, target_modules=targets)
        load_merged(folder, path).save_pretrained(root / "merged" / str(rank))
        references[f"a{rank}"] = Reference(root / "merged" / str(rank))
    return Model(folder, root / "all", references)


def prompts_of(model: Model, seed: int) -> list[tuple[str, list[int]]]:
    """Two prompts for each adapter and the base model. All of them start with the same 64 tokens."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(64)]
    lengths = [rng.choice((1, 17, 40, 110)) for _ in range(2 * len(model.names))]
    tails = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]
    return [(name, shared + tail) for name, tail in zip(model.names * 2, tails, strict=True)]


async def generate(client: AsyncClient, name: str, prompt: list[int], **options: object) -> GenerateResult:
    fields = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True} | options
    return await client.generate(token_ids=prompt, adapter=name, **fields)


async def streamed(client: AsyncClient, name: str, prompt: list[int], has_started: asyncio.Event) -> GenerateResult:
    """`generate`, as a stream. Sets `has_started` with the first token."""
    stream = client.stream(token_ids=prompt, adapter=name, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    async with stream:
        async for _ in stream:
            has_started.set()
        return await stream.result()


def check(model: Model, requests: list[tuple[str, list[int]]], results: list[GenerateResult]) -> None:
    for (name, prompt), result in zip(requests, results, strict=True):
        tokens = list(result.token_ids)
        assert len(tokens) == MAX_TOKENS
        assert tokens == model.references[name].greedy_after(prompt, tokens), f"adapter {name or 'none'}"


def worker_flags(model: Model, *names: str) -> tuple[str, ...]:
    given = [word for name in names for word in ("--adapter", f"{name}={model.adapters / name}")]
    return (*WORKER_FLAGS, "--adapter-dir", str(model.adapters), *given)


async def num_having(client: AsyncClient, name: str, expected: int) -> None:
    """Wait until this number of workers has an adapter."""
    deadline = asyncio.get_running_loop().time() + 30
    while not any(a.name == name and a.num_workers == expected for a in await client.adapters()):
        assert asyncio.get_running_loop().time() < deadline, await client.adapters()
        await asyncio.sleep(0.05)


async def test_adapters_equal_merged_weights_while_processes_are_killed(model: Model, tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler("--heartbeat-timeout-s", "2")
        workers = [stack.start_worker(scheduler, model.folder, *worker_flags(model, "a1", "a2")) for _ in range(2)]
        gateway = stack.start_gateway(scheduler)
        async with await stack.connect(gateway, workers=2) as client:
            for name in model.names[3:]:
                loaded = await client.load_adapter(name, name)
                assert (loaded.num_workers, len(loaded.digest)) == (2, 32)
            requests = prompts_of(model, seed=1)
            has_started = asyncio.Event()
            running = [asyncio.create_task(streamed(client, *request, has_started)) for request in requests]
            await asyncio.wait_for(has_started.wait(), 60)
            workers[0].kill()
            check(model, requests, await asyncio.gather(*running))
            await serve_on_a_new_worker(model, stack, scheduler, client)
            scheduler.kill()
            scheduler.start()
            await stack.until(client, lambda all_: num_ready(all_[0]) == 2)
            await num_having(client, "a32", 2)  # the set of adapters is that of the workers
            results = await asyncio.gather(*(generate(client, *request) for request in requests))
            check(model, requests, results)
            assert sum(result.usage.cached_tokens for result in results) > 0
            (status,) = (await client.status()).schedulers
            assert sum(worker.adapter_swaps for worker in status.workers) > MAX_RESIDENT


async def serve_on_a_new_worker(model: Model, stack: Stack, scheduler: Service, client: AsyncClient) -> None:
    """A worker that joins later gets the adapters that were loaded by RPC and by flags of others."""
    stack.start_worker(scheduler, model.folder, *worker_flags(model))
    await stack.until(client, lambda all_: num_ready(all_[0]) == 2)
    for name in model.names[1:]:
        await num_having(client, name, 2)
    requests = prompts_of(model, seed=2)
    check(model, requests, await asyncio.gather(*(generate(client, *request) for request in requests)))


@pytest.mark.deep
async def test_gpu_workers_serve_and_swap_adapters(model: Model, tmp_path: Path) -> None:
    """In Triton's interpreter, with more adapters than are resident."""
    names, num_tokens = ["", "a1", "a2", "a4", "a8"], 3
    requests = [(name, [3 + place, 9, 12 + place, 40, 5]) for place, name in enumerate(names * 2)]
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        flags = (*worker_flags(model, "a1", "a2"), "--backend", "cuda", "--max-model-len", "128")
        stack.start_worker(scheduler, model.folder, *flags).wait_ready(120)
        gateway = stack.start_gateway(scheduler)
        async with await stack.connect(gateway) as client:
            for name in names[3:]:
                await client.load_adapter(name, name)
            calls = (generate(client, *request, max_tokens=num_tokens) for request in requests)
            for (name, prompt), result in zip(requests, await asyncio.gather(*calls), strict=True):
                tokens = list(result.token_ids)
                assert len(tokens) == num_tokens
                assert tokens == model.references[name].greedy_after(prompt, tokens), f"adapter {name or 'none'}"
            (status,) = (await client.status()).schedulers
            assert status.workers[0].adapter_swaps > MAX_RESIDENT


async def test_prefixes_are_shared_within_an_adapter_only(model: Model, tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        stack.start_worker(scheduler, model.folder, *worker_flags(model, "a4", "a8"))
        gateway = stack.start_gateway(scheduler)
        async with await stack.connect(gateway) as client:
            prompt = [7 + i % 90 for i in range(70)]
            cached = []
            for name in ("", "a4", "a8", "a4", "a8", ""):
                result = await generate(client, name, prompt)
                check(model, [(name, prompt)], [result])
                cached.append(result.usage.cached_tokens)
            assert cached == [0, 0, 0, 64, 64, 64]


async def test_loading_unloading_and_refusals(model: Model, tmp_path: Path) -> None:
    adapters = tmp_path / "adapters"
    shutil.copytree(model.adapters / "a4", adapters / "good")
    shutil.copytree(model.adapters / "a8", adapters / "other")
    shutil.copytree(model.adapters / "a8", adapters / "wrong")
    config = json.loads((adapters / "wrong" / "adapter_config.json").read_text())
    (adapters / "wrong" / "adapter_config.json").write_text(json.dumps(config | {"r": 5}))
    http = free_port()
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        stack.start_worker(
            scheduler, model.folder, *WORKER_FLAGS, "--adapter-dir", str(adapters), "--model-name", "base"
        )
        gateway = stack.start_gateway(scheduler, flags=("--http-listen", f"127.0.0.1:{http}"))
        async with await stack.connect(gateway) as client:
            await client.load_adapter("one", "good")
            await client.load_adapter("one", str(adapters / "good"))  # the same content
            await check_refusals(client)
            result = await generate(client, "one", [5, 6, 7])
            assert result.model == "one"
            by_model = await client.generate(
                token_ids=[5, 6, 7], model="one", temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True
            )
            assert by_model.token_ids == result.token_ids != (await generate(client, "", [5, 6, 7])).token_ids
            await asyncio.to_thread(check_http, http)
            await check_unloading(client)


async def check_refusals(client: AsyncClient) -> None:
    refusals = {
        ("two", "wrong"): r"lora_A.weight has shape \[8, \d+\], but rank 5 and this model require \[5, \d+\]",
        ("two", "missing"): r"missing has no adapter_config.json; give a folder",
        ("two", "../model"): r"path '../model' is not below .*--adapter-dir; copy it there",
        ("two", "/etc"): r"path '/etc' is not below",
        ("one", "other"): r"adapter 'one' is loaded with other content .*; unload it first, or use another name",
        ("base", "good"): r"name is 'base', which is the name of a model",
        ("", "good"): r"name is ''; use 1 to 128 printable characters",
    }
    for (name, path), message in refusals.items():
        with pytest.raises(InvalidRequest, match=message):
            await client.load_adapter(name, path)
    with pytest.raises(ModelNotFound, match=r"model 'base' has no adapter 'nope'; its adapters: 'one'"):
        await generate(client, "nope", [1])
    with pytest.raises(ModelNotFound, match=r"model 'nope' is not served here; served models: 'base'; adapters: 'one'"):
        await client.generate(token_ids=[1], model="nope", max_tokens=1)
    for call in (client.load_adapter("two", "good", model="nope"), client.unload_adapter("one", model="nope")):
        with pytest.raises(ModelNotFound, match=r"model 'nope' is not served here"):
            await call
    with pytest.raises(ModelNotFound, match=r"model 'nope' is not served here"):
        await client.adapters(model="nope")
    assert [adapter.name for adapter in await client.adapters(model="base")] == ["one"]


def check_http(port: int) -> None:
    def ask(path: str, body: dict[str, object] | None = None) -> dict[str, object]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)) as reply:
            return json.load(reply)  # type: ignore[no-any-return]

    listed = ask("/v1/models")["data"]
    assert [(entry["id"], entry.get("parent")) for entry in listed] == [("base", None), ("one", "base")]  # type: ignore
    assert ask("/v1/models/one")["parent"] == "base"
    assert ask("/v1/completions", {"model": "one", "prompt": [5, 6, 7], "max_tokens": 2})["model"] == "one"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        ask("/v1/completions", {"model": "nope", "prompt": [5], "max_tokens": 1})


async def check_unloading(client: AsyncClient) -> None:
    stream = client.stream(
        token_ids=[5, 6, 7], adapter="one", temperature=0.0, max_tokens=900, ignore_eos=True, resume=False
    )
    async with stream:
        await anext(aiter(stream))
        with pytest.raises(QuireError, match=r"adapter 'one' is in use by 1 requests; end them or wait"):
            await client.unload_adapter("one")
    deadline = asyncio.get_running_loop().time() + 20
    while await client.adapters() and asyncio.get_running_loop().time() < deadline:
        with contextlib.suppress(NotConfigured):  # the aborted request is still open
            await client.unload_adapter("one")
    assert await client.adapters() == ()
    with pytest.raises(ModelNotFound, match=r"no adapter 'one' is loaded; loaded adapters: none"):
        await client.unload_adapter("one")
    with pytest.raises(ModelNotFound, match=r"model 'base' has no adapter 'one'; its adapters: none"):
        await generate(client, "one", [1])
    # Other content under the old name: a continuation of the old content is refused.
    old = await client.load_adapter("one", "other")
    assert old.name == "one"
