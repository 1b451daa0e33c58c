"""Embeddings and scores with real services: equal to sentence-transformers, also when a worker is killed."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from quire.v1 import inference_pb2 as pb
from quire_client import AsyncClient, InvalidRequest, ModelNotFound
from sentence_transformers import CrossEncoder
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.embedding_models import (
    MAX_LENGTH,
    SIZES,
    make_answering_reranker,
    make_cross_encoder,
    make_embedder,
    make_tokenizer,
    texts,
)
from tests.processes.ports import free_port
from tests.processes.stack import Stack

# Prompts are computed in chunks of decoders, and texts wait for rows.
FLAGS = ("--dtype", "float32", "--max-num-seqs", "6", "--num-blocks", "120")
DECODER = (*FLAGS, "--max-num-batched-tokens", "48")
ENCODER = (*FLAGS, "--max-num-batched-tokens", "256")
TOLERANCE = 1e-4


@asynccontextmanager
async def served(
    stack: Stack, model: Path, *flags: str, workers: int = 1, gateway_flags: tuple[str, ...] = ()
) -> AsyncIterator[AsyncClient]:
    scheduler = stack.start_scheduler()
    for _ in range(workers):
        stack.start_worker(scheduler, model, *flags)
    gateway = stack.start_gateway(scheduler, flags=gateway_flags)
    async with await stack.connect(gateway, workers=workers) as client:
        yield client


def check(found: Any, expected: Any) -> None:
    assert np.abs(np.array(found) - expected).max() < TOLERANCE


async def check_pool_is_empty(client: AsyncClient, stack: Stack) -> None:
    """Nothing of a pooled request stays: no block is used or cached."""
    await stack.until(
        client, lambda schedulers: all(w.blocks_used == w.blocks_cached == 0 for s in schedulers for w in s.workers)
    )


EMBEDDERS = {
    "qwen3-last": ("qwen3", "lasttoken", DECODER, {}),
    "qwen3-mean": ("qwen3", "mean", DECODER, {}),
    "bert-dense": ("bert", "mean", ENCODER, {"dense": 20}),
    "roberta": ("roberta", "cls", ENCODER, {"normalizes": False}),
    "modernbert": ("modernbert", "cls", ENCODER, {}),
}


def others_deep(names: Iterable[str], *first: str) -> list[Any]:
    """The names, of which only the first ones are not marked deep."""
    return [name if name in first else pytest.param(name, marks=pytest.mark.deep) for name in names]


@pytest.mark.parametrize("name", others_deep(EMBEDDERS, "qwen3-last", "bert-dense", "modernbert"))
async def test_embeddings_equal_those_of_sentence_transformers(stack: Stack, tmp_path: Path, name: str) -> None:
    kind, pooling, flags, options = EMBEDDERS[name]
    model = make_embedder(tmp_path / "model", kind, pooling, **options)
    inputs = texts(30, 120)
    async with served(stack, tmp_path / "model", *flags) as client:
        found = await client.embed(inputs)
        check(found.embeddings, model.encode(inputs))
        assert found.prompt_tokens == tuple(len(ids) for ids in model.tokenizer(inputs)["input_ids"])
        ids = model.tokenizer(inputs[0])["input_ids"]
        assert (await client.embed([ids])).embeddings[0] == found.embeddings[0]
        queries = await client.embed(inputs[:3], prompt_name="query", dimensions=10, normalize=True)
        check(
            queries.embeddings,
            model.encode(inputs[:3], prompt_name="query", truncate_dim=10, normalize_embeddings=True),
        )
        await check_pool_is_empty(client, stack)
        if kind != "qwen3":
            with pytest.raises(InvalidRequest, match="generates no tokens; use Embed or Score"):
                await client.generate("w1 w2", max_tokens=3)


async def test_a_request_can_change_how_texts_are_pooled(stack: Stack, tmp_path: Path) -> None:
    model = make_embedder(tmp_path / "model", "bert", "mean")
    inputs = texts(4, 50)
    with torch.no_grad():
        states = [
            model[0].auto_model(**model.tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in inputs
        ]
    async with served(stack, tmp_path / "model", *ENCODER) as client:
        found = await client.embed(inputs, pooling="cls", normalize=False)
        check(found.embeddings, torch.stack([state[0] for state in states]).numpy())
        found = await client.embed(inputs, pooling="last", normalize=False)
        check(found.embeddings, torch.stack([state[-1] for state in states]).numpy())
        long = "w1 " * 400
        with pytest.raises(InvalidRequest, match=rf"inputs\[1\] has 402 tokens; .* takes at most {MAX_LENGTH}"):
            await client.embed(["w1", long])
        check((await client.embed([long], truncate=True)).embeddings, model.encode([long]))
        with pytest.raises(InvalidRequest, match="prompt_name is 'other'; prompts of model 'model': document, query"):
            await client.embed("w1", prompt_name="other")
        with pytest.raises(InvalidRequest, match=f"dimensions is 100; must be from 1 to {SIZES['hidden_size']}"):
            await client.embed("w1", dimensions=100)
        with pytest.raises(ModelNotFound):
            await client.embed("w1", model="other")
        one = await client.embed("w1", request_id="mine", priority=3, tenant_id="a")
        assert one.request_id == "mine"


async def test_embeddings_beside_generations_survive_the_kill_of_a_worker(stack: Stack, tmp_path: Path) -> None:
    """A causal model generates and embeds in the same steps. Nothing changes when a worker is killed."""
    torch.manual_seed(5)
    folder = tmp_path / "model"
    config = make_embedder(tmp_path / "other", "qwen3", "mean")[0].auto_model.config
    AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder)
    make_tokenizer("qwen3").save_pretrained(folder)
    inputs = texts(60, 120)
    scheduler = stack.start_scheduler()
    workers = [stack.start_worker(scheduler, folder, *DECODER) for _ in range(2)]
    gateway = stack.start_gateway(scheduler)
    async with await stack.connect(gateway, workers=2) as client:
        generation = {"prompt": inputs[0], "max_tokens": 60, "temperature": 0.0, "ignore_eos": True}
        means, lasts = await client.embed(inputs, pooling="mean"), await client.embed(inputs, pooling="last")
        alone = await client.generate(**generation)
        again = await client.embed(inputs[:1], pooling="mean")  # its prompt is a cached prefix now
        assert again.embeddings[0] == means.embeddings[0]
        async with client.stream(**{**generation, "prompt": inputs[1]}) as stream:
            mixed = asyncio.gather(client.embed(inputs, pooling="mean"), client.embed(inputs, pooling="last"))
            async for _ in stream:
                break
            workers[0].kill()
            found = await mixed
            await stream.result()
        assert (found[0].embeddings, found[1].embeddings) == (means.embeddings, lasts.embeddings)
        assert (await client.generate(**generation)).token_ids == alone.token_ids


CROSS_ENCODERS = {
    "bert": ("bert", ENCODER, {}),
    "roberta": ("roberta", ENCODER, {}),
    "modernbert": ("modernbert", ENCODER, {"classifier_pooling": "mean"}),
    "qwen3": ("qwen3", DECODER, {}),
}


@pytest.mark.parametrize("name", others_deep(CROSS_ENCODERS, "bert"))
async def test_scores_equal_those_of_cross_encoders(stack: Stack, tmp_path: Path, name: str) -> None:
    kind, flags, options = CROSS_ENCODERS[name]
    make_cross_encoder(tmp_path / "model", kind, **options)
    model = CrossEncoder(str(tmp_path / "model"), device="cpu")
    query, documents = texts(1, 8)[0], texts(12, 90, seed=2)
    async with served(stack, tmp_path / "model", *flags) as client:
        found = await client.score(query, documents)
        check(found.scores, model.predict([(query, document) for document in documents]))
        long = "w1 " * (2000 if kind == "qwen3" else 400)
        with pytest.raises(InvalidRequest, match=r"pairs\[0\] has \d+ tokens; .* or set truncate"):
            await client.score(query, [long])
        if kind != "qwen3":
            check((await client.score(query, [long], truncate=True)).scores, model.predict([(query, long)]))
        await check_pool_is_empty(client, stack)


async def test_answers_of_a_causal_reranker_are_scores(stack: Stack, tmp_path: Path) -> None:
    make_answering_reranker(tmp_path / "model")
    model = CrossEncoder(str(tmp_path / "model"), device="cpu")
    query, documents = texts(1, 8)[0], texts(8, 60, seed=2)
    pairs = [(query, document) for document in documents]
    async with served(stack, tmp_path / "model", *DECODER) as client:
        check((await client.score(query, documents)).scores, model.predict(pairs, activation_fn=torch.nn.Sigmoid()))
        found = await client.score(query, documents, instruction="w20 w21", request_id="mine", priority=1)
        check(found.scores, model.predict(pairs, prompt="w20 w21", activation_fn=torch.nn.Sigmoid()))
        assert found.request_id == "mine"
        with pytest.raises(ModelNotFound):
            await client.score("w1", "w2", model="other")


async def test_scores_of_an_embedding_model_are_cosines(stack: Stack, tmp_path: Path) -> None:
    model = make_embedder(tmp_path / "model", "bert", "mean", normalizes=False)
    query, documents = texts(1, 8)[0], texts(5, 60, seed=2)
    async with served(stack, tmp_path / "model", *ENCODER) as client:
        found = await client.score(query, documents)
        expected = model.encode([query, *documents], normalize_embeddings=True)
        check(found.scores, expected[1:] @ expected[0])
        with pytest.raises(InvalidRequest, match="takes no instruction"):
            await client.score("w1", "w2", instruction="w3")


async def test_the_http_endpoints_with_the_openai_client(stack: Stack, tmp_path: Path) -> None:
    model = make_embedder(tmp_path / "model", "bert", "mean")
    inputs, port = texts(3, 20), free_port()
    expected = model.encode(inputs)
    flags = ("--http-listen", f"127.0.0.1:{port}")
    api_of = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    async with served(stack, tmp_path / "model", *ENCODER, gateway_flags=flags), api_of as api:
        default = await api.embeddings.create(model="model", input=inputs)  # the package asks for base64
        check([item.embedding for item in default.data], expected)
        assert default.usage.total_tokens == sum(len(ids) for ids in model.tokenizer(inputs)["input_ids"])
        plain = await api.embeddings.create(model="model", input=inputs[0], encoding_format="float", dimensions=7)
        check(plain.data[0].embedding, model.encode(inputs[0], truncate_dim=7, normalize_embeddings=True))
        ids = model.tokenizer(inputs)["input_ids"]
        for given, count in ((ids, 3), (ids[0], 1)):
            found = await api.embeddings.create(model="model", input=given)
            check([item.embedding for item in found.data], expected[:count])
        raw: Any = await api.post("/embeddings", body={"input": "w1", "encoding_format": "base64"}, cast_to=object)
        assert len(base64.b64decode(raw["data"][0]["embedding"])) == 4 * SIZES["hidden_size"]
        with pytest.raises(openai.BadRequestError, match="encoding_format is 'int8'"):
            await api.post("/embeddings", body={"input": "w1", "encoding_format": "int8"}, cast_to=object)
        body = {"query": inputs[0], "documents": [inputs[1], {"text": inputs[0]}, inputs[2]], "top_n": 2}
        ranked: Any = await api.post("/rerank", body=body, cast_to=object)
        assert ranked["results"][0]["index"] == 1
        assert ranked["results"][0]["document"]["text"] == inputs[0]
        assert ranked["results"][0]["relevance_score"] == pytest.approx(1.0, abs=1e-5)
        assert len(ranked["results"]) == 2
        plain_api = api.with_options(base_url=f"http://127.0.0.1:{port}")
        for path in ("/rerank", "/v2/rerank"):
            again: Any = await plain_api.post(path, body=body, cast_to=object)
            assert again["results"] == ranked["results"]
        scored: Any = await api.post("/score", body={"text_1": inputs[0], "text_2": inputs[1:]}, cast_to=object)
        check([item["score"] for item in scored["data"]], expected[1:] @ expected[0])
        again = await plain_api.post("/score", body={"text_1": inputs[0], "text_2": inputs[1:]}, cast_to=object)
        assert again["data"] == scored["data"]


BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "w1 w2"},
    "/v1/score": {"text_1": "w1", "text_2": ["w2", "w3"]},
    "/v1/rerank": {"query": "w1", "documents": ["w2", "w3"]},
    "/v2/embed": {"texts": ["w1 w2"]},
    "/pooling": {"input": "w1 w2"},
}
# (endpoint, field, value, whether the request is refused)
EFFECTS = [
    ("/v1/embeddings", "input", "w5", False), ("/v1/embeddings", "encoding_format", "base64", False),
    ("/v1/embeddings", "dimensions", 3, False), ("/v1/embeddings", "pooling", "cls", False),
    ("/v1/embeddings", "normalize", False, False), ("/v1/embeddings", "prompt_name", "query", False),
    ("/v1/score", "text_1", "w9", False), ("/v1/score", "text_2", "w9", False),
    ("/v1/score", "instruction", "w9", True), ("/v1/rerank", "query", "w9", False),
    ("/v1/rerank", "documents", ["w9"], False), ("/v1/rerank", "top_n", 1, False),
    ("/v1/rerank", "return_documents", False, False), ("/v1/rerank", "instruction", "w9", True),
    ("/v2/embed", "texts", ["w5"], False), ("/v2/embed", "input_type", "search_query", False),
    ("/v2/embed", "embedding_types", ["binary"], False), ("/v2/embed", "output_dimension", 3, False),
    ("/v2/embed", "truncate", "START", True), ("/v2/embed", "images", ["a"], True), ("/pooling", "input", "w5", False),
    ("/pooling", "encoding_format", "base64", False), ("/pooling", "dimensions", 3, False),
    ("/pooling", "normalize", False, False), ("/pooling", "prompt_name", "query", False),
    ("/pooling", "task", "token_embed", True), ("/pooling", "use_activation", "no", True),
    *((path, "model", "other", True) for path in BODIES), *((path, "priority", 2000, True) for path in BODIES),
    *((path, "truncate_prompt_tokens", 5, True) for path in BODIES if path != "/v2/embed"),
]  # fmt: skip


async def test_every_field_of_an_http_body_has_an_effect(stack: Stack, tmp_path: Path) -> None:
    make_embedder(tmp_path / "model", "bert", "mean")
    port = free_port()
    flags = ("--http-listen", f"127.0.0.1:{port}")
    api_of = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0)
    async with served(stack, tmp_path / "model", *ENCODER, gateway_flags=flags), api_of as api:

        async def numbers(path: str, body: dict[str, Any]) -> str:
            answer: Any = await api.post(path, body=body, cast_to=object)
            return str(answer.get("data") or answer.get("results") or answer["embeddings"])

        for path, name, value, is_refused in EFFECTS:
            body = {**BODIES[path], name: value}
            if is_refused:
                with pytest.raises(openai.APIStatusError, match=name):
                    await numbers(path, body)
            else:
                assert await numbers(path, body) != await numbers(path, BODIES[path]), (path, name)
        long = "w1 " * 400
        for path, body in {"/v1/embeddings": {"input": long}, "/v1/score": {"text_1": "w1", "text_2": long}}.items():
            with pytest.raises(openai.BadRequestError, match="set truncate"):
                await numbers(path, body)
            whole = await numbers(path, {**body, "truncate": True})
            assert await numbers(path, {**body, "truncate_prompt_tokens": -1, "user": "me"}) == whole
        default: Any = await api.post("/v1/embeddings", body={"input": ["w1", "w2 w3"]}, cast_to=object)
        vectors = [item["embedding"] for item in default["data"]]
        body = {"texts": ["w1", "w2 w3"], "embedding_types": ["float", "base64", "ubinary", "binary"]}
        cohere: Any = await api.post("/v2/embed", body=body, cast_to=object)
        found = cohere["embeddings"]
        bits = np.packbits(np.array(vectors) > 0, axis=1)
        assert found["float"] == vectors
        assert [base64.b64decode(one) for one in found["base64"]] == [np.float32(one).tobytes() for one in vectors]
        assert (found["ubinary"], found["binary"]) == (bits.tolist(), (bits.astype(int) - 128).tolist())
        assert cohere["meta"]["billed_units"] == {"input_tokens": default["usage"]["total_tokens"]}
        pooled: Any = await api.post("/pooling", body={"input": ["w1", "w2 w3"]}, cast_to=object)
        assert [item["data"] for item in pooled["data"]] == vectors
        for path in ("/classify", "/pooling"):
            with pytest.raises(openai.APIStatusError, match="has no classification head, so it cannot classify"):
                await api.post(path, body={"input": "w1", "task": "classify"}, cast_to=object)


LABELS = {0: "low", 1: "middle", 2: "high"}


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification"])
async def test_classes_equal_those_of_transformers(stack: Stack, tmp_path: Path, problem: str) -> None:
    make_cross_encoder(tmp_path / "model", "bert", num_labels=3, id2label=LABELS, problem_type=problem)
    inputs, port = texts(3, 20), free_port()
    activation = torch.nn.Softmax(dim=-1) if problem.startswith("single") else torch.nn.Sigmoid()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        logits = model(**tokenizer(inputs, padding=True, return_tensors="pt")).logits
    flags = ("--http-listen", f"127.0.0.1:{port}")
    api_of = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0)
    async with served(stack, tmp_path / "model", *ENCODER, gateway_flags=flags), api_of as api:
        found: Any = await api.post("/classify", body={"input": inputs, "user": "me", "priority": 1}, cast_to=object)
        check([item["probs"] for item in found["data"]], activation(logits).numpy())
        assert [item["label"] for item in found["data"]] == [LABELS[int(row.argmax())] for row in logits]
        assert {item["num_classes"] for item in found["data"]} == {3}
        assert found["usage"]["total_tokens"] == sum(len(ids) for ids in tokenizer(inputs)["input_ids"])
        raw: Any = await api.post("/classify", body={"input": inputs, "use_activation": False}, cast_to=object)
        check([item["probs"] for item in raw["data"]], logits.numpy())
        pooled: Any = await api.post("/pooling", body={"input": inputs}, cast_to=object)
        assert [item["data"] for item in pooled["data"]] == [item["probs"] for item in found["data"]]
        long = {"input": "w1 " * 400}
        with pytest.raises(openai.BadRequestError, match="set truncate"):
            await api.post("/classify", body=long, cast_to=object)
        first, second = [
            (await api.post("/classify", body={**long, **cut}, cast_to=object))["data"]  # type: ignore[index]
            for cut in ({"truncate": True}, {"truncate_prompt_tokens": -1})
        ]
        assert first == second
        for name in ("model", "prompt_name"):
            with pytest.raises(openai.APIStatusError, match=name):
                await api.post("/classify", body={"input": "w1", name: "other"}, cast_to=object)


async def test_a_decoder_without_configuration_scores_nothing(stack: Stack, tmp_path: Path) -> None:
    config = make_embedder(tmp_path / "other", "qwen3", "mean")[0].auto_model.config
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    make_tokenizer("qwen3").save_pretrained(tmp_path / "model")
    async with served(stack, tmp_path / "model", *DECODER) as client:
        assert len((await client.embed("w1")).embeddings[0]) == SIZES["hidden_size"]
        with pytest.raises(Exception, match="so it cannot score; serve a reranker or an embedding model"):
            await client.score("w1", "w2")
        scheduling = pb.SchedulingParams(priority=5000)
        with pytest.raises(Exception, match=r"scheduling\.priority is 5000"):
            await client.raw.Embed(pb.EmbedRequest(inputs=[pb.Prompt(text="w1")], scheduling=scheduling))
        with pytest.raises(Exception, match=r"scheduling\.priority is 5000"):
            await client.raw.Score(pb.ScoreRequest(pairs=[{"query": "a", "document": "b"}], scheduling=scheduling))
        with pytest.raises(Exception, match="inputs has 0 items; must have 1 to 2048"):
            await client.raw.Embed(pb.EmbedRequest())
