"""Two tenants with equal prompts, through real services: they share no block, and neither detects the other's prompt.

The worker is simulated: it computes no model, but counts tokens, checks every block and takes time per prompt token.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from quire.v1 import inference_pb2 as pb
from quire_client import AsyncClient
from quire_client.demo import demo_model_dir

from gateway_svc.callers.caller import tenant_salt
from tests.processes.ports import free_port
from tests.processes.stack import Service, Stack

BLOCK_SIZE = 16
NUM_BLOCKS = 40  # full blocks of the prompt
PROMPT = [5 + i % 200 for i in range(NUM_BLOCKS * BLOCK_SIZE + 3)]
SYSTEM = "You answer questions about trains, in one sentence. " * 60
TEMPLATE = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
NUM_OTHERS = 98
SIM = ("--executor", "sim", "--sim-step-ms", "1", "--block-size", str(BLOCK_SIZE))


class Tenants:
    """A scheduler, a worker, and one gateway that isolates tenants and one that does not."""

    def __init__(self, folder: Path, stack: Stack) -> None:
        keys = folder / "keys"
        keys.mkdir()
        for tenant in ("a", "b", *map(str, range(NUM_OTHERS))):
            (keys / tenant).write_text(f"key-of-{tenant}")
        self.pages = {name: f"127.0.0.1:{free_port()}" for name in ("scheduler", "worker")}
        scheduler = stack.start_scheduler("--metrics-listen", self.pages["scheduler"])
        metrics = ("--metrics-listen", self.pages["worker"])
        stack.start_worker(scheduler, Path(demo_model_dir()), "--model-name", "demo", *SIM, *metrics)
        self.audit = folder / "audit.jsonl"
        flags = ("--api-keys", str(keys), "--audit-log", str(self.audit))
        self.isolating = stack.start_gateway(scheduler, flags=flags)
        self.sharing = stack.start_gateway(scheduler, flags=(*flags, "--isolation", "none"))
        (folder / "template").write_text(TEMPLATE)
        prefix = ("--public-prefix", f"demo={folder / 'template'}")
        self.templated = stack.start_gateway(scheduler, flags=("--api-keys", str(keys), *prefix))
        for gateway in (self.isolating, self.sharing, self.templated):
            gateway.wait_ready()

    @asynccontextmanager
    async def client(self, gateway: Service, tenant: str) -> AsyncIterator[AsyncClient]:
        async with await AsyncClient.connect(gateway.address, api_key=f"key-of-{tenant}") as client:
            yield client

    def total(self, service: str, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        with urllib.request.urlopen(f"http://{self.pages[service]}/metrics", timeout=30) as page:
            families = list(text_string_to_metric_families(page.read().decode()))
        samples = [sample for family in families for sample in family.samples if sample.name == f"quire_{name}"]
        assert samples, name
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    async def num_prefilled(self) -> float:
        return await asyncio.to_thread(self.total, "worker", "worker_tokens_total", stage="prefill")

    async def num_blocks_cached(self) -> float:
        return await asyncio.to_thread(self.total, "scheduler", "kv_blocks", state="cached")


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    folder = tmp_path_factory.mktemp("tenants")
    with Stack(folder) as stack:
        yield Tenants(folder, stack)


async def costs_of(tenants: Tenants, gateway: Service, salt: str) -> list[tuple[int, int, int]]:
    """Per request of tenants a, b, a: cached tokens, tokens that the worker computed, and further cached blocks."""
    costs = []
    for tenant in ("a", "b", "a"):
        before = await tenants.num_prefilled(), await tenants.num_blocks_cached()
        async with tenants.client(gateway, tenant) as client:
            result = await client.generate(token_ids=PROMPT, max_tokens=1, cache_salt=salt)
        after = await tenants.num_prefilled(), await tenants.num_blocks_cached()
        costs.append((result.usage.cached_tokens, int(after[0] - before[0]), int(after[1] - before[1])))
    return costs


async def test_tenants_with_equal_prompts_share_no_block(tenants: Tenants) -> None:
    """The time of a prompt depends on the tokens to compute, so equal numbers are equal times."""
    cold, warm = (0, len(PROMPT), NUM_BLOCKS), (NUM_BLOCKS * BLOCK_SIZE, len(PROMPT) % BLOCK_SIZE, 0)
    assert await costs_of(tenants, tenants.isolating, "") == [cold, cold, warm]
    assert await costs_of(tenants, tenants.isolating, "salt") == [cold, cold, warm]
    assert await costs_of(tenants, tenants.sharing, "") == [cold, warm, warm]


async def test_tenants_share_the_blocks_of_a_public_prefix(tenants: Tenants) -> None:
    """100 tenants with one template, each with two turns. Only the first one computes the template."""

    async def cached(tenant: str, *turns: str, salt: str = "") -> tuple[int, int]:
        texts = [SYSTEM, *turns]
        roles = ["system", *("assistant" if i % 2 else "user" for i in range(len(turns)))]
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        async with tenants.client(tenants.templated, tenant) as client:
            usage = (await client.generate(messages=messages, max_tokens=1, cache_salt=salt)).usage
        return usage.cached_tokens, usage.prompt_tokens

    question, words = "Which train goes to Rome today?" * 3, "The one at nine. " * 4
    tenant_names = ["a", "b", *map(str, range(NUM_OTHERS))]
    first = [await cached(tenant, question) for tenant in tenant_names]
    async with tenants.client(tenants.templated, "a") as client:
        num_public = len((await client.tokenize(TEMPLATE)).token_ids) // BLOCK_SIZE * BLOCK_SIZE
    assert [hit for hit, _ in first] == [0, *[num_public] * (len(first) - 1)]
    second = [await cached(tenant, question, words, question) for tenant in tenant_names]
    own = first[0][1] // BLOCK_SIZE * BLOCK_SIZE
    assert num_public < own <= min(hit for hit, _ in second) == max(hit for hit, _ in second)
    assert await cached("a", question, words, question, salt="own") == (0, second[0][1])
    rates = [sum(hit for hit, _ in turn) / sum(size for _, size in turn) for turn in (first, second)]
    print(f"hit rates of 100 tenants with a template of {num_public} tokens: {rates}")
    assert rates[0] > 0.9


async def test_a_tenant_cannot_use_the_salt_of_another(tenants: Tenants) -> None:
    """A client that knows how salts are made sends the salt of another tenant as its own."""
    async with tenants.client(tenants.isolating, "a") as client:
        await client.generate(token_ids=PROMPT, max_tokens=1, cache_salt="guess")
    async with tenants.client(tenants.isolating, "b") as client:
        for guess in ("guess", tenant_salt("a", "guess"), "1:aguess"):
            result = await client.generate(token_ids=PROMPT, max_tokens=1, cache_salt=guess, tenant_id="a")
            assert result.usage.cached_tokens == 0


async def test_a_resumed_request_uses_the_blocks_of_its_tenant(tenants: Tenants) -> None:
    request = pb.GenerateRequest(
        request_id="resumed", prompt={"tokens": {"ids": PROMPT}}, scheduling={"cache_salt": "resume"}
    )
    request.sampling.seed, request.stop.max_tokens, request.stop.ignore_eos = 7, 40, True
    async with tenants.client(tenants.isolating, "a") as client:
        whole = await ids_of(client, request)
        before = await tenants.num_prefilled()
        request.continuation.samples.add(index=0, output_token_ids=whole[:20])
        assert await ids_of(client, request) == whole[20:]
    assert await tenants.num_prefilled() - before <= BLOCK_SIZE + 20


async def ids_of(client: AsyncClient, request: pb.GenerateRequest) -> list[int]:
    call = client.raw.Generate(request, metadata=(("authorization", "Bearer key-of-a"),), timeout=60)
    return [id_ async for event in call for id_ in event.chunk.token_ids]


async def test_audit_lines_of_one_request_on_two_gateways_join_by_its_id(tenants: Tenants) -> None:
    request = pb.GenerateRequest(request_id="joined", prompt={"tokens": {"ids": PROMPT}})
    request.sampling.seed, request.stop.max_tokens, request.stop.ignore_eos = 7, 10, True
    async with tenants.client(tenants.isolating, "a") as client:
        whole = await ids_of(client, request)
    request.continuation.samples.add(index=0, output_token_ids=whole[:4])
    async with tenants.client(tenants.sharing, "a") as client:
        await ids_of(client, request)
    for gateway in (tenants.isolating, tenants.sharing):
        assert gateway.terminate() == 0  # a gateway writes its last lines before it ends
    lines = [json.loads(line) for line in tenants.audit.read_text().splitlines()]
    joined = [line for line in lines if (line["owner"], line["request_id"]) == ("a", "joined")]
    assert [line["output_tokens"] for line in joined] == [10, 6]
    assert [line["code"] for line in joined] == ["OK", "OK"]
    assert len({line["gateway"] for line in joined}) == 2
    assert {line["method"] for line in lines} == {"quire.v1.InferenceService/Generate"}
