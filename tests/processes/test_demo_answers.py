"""The bundled model through the whole stack: readable text, streams, stop strings, many conversations at once."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator

import pytest
from quire_client import AsyncClient, FinishReason
from quire_client.demo import demo_model_dir

from tests.processes.stack import Service, Stack, wait_idle

NUM_QUESTIONS = 40
ZEN = "Recite the Zen of Python."


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Service]]:
    with Stack(tmp_path_factory.mktemp("demo")) as stack:
        scheduler = stack.start_scheduler()
        stack.start_worker(scheduler, demo_model_dir(), "--num-blocks", "256", "--max-num-batched-tokens", "128")
        yield stack, stack.start_gateway(scheduler)


@pytest.fixture
async def client(running: tuple[Stack, Service]) -> AsyncIterator[AsyncClient]:
    stack, gateway = running
    async with await stack.connect(gateway) as client:
        yield client
        await wait_idle(stack, client)


def pairs() -> dict[str, str]:
    """The first wording of every question, and its answer."""
    content = json.loads((demo_model_dir() / "pairs.json").read_text())
    wordings = content["wordings"]
    return {
        (pair["questions"][0] if "questions" in pair else wordings[pair["kind"]][0].format(pair["about"])): pair[
            "answer"
        ]
        for pair in content["pairs"]
    }


async def test_many_conversations_at_once_get_the_learned_answers(client: AsyncClient) -> None:
    questions = random.Random(1).sample(sorted(pairs().items()), NUM_QUESTIONS)
    results = await asyncio.gather(*(client.chat(question) for question, _ in questions))
    wrong = [(q, r.text) for (q, answer), r in zip(questions, results, strict=True) if r.text != answer]
    assert len(wrong) <= NUM_QUESTIONS // 20, wrong
    assert all(result.finish_reason is FinishReason.EOS for result in results)


async def test_the_text_of_a_stream_adds_up_to_the_answer(client: AsyncClient) -> None:
    text = ""
    num_deltas = 0
    async with client.stream_chat(ZEN) as stream:
        async for delta in stream:
            text += delta.text
            num_deltas += 1
        result = await stream.result()
    assert text == result.text == pairs()[ZEN]
    assert num_deltas > 1  # it arrived in several chunks; their number depends on the client's speed


async def test_a_stop_string_cuts_the_text_and_only_the_text(client: AsyncClient) -> None:
    whole = await client.chat(ZEN)
    cut = await client.chat(ZEN, stop="Simple is better")
    before = whole.text[: whole.text.index("Simple is better")]
    assert cut.text == before
    assert cut.finish_reason is FinishReason.STOP
    assert cut.samples[0].matched == "Simple is better"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    kept = await client.chat(ZEN, stop="Simple is better", include_stop_in_output=True)
    assert kept.text == before + "Simple is better"


async def test_the_next_turn_of_a_conversation_hits_its_own_prefix(client: AsyncClient) -> None:
    first = await client.chat([("user", ZEN)])
    messages = [("user", ZEN), ("assistant", first.text), ("user", "What does len do?")]
    second = await client.chat(messages)
    assert second.usage.cached_tokens >= first.usage.prompt_tokens + first.usage.output_tokens - 32
    assert second.text == pairs()["What does len do?"]


async def test_any_text_survives_tokenize_and_detokenize(client: AsyncClient) -> None:
    for text in ("plain", "  spaces  ", "Grüße, 世界 🙂", "e\u0301 \u200b\u00a0", "<|im_end|>", "a\tb\r\n\0c"):
        ids = (await client.tokenize(text)).token_ids
        assert await client.detokenize(ids) == text
        result = await client.generate(text, max_tokens=3, ignore_eos=True)
        assert result.usage.prompt_tokens == len(ids)
