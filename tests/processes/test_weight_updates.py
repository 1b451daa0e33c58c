"""The weights of running workers change, in two phases: spans say which tokens which weights have computed, and the
tokens of each span are those of a system that starts with these weights."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from quire_client import AsyncClient, GenerateResult, Sample
from quire_client.errors import AlreadyExists, InvalidRequest
from safetensors.torch import load_file, save_file

from request_fields.receipts import parse_receipt
from tests.processes.models import SHAPES, make_checkpoint
from tests.processes.ports import free_port
from tests.processes.redis_server import RedisServer
from tests.processes.stack import Service, Stack, num_ready
from tests.processes.test_receipts import openssl_key
from tests.processes.update_load import Load, update_with_kill
from worker_svc.receipts.verify import CONFIRMED, UNDECIDED, Verifier

FLAGS = ("--dtype", "float32", "--block-size", "8", "--num-blocks", "128", "--max-num-seqs", "8")
PROMPT = list(range(5, 30))
LONG = 300  # tokens of a request that still runs when something happens
OPTIONS: dict[str, Any] = {"temperature": 1.0, "seed": 3, "ignore_eos": True}


@dataclass(frozen=True)
class Checkpoints:
    """A checkpoint, and files with other weights, one per version."""

    folder: Path
    files: Path

    def file(self, version: int) -> str:
        """The tensors of a version: all of them in an odd one, some in an even one."""
        path = self.files / f"{version}.safetensors"
        if not path.exists():
            tensors = load_file(self.folder / "model.safetensors")
            names = sorted(tensors) if version % 2 else sorted(tensors)[version % 3 :: 3]
            torch.manual_seed(version)
            save_file({name: tensors[name] + 0.02 * torch.randn_like(tensors[name]) for name in names}, path)
        return path.name

    def whole(self, version: int) -> Path:
        """A checkpoint with the weights of a version."""
        folder = self.folder.with_name(f"whole-{version}")
        if not folder.exists():
            shutil.copytree(self.folder, folder)
            tensors = load_file(self.folder / "model.safetensors")
            for earlier in range(1, version + 1):
                tensors |= load_file(self.files / self.file(earlier))
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    root = tmp_path_factory.mktemp("weights")
    (root / "files").mkdir()
    return Checkpoints(make_checkpoint(root / "model", SHAPES[1]), root / "files")


@dataclass(frozen=True)
class Deployment:
    """Two workers behind one gateway. Its version grows from test to test."""

    stack: Stack
    scheduler: Service
    workers: list[Service]
    gateway: Service
    http: str
    checkpoints: Checkpoints

    def post(self, path: str, body: Any = None, **query: str) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        url = f"{self.http}{path}?{urllib.parse.urlencode(query)}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data=data or b"", headers={"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.http}{path}", timeout=60) as response:
            return json.load(response)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("deployment")
    key = openssl_key(folder / "key.pem")
    with Stack(folder) as stack:
        scheduler = stack.start_scheduler()
        flags = (*FLAGS, "--weights-dir", str(checkpoints.files))
        workers = [stack.start_worker(scheduler, checkpoints.folder, *flags) for _ in range(2)]
        port = free_port()
        flags = ("--receipt-key-file", str(key), "--http-listen", f"127.0.0.1:{port}", "--keyless-operators")
        gateway = stack.start_gateway(scheduler, flags=flags)
        for service in stack.services:
            service.wait_ready()
        yield Deployment(stack, scheduler, workers, gateway, f"http://127.0.0.1:{port}", checkpoints)


@pytest.fixture
async def client(deployment: Deployment) -> AsyncIterator[AsyncClient]:
    async with await deployment.stack.connect(deployment.gateway, workers=2) as client:
        yield client


def start(client: AsyncClient, count: int = 4, num_tokens: int = LONG) -> list[asyncio.Task[GenerateResult]]:
    """Requests that run until something happens to them."""
    return [
        asyncio.create_task(
            client.generate(token_ids=PROMPT, max_tokens=num_tokens, **{**OPTIONS, "seed": seed}, receipt=True)
        )
        for seed in range(count)
    ]


async def begun(deployment: Deployment, client: AsyncClient) -> None:
    """Wait until the requests have some output."""
    have = (await client.status()).schedulers[0].output_tokens
    await deployment.stack.until(client, lambda schedulers: schedulers[0].output_tokens > have + 100)


def versions_of(sample: Sample) -> list[int]:
    return [span.weights.version for span in sample.weight_versions]


def check_receipt(checkpoints: Checkpoints, sample: Sample) -> None:
    """The tokens of each span, and the logits they come from, are those of a model with its weights."""
    ids = sample.token_ids
    spans = [(span.weights.version, span.start, span.end) for span in sample.weight_versions] or [(0, 0, len(ids))]
    assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans[:-1])]
    assert spans[-1][2] == len(ids)
    for version, first, last in spans:
        verdict = Verifier(checkpoints.whole(version)).verify(parse_receipt(sample.receipt))
        assert verdict.code == (CONFIRMED if len(spans) == 1 else UNDECIDED), (version, verdict)
        assert f"{first} to {last - 1} were computed again and are the same" in verdict.reason


async def test_running_rows_are_recomputed(deployment: Deployment, client: AsyncClient) -> None:
    version = (await client.weights()).weights.version
    running = start(client)
    await begun(deployment, client)
    updated = await client.update_weights([deployment.checkpoints.file(version + 1)])
    assert updated.version == version + 1
    samples = [result.samples[0] for result in await asyncio.gather(*running)]
    assert [version, version + 1] in map(versions_of, samples) or version == 0
    for sample in samples[:2]:
        check_receipt(deployment.checkpoints, sample)
    fresh = await client.generate(token_ids=PROMPT, max_tokens=20, **OPTIONS, receipt=True)
    assert versions_of(fresh.samples[0]) == [version + 1]
    check_receipt(deployment.checkpoints, fresh.samples[0])


@pytest.mark.deep
async def test_running_rows_keep_or_retire(deployment: Deployment, client: AsyncClient) -> None:
    version = (await client.weights()).weights.version
    running = start(client)
    await begun(deployment, client)
    await client.update_weights([deployment.checkpoints.file(version + 1)], running_rows="keep")
    kept = [span for result in await asyncio.gather(*running) for span in result.samples[0].weight_versions]
    assert any(span.keeps_kv and span.start for span in kept)
    fresh = await client.generate(token_ids=PROMPT, max_tokens=20, **OPTIONS, receipt=True)
    check_receipt(deployment.checkpoints, fresh.samples[0])  # no block of a row that was kept is used
    running = start(client)
    await begun(deployment, client)
    update = asyncio.create_task(
        client.update_weights([deployment.checkpoints.file(version + 2)], running_rows="retire")
    )
    results = await asyncio.gather(*running)
    assert (await update).version == version + 2
    assert [versions_of(result.samples[0]) for result in results] == [[version + 1]] * 4
    check_receipt(deployment.checkpoints, results[0].samples[0])


async def test_a_stream_of_tensors_and_a_worker_that_joins_later(deployment: Deployment, client: AsyncClient) -> None:
    version = (await client.weights()).weights.version
    name = deployment.checkpoints.file(version + 1)
    content = (deployment.checkpoints.files / name).read_bytes()
    assert await client.begin_update("streamed") == version + 1
    tensors = await client.put_tensors("streamed", data=content)
    assert tensors == await client.put_tensors("streamed", name), "the same tensors, as a file"
    lines = (f"{t.name}|{t.dtype}|{'x'.join(map(str, t.shape))}|{t.checksum}\n" for t in tensors)
    digest = xxhash.xxh3_128_hexdigest("".join(lines).encode())
    await client.commit_update("streamed", digest=digest)
    deployment.workers[0].kill()
    fresh = await client.generate(token_ids=PROMPT, max_tokens=20, **OPTIONS, receipt=True)
    check_receipt(deployment.checkpoints, fresh.samples[0])
    deployment.workers[0].start()
    await deployment.stack.until(client, lambda schedulers: num_ready(schedulers[0]) == 2)
    deployment.scheduler.kill()
    deployment.scheduler.start()
    await deployment.stack.until(client, lambda schedulers: num_ready(schedulers[0]) == 2)
    state = await client.weights()
    assert (state.weights.version, state.num_workers) == (version + 1, 2)
    results = await asyncio.gather(*start(client, num_tokens=10))
    assert {tuple(versions_of(result.samples[0])) for result in results} == {(version + 1,)}


async def test_bad_updates_change_nothing(deployment: Deployment, client: AsyncClient) -> None:
    before, files = await client.weights(), deployment.checkpoints.files
    tensors = load_file(deployment.checkpoints.folder / "model.safetensors")
    name = sorted(tensors)[0]
    bad = {
        "shape": {name: tensors[name][:-1].clone()},
        "name": {"no.such.weight": tensors[name]},
        "dtype": {name: tensors[name].to(torch.int32)},
    }
    for kind, content in bad.items():
        save_file(content, files / f"bad-{kind}.safetensors")
    (files / "bad-text.safetensors").write_text("no tensors")
    with pytest.raises(InvalidRequest, match="no update"):
        await client.put_tensors("u", "1.safetensors")
    with pytest.raises(InvalidRequest, match="no update"):
        await client.commit_update("u")
    for update_id, version, field in (("bad id", 0, "update_id"), ("u", 1 << 60, "version")):
        with pytest.raises(InvalidRequest) as refused:
            await client.begin_update(update_id, version=version)
        assert refused.value.field_violations[0].field == field
    await client.begin_update("u")
    with pytest.raises(AlreadyExists, match="is open"):
        await client.begin_update("other")
    for path, field, words in (
        ("bad-shape.safetensors", "tensors", name),
        ("bad-name.safetensors", "tensors", "no.such.weight"),
        ("bad-dtype.safetensors", "tensors", name),
        ("bad-text.safetensors", "tensors", "damaged"),
        ("missing.safetensors", "tensors", "missing"),
        ("../model/model.safetensors", "path", "not below"),
    ):
        with pytest.raises(InvalidRequest, match=words) as refused:
            await client.put_tensors("u", path)
        assert refused.value.field_violations[0].field == field
    with pytest.raises(InvalidRequest, match="damaged"):
        await client.put_tensors("u", data=b"no tensors")
    with pytest.raises(InvalidRequest, match="no tensors"):
        await client.commit_update("u")
    await client.put_tensors("u", deployment.checkpoints.file(1))
    with pytest.raises(InvalidRequest) as refused:
        await client.commit_update("u", digest="0" * 32)
    assert refused.value.field_violations[0].field == "digest"
    await client.abort_update("u")
    assert await client.weights() == before
    fresh = await client.generate(token_ids=PROMPT, max_tokens=20, **OPTIONS, receipt=True)
    check_receipt(deployment.checkpoints, fresh.samples[0])


async def test_pauses(deployment: Deployment, client: AsyncClient) -> None:
    calm = await asyncio.gather(*start(client))
    for mode in ("keep", "retract"):
        running = start(client)
        await begun(deployment, client)
        held = await client.pause("p", mode=mode)
        assert held
        assert held == await client.pause("p", mode=mode)
        assert (await client.weights()).pause_ids == ("p",)
        late = asyncio.create_task(client.generate(token_ids=PROMPT, max_tokens=3, **OPTIONS))
        steps = (await client.status()).schedulers[0].steps
        await client.pause("q")
        assert await client.unpause("q") == ("p",)
        assert (await client.status()).schedulers[0].steps == steps
        assert not late.done()
        await client.unpause("p")
        results = await asyncio.gather(*running)
        assert [r.samples[0].token_ids for r in results] == [r.samples[0].token_ids for r in calm]
        assert (await late).samples[0].token_ids == calm[3].samples[0].token_ids[:3]
    running = start(client, num_tokens=450)  # two of them fit each pool
    await begun(deployment, client)
    held = await client.pause("a", mode="abort")
    ends = [(await task).samples[0] for task in running]
    aborted = sorted(len(end.token_ids) for end in ends if end.finish_reason.value == "aborted" and end.token_ids)
    assert aborted
    assert aborted == sorted(sample.num_output_tokens for sample in held)
    await client.unpause()
    running = start(client)
    await begun(deployment, client)
    assert await client.pause("f", mode="finish") == ()
    assert [(await task).samples[0].token_ids for task in running] == [r.samples[0].token_ids for r in calm]
    await client.unpause("f")
    with pytest.raises(InvalidRequest):
        await client.pause("no id")


@pytest.mark.deep
async def test_sleep_frees_memory_and_changes_no_token(deployment: Deployment, client: AsyncClient) -> None:
    calm = await asyncio.gather(*start(client))
    running = start(client)
    await begun(deployment, client)
    await client.sleep_workers()
    assert (await client.weights()).asleep == ("kv_cache", "weights")
    deployment.workers[1].kill()  # another one comes back awake
    deployment.workers[1].start()
    await client.wake_workers("weights")
    assert (await client.weights()).asleep == ("kv_cache",)
    assert not any(task.done() for task in running)
    await client.wake_workers()
    results = await asyncio.gather(*running)
    assert [r.samples[0].token_ids for r in results] == [r.samples[0].token_ids for r in calm]
    with pytest.raises(InvalidRequest) as refused:
        await client.sleep_workers("disk")
    assert refused.value.field_violations[0].field == "tags"


async def test_names_of_trainers_over_http(deployment: Deployment, client: AsyncClient) -> None:
    await deployment.stack.until(client, lambda schedulers: num_ready(schedulers[0]) == 2)
    call, get = partial(asyncio.to_thread, deployment.post), partial(asyncio.to_thread, deployment.get)
    version = (await get("/weight_info"))["weight_version"]
    name = deployment.checkpoints.file(version + 1)
    info = await get("/server_info")
    assert info["vllm_config"]["model_config"]["dtype"] == "torch.float32"
    assert (await get("/get_world_size")) == {"world_size": 2}
    assert (await call("/init_weight_transfer_engine", {"init_info": {}}))[0] == 200
    status, refused = await call("/init_weight_transfer_engine", {"init_info": {"master_address": "a"}})
    assert (status, refused["error"]["param"]) == (400, "init_info.master_address")
    assert (await call("/pause", mode="keep", clear_cache="true"))[0] == 200
    assert (await get("/is_paused"))["is_paused"]
    assert (await call("/update_weights", {"update_info": {"path": name}}))[0] == 400
    assert await call("/start_weight_update", {"is_checkpoint_format": True}) == (200, {"version": version + 1})
    for info, param in (
        ({}, "update_info.path"),
        ({"path": 5}, "update_info.path"),
        ([], "update_info"),
    ):
        status, refused = await call("/update_weights", {"update_info": info})
        assert (status, refused["error"]["param"]) == (400, param)
    status, put = await call("/update_weights", {"update_info": {"path": name}})
    assert status == 200
    shapes = [tensor["shape"] for tensor in put["tensors"]]
    names = [tensor["name"] for tensor in put["tensors"]]
    status, again = await call("/update_weights", {"update_info": {"path": name, "names": names, "shapes": shapes}})
    assert (status, again) == (200, put)
    status, done = await call("/finish_weight_update", {"running_rows": "recompute"})
    assert (status, done["weight_version"], done["num_workers"]) == (200, version + 1, 2)
    assert (await call("/resume"))[1] == {"status": "resumed"}
    params = {"n": 2, "max_tokens": 4, "logprobs": 0, "seed": 1}
    status, answer = await call("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": params})
    assert [choice["weight_versions"][0]["version"] for choice in answer["choices"]] == [version + 1] * 2
    assert (await call("/sleep", level="2", tags="kv_cache"))[0] == 200
    assert (await get("/is_sleeping"))["tags"] == ["kv_cache"]
    assert (await call("/wake_up"))[0] == 200
    assert (await call("/reset_prefix_cache", {})) == (200, {"success": True})
    assert (await call("/pause", mode="stop"))[1]["error"]["param"] == "mode"


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_streams", "num_updates", "pause_s", "num_checked"), [(200, 12, 4.0, 60)])
async def test_updates_under_load_while_processes_are_killed(
    tmp_path: Path, checkpoints: Checkpoints, num_streams: int, num_updates: int, pause_s: float, num_checked: int
) -> None:
    rng, key = random.Random(7), openssl_key(tmp_path / "key.pem")
    with RedisServer(tmp_path) as redis, Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler("--redis", redis.url)
        flags = (*FLAGS, "--weights-dir", str(checkpoints.files))
        workers = [stack.start_worker(scheduler, checkpoints.folder, *flags) for _ in range(2)]
        gateway = stack.start_gateway(scheduler, flags=("--receipt-key-file", str(key)))
        async with await stack.connect(gateway, workers=2) as client:
            load = Load(client, rng, receipt=True)
            running = asyncio.create_task(load.run(num_streams))
            for version in range(1, num_updates + 1):
                phase = ("begin", "put", "commit", "commit")[version % 4]
                victim = scheduler if version % 4 == 3 else rng.choice(workers)
                await update_with_kill(client, checkpoints.file(version), version, victim, phase, rng)
                await asyncio.sleep(pause_s)
                assert not running.done(), running.exception()
            load.stop()
            await running
            assert (await client.weights()).weights.version == num_updates
    samples = [sample for _, _, sample in load.samples]
    spanning = [sample for sample in samples if len(sample.weight_versions) > 1]
    assert spanning
    for sample in [*spanning, *samples][:num_checked]:
        check_receipt(checkpoints, sample)
