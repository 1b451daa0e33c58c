"""Whisper through gateway, scheduler and workers, over gRPC and with the openai client."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from quire_client import AsyncClient, AsyncGenerateStream, Audio, InvalidRequest

from tests.processes.encoder_models import (
    CHUNK_S,
    LANGUAGES,
    NO_TIMESTAMPS_ID,
    RATE,
    TASKS,
    SpeechReference,
    make_speech_checkpoint,
    tone,
    wav,
)
from tests.processes.ports import free_port
from tests.processes.redis_server import RedisServer
from tests.processes.stack import Service, Stack, wait_idle

FLAGS = ("--dtype", "float32", "--block-size", "16", "--num-blocks", "40", "--max-num-seqs", "6")
MAX_TOKENS = 30
TONES = [tone(seed, seconds) for seed, seconds in enumerate((0.05, 0.7, 1.0, 1.5, 2.0))]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_speech_checkpoint(tmp_path_factory.mktemp("speech"))


@pytest.fixture
async def stack(model_dir: Path, tmp_path: Path) -> AsyncIterator[tuple[Stack, list[Service], AsyncClient, str]]:
    port = free_port()
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        workers = [stack.start_worker(scheduler, model_dir, *FLAGS) for _ in range(2)]
        gateway = stack.start_gateway(scheduler, flags=("--http-listen", f"127.0.0.1:{port}"))
        async with await stack.connect(gateway) as client:
            await stack.until(client, lambda schedulers: len(schedulers[0].workers) == 2)
            yield stack, workers, client, f"http://127.0.0.1:{port}/v1"


async def test_outputs_equal_transformers_also_after_a_kill(
    stack: tuple[Stack, list[Service], AsyncClient, str], model_dir: Path
) -> None:
    services, workers, client, url = stack
    reference = SpeechReference(model_dir)
    expected = [reference.generate(samples, "de", "translate", MAX_TOKENS)[0] for samples in TONES]
    calls = [
        client.generate(
            Audio(wav(samples), language="de", task="translate"),
            max_tokens=MAX_TOKENS,
            temperature=0.0,
            ignore_eos=True,
        )
        for samples in TONES
    ]
    running = [asyncio.create_task(call) for call in calls]
    await services.until(client, lambda schedulers: schedulers[0].steps >= 12)
    workers[0].kill()
    results = await asyncio.gather(*running)
    assert [
        _until_end(list(result.token_ids), want) for result, want in zip(results, expected, strict=True)
    ] == expected
    assert len({tuple(output) for output in expected}) == len(expected)  # the outputs depend on the audio
    assert {result.usage.prompt_tokens for result in results} == {50 * CHUNK_S}

    samples = TONES[3]
    beams = await client.generate(Audio(wav(samples), language="en"), max_tokens=12, beam_width=3, n=2)
    found = [list(sample.token_ids) for sample in beams.samples]
    assert found == reference.generate(samples, "en", "transcribe", 12, num_beams=3, num_return_sequences=2)
    again = await client.generate(Audio(wav(samples), language="de"), max_tokens=2)
    assert again.usage.cached_tokens == 50 * CHUNK_S  # the encoder did not run again

    raw = Audio(samples.tobytes(), format="pcm_f32")
    detected = await client.generate(raw, max_tokens=MAX_TOKENS, temperature=0.0)
    language = reference.detected_language(samples)
    first = [LANGUAGES[language], TASKS["transcribe"], NO_TIMESTAMPS_ID]
    assert list(detected.token_ids) == first + reference.generate(samples, language, "transcribe", MAX_TOKENS - 3)[0]

    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as other:
        given = {"model": "", "file": ("speech.wav", wav(samples)), "language": "de"}
        transcript = await other.audio.transcriptions.create(**given)
        text = await other.audio.transcriptions.create(**given, response_format="text")
        plain = await client.generate(Audio(wav(samples), language="de"), temperature=0.0)
        assert transcript.text == text.strip() == plain.text.strip() != ""
        with pytest.warns(DeprecationWarning, match="deprecated"):
            translated = await other.audio.translations.create(model="", file=("a.wav", wav(samples)))
        assert translated.text is not None
        with pytest.raises(openai.BadRequestError, match="response_format is 'srt'"):
            await other.audio.transcriptions.create(**given, response_format="srt")
        with pytest.raises(openai.BadRequestError, match="is not a WAV file") as refused:
            await other.audio.transcriptions.create(model="", file=("speech.mp3", b"ID3" + bytes(100)))
        assert refused.value.param == "file"
    await wait_idle(services, client)


async def test_streams_survive_the_loss_of_a_gateway_and_of_a_scheduler(model_dir: Path, tmp_path: Path) -> None:
    speech = {"prompt": Audio(wav(TONES[3])), "max_tokens": 50, "ignore_eos": True, "seed": 5, "temperature": 0.8}
    with RedisServer(tmp_path) as redis, Stack(tmp_path) as stack:
        schedulers = [stack.start_scheduler("--redis", redis.url) for _ in range(2)]
        workers = [stack.start_worker(scheduler, model_dir, *FLAGS) for scheduler in schedulers]
        first, second = (stack.start_gateway(*schedulers, flags=("--redis", redis.url)) for _ in range(2))
        async with await stack.connect(first) as client, await stack.connect(second) as other:
            await stack.until(other, lambda found: all(scheduler.workers for scheduler in found))
            expected = list((await other.generate(**speech)).token_ids)

            async with client.stream(**speech, resumable=True, request_id="r", resume=False) as stream:
                begun = await read(stream, 3)
                stop(workers)
                first.kill()
            resume(workers)
            async with other.resume("r", after=len(begun)) as stream:
                rest = await stream.result()
            assert begun + list(rest.token_ids) == expected

            async with other.stream(**speech) as stream:
                begun = await read(stream, 3)
                stop(workers)
                (status, _) = (await other.status()).schedulers
                lost = 0 if status.num_running else 1
                schedulers[lost].kill()
                resume(workers)
                rest = await stream.result()
            assert list(rest.token_ids) == expected


async def read(stream: AsyncGenerateStream, num_tokens: int) -> list[int]:
    """Tokens until there are at least this many."""
    token_ids: list[int] = []
    while len(token_ids) < num_tokens:
        token_ids += (await anext(stream)).token_ids
    return token_ids


def stop(workers: list[Service]) -> None:
    for worker in workers:
        worker.signal(signal.SIGSTOP)


def resume(workers: list[Service]) -> None:
    for worker in workers:
        worker.signal(signal.SIGCONT)


async def test_bad_audio_is_refused_with_what_to_do(stack: tuple[Stack, list[Service], AsyncClient, str]) -> None:
    _, _, client, _ = stack
    samples = tone(1, 0.2)
    stereo = wav(np.repeat(samples, 2), channels=2)
    for audio, message in (
        (Audio(wav(samples, rate=44_100)), "has 44100 samples per second; the model takes 16000; convert it.*ffmpeg"),
        (Audio(stereo), "has 2 channels; the model takes one"),
        (Audio(b"OggS" + bytes(50)), "is not a WAV file; convert it"),
        (Audio(wav(samples)[:-8]), "is cut off"),
        (Audio(wav(tone(1, CHUNK_S + 0.5))), f"has 2.5 s; model 'speech0' takes at most {CHUNK_S} s: send it in parts"),
        (Audio(bytes(70_000 + 4 * CHUNK_S * RATE), format="pcm_f32"), "at most .* are allowed, which hold 2 s"),
        (Audio(b"abc", format="pcm_f32"), "has 3 bytes of float32 samples"),
        (Audio(np.full(9, np.nan, np.float32).tobytes(), format="pcm_f32"), "contains NaN or infinity"),
        (Audio(wav(samples), language="xx"), "prompt.audio.language is 'xx'; .* knows de, en"),
        (Audio(wav(samples), task="summarize"), "prompt.audio.task is 'summarize'; .* knows transcribe, translate"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidRequest, match=message):
            await client.generate(audio, max_tokens=2)
    with pytest.raises(InvalidRequest, match=r"turns speech into text; send prompt\.audio"):
        await client.generate("text", max_tokens=2)
    short = Audio(wav(samples, is_float=False))
    assert len((await client.generate(short, max_tokens=5, ignore_eos=True)).token_ids) == 5


def _until_end(output: list[int], expected: list[int]) -> list[int]:
    """The output as far as the reference goes, which ends at EOS."""
    return output[: len(expected)]
