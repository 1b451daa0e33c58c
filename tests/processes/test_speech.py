"""Whisper through gateway, scheduler and workers, over gRPC and with the openai client."""

from __future__ import annotations

import asyncio
import io
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
import openai
import pytest
from quire_client import AsyncClient, AsyncGenerateStream, Audio, InvalidRequest

from gateway_svc.request.sandbox import audio_process
from tests.processes.encoder_models import (
    CHUNK_S,
    LANGUAGES,
    NO_TIMESTAMPS_ID,
    PREVIOUS_ID,
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
        with pytest.raises(openai.BadRequestError, match="response_format is 'diarized_json'"):
            await other.audio.transcriptions.create(**given, response_format="diarized_json")
        with pytest.raises(openai.BadRequestError, match="is not audio in a known format") as refused:
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


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:9,\nhttp://127.0.0.1:9/a.ts\n#EXT-X-ENDLIST\n"
CONTAINERS = {  # by name: format and codec of PyAV
    "mp3": ("mp3", "libmp3lame"),
    "m4a": ("ipod", "aac"),
    "ogg": ("ogg", "libopus"),
    "webm": ("webm", "libopus"),
    "flac": ("flac", "flac"),
    "wav": ("wav", "pcm_s16le"),
}


def encoded(samples: npt.NDArray[np.float32], name: str, *, rate: int = 48_000) -> bytes:
    """A stereo file of samples that have the model's rate."""
    form, codec = CONTAINERS[name]
    file = io.BytesIO()
    with av.open(file, "w", format=form) as output:
        stream = output.add_stream(codec, rate=rate, layout="stereo")
        frame = av.AudioFrame.from_ndarray((samples * 32767).astype(np.int16)[None], format="s16", layout="mono")
        frame.sample_rate = RATE
        resampler = av.AudioResampler(stream.format, "stereo", rate, frame_size=stream.frame_size or None)
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            output.mux(stream.encode(part))
        output.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize("name", list(CONTAINERS))
def test_files_are_decoded(name: str) -> None:
    samples = tone(3, 1.5)
    found = audio_process.decoded(encoded(samples, name), RATE, 10 * RATE) / 32767
    assert len(found) == pytest.approx(len(samples), rel=0.05)
    spectrum, expected = (np.abs(np.fft.rfft(wave, 2 * RATE))[:3000] for wave in (found, samples))
    assert np.corrcoef(spectrum, expected)[0, 1] > 0.9


def test_parts_end_at_pauses() -> None:
    noise = np.random.default_rng(0).integers(-9000, 9000, 16 * RATE).astype(np.int16)
    noise[7 * RATE : 7 * RATE + 3000] = 0
    first, *_, last = audio_process.part_ends(noise, RATE, 8 * RATE)
    assert 7 * RATE < first < 7 * RATE + 3000
    assert last == len(noise)


def test_a_file_of_any_bytes_ends_with_an_answer() -> None:
    rng = np.random.default_rng(1)
    files = [bytearray(encoded(tone(2, 0.3), name)) for name in CONTAINERS]
    for _ in range(300):
        data = bytearray(files[rng.integers(len(files))])
        for place in rng.integers(len(data), size=rng.integers(1, 30)):
            data[place] = rng.integers(256)
        limits = {"rate": RATE, "max_samples": RATE, "max_part": 99}
        found = audio_process.answer({"data": bytes(data[: rng.integers(1, len(data) + 1)]), **limits})
        assert set(found) in ({"error"}, {"error", "ends", "data"})


def test_a_stream_that_changes_its_rate_is_refused() -> None:
    data = encoded(tone(2, 0.3), "mp3") + encoded(tone(2, 0.3), "mp3", rate=44_100)
    found = audio_process.answer({"data": data, "rate": RATE, "max_samples": 10 * RATE, "max_part": RATE})
    assert "cannot be decoded after" in found["error"]


async def test_long_speech_is_divided_and_has_segments(stack: tuple[Stack, list[Service], AsyncClient, str]) -> None:
    services, _, client, url = stack
    samples = np.concatenate([tone(seed, 1.5) for seed in range(3)])
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as other:
        given = {"model": "", "file": ("speech.mp3", encoded(samples, "mp3")), "language": "de"}
        whole = await other.audio.transcriptions.create(**given)
        assert whole.usage is not None
        assert (whole.usage.type, whole.usage.seconds) == ("duration", pytest.approx(4.5, abs=0.6))
        stream = await other.audio.transcriptions.create(**given, stream=True)
        events = [event async for event in stream]
        assert "".join(event.delta for event in events[:-1]) == events[-1].text == whole.text
        verbose = await other.audio.transcriptions.create(
            **given, response_format="verbose_json", timestamp_granularities=["segment"]
        )
        assert (verbose.text, verbose.language) == (whole.text, "de")
        assert verbose.segments is not None
        assert len(verbose.segments) >= 3
        ends = [0.0, *(segment.end for segment in verbose.segments)]
        assert [segment.start for segment in verbose.segments] == ends[:-1]
        assert ends[-1] == verbose.duration == pytest.approx(4.5, abs=0.1)
        assert " ".join(segment.text for segment in verbose.segments if segment.text) == whole.text
        assert all(segment.tokens and segment.avg_logprob < 0 for segment in verbose.segments)
        srt = await other.audio.transcriptions.create(**given, response_format="srt")
        assert re.match(r"1\n00:00:00,000 --> 00:00:0[12],\d\d\d\n", srt)
        vtt = await other.audio.transcriptions.create(**given, response_format="vtt")
        assert re.match(r"WEBVTT\n\n00:00:00\.000 --> 00:00:0[12]\.\d\d\d\n", vtt)
        with pytest.raises(openai.BadRequestError, match="only segment is supported"):
            await other.audio.transcriptions.create(
                **given, response_format="verbose_json", timestamp_granularities=["word"]
            )
        with pytest.raises(openai.BadRequestError, match="response_format srt is not streamed"):
            await other.audio.transcriptions.create(**given, response_format="srt", stream=True)
    await wait_idle(services, client)


async def test_text_before_the_speech_equals_transformers(
    stack: tuple[Stack, list[Service], AsyncClient, str], model_dir: Path
) -> None:
    _, _, client, _ = stack
    reference, prompt = SpeechReference(model_dir), "w7 w9 w11"
    before = [PREVIOUS_ID, *(await client.tokenize(f" {prompt}", add_special_tokens=False)).token_ids]
    assert len(before) > 2
    expected = reference.generate(TONES[2], "de", "transcribe", MAX_TOKENS, before)[0]
    plain = reference.generate(TONES[2], "de", "transcribe", MAX_TOKENS)[0]
    result = await client.generate(
        Audio(wav(TONES[2]), language="de", prompt=prompt), max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True
    )
    assert _until_end(list(result.token_ids), expected) == expected != plain
    with pytest.raises(InvalidRequest, match=r"prompt\.audio\.prompt has 5000 characters; at most 4096 are allowed"):
        await client.generate(Audio(wav(TONES[2]), prompt="x" * 5000), max_tokens=2)


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
    for audio, message in (
        (Audio(b"OggS" + bytes(50)), "is not audio in a known format .*; send WAV, MP3, M4A, OGG, WebM or FLAC"),
        (Audio(PLAYLIST), "is not audio in a known format"),
        (Audio(wav(samples)[:-8]), "is cut off"),
        (Audio(wav(tone(1, CHUNK_S + 0.5))), f"has 2.5 s; model 'speech0' takes at most {CHUNK_S} s at once: send"),
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
