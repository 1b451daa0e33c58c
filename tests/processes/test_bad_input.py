"""Bad input gets an error that names the field and the limit, and the next request is served."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from quire.v1 import inference_pb2 as pb
from quire_client import AlreadyExists, AsyncClient, InvalidRequest, ModelNotFound, Overloaded, QuireError
from quire_client.errors import OPTIONS, error_from_rpc, renamed
from quire_client.retry import RetryPolicy
from safetensors.torch import load_file, save_file

from tests.processes.models import MAX_MODEL_LEN, VOCAB_SIZE, make_checkpoint
from tests.processes.stack import Service, Stack, is_ready, wait_idle

BLOCK_SIZE = 16
NUM_BLOCKS = 40
POOL_TOKENS = NUM_BLOCKS * BLOCK_SIZE  # 640: less than max_model_len
MAX_TOKENS = POOL_TOKENS + 1  # prompt and output of one sequence: its last token needs no slot
FLAGS = (
    *("--dtype", "float32", "--num-blocks", str(NUM_BLOCKS), "--block-size", str(BLOCK_SIZE)),
    *("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", str(MAX_MODEL_LEN)),
)
MAX_WAITING = 6
GENERATE = "/quire.v1.InferenceService/Generate"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("bad_input") / "model")


class Running:
    """A stack with a small KV pool and a short queue."""

    def __init__(self, stack: Stack, model_dir: Path) -> None:
        self.stack = stack
        self.scheduler = stack.start_scheduler("--max-waiting", str(MAX_WAITING))
        self.worker = stack.start_worker(self.scheduler, model_dir, *FLAGS)
        self.gateway = stack.start_gateway(self.scheduler)


@pytest.fixture(scope="module")
def running(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Stack(tmp_path_factory.mktemp("running")) as stack:
        yield Running(stack, model_dir)


@pytest.fixture
async def client(running: Running) -> AsyncIterator[AsyncClient]:
    async with await running.stack.connect(running.gateway) as client:
        yield client
        await check_works(running, client)


async def check_works(running: Running, client: AsyncClient) -> None:
    """Checks that no request is running and that a valid request gets its four tokens."""
    await wait_idle(running.stack, client)
    result = await client.generate(token_ids=[1, 2, 3], max_tokens=4, temperature=0.0, ignore_eos=True)
    assert len(result.token_ids) == 4


def tokens(*ids: int) -> dict[str, Any]:
    return {"prompt": {"tokens": {"ids": ids}}}


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"prompt": {"chat": {"messages": [{"role": "user", "content": "hi"}]} | fields}}


NAN, INF = math.nan, math.inf
CODES = grpc.StatusCode
BAD_REQUESTS: list[tuple[str, dict[str, Any], grpc.StatusCode, str, str]] = [
    # name, the fields that make a valid request invalid, code, field, words of the message
    ("no prompt", {"prompt": {}}, CODES.INVALID_ARGUMENT, "prompt", "not set"),
    ("token = vocab", tokens(1, VOCAB_SIZE), CODES.INVALID_ARGUMENT, "prompt", str(VOCAB_SIZE)),
    ("prompt too long", tokens(*[1] * 2000), CODES.INVALID_ARGUMENT, "prompt", str(MAX_TOKENS)),
    ("2 MB of text", {"prompt": {"text": "x" * (2 << 20)}}, CODES.INVALID_ARGUMENT, "prompt.text", str(MAX_MODEL_LEN)),
    ("above pool", {"stop": {"max_tokens": 700}}, CODES.INVALID_ARGUMENT, "stop.max_tokens", str(MAX_TOKENS)),
    ("unknown model", {"model": "missing"}, CODES.NOT_FOUND, "model", "missing"),
    ("temperature NaN", sampling(temperature=NAN), CODES.INVALID_ARGUMENT, "sampling.temperature", "nan"),
    ("n above rows", sampling(n=5), CODES.INVALID_ARGUMENT, "sampling.n", "4"),
    ("bad id", {"request_id": "no spaces"}, CODES.INVALID_ARGUMENT, "request_id", "no spaces"),
    (
        "nothing left",
        sampling(allowed_token_ids=[5], banned_token_ids=[5]),
        CODES.INVALID_ARGUMENT,
        "sampling.allowed_token_ids",
        "all of them",
    ),
    ("beams above rows", sampling(beam_width=5), CODES.INVALID_ARGUMENT, "sampling.beam_width", "at most 3"),
    ("schema", sampling(json_schema="{"), CODES.INVALID_ARGUMENT, "sampling.json_schema", "is not JSON"),
    ("logprobs", {"output": {"logprobs": 21}}, CODES.INVALID_ARGUMENT, "output.logprobs", "at most 20"),
    ("adapter", {"adapter": "lora"}, CODES.NOT_FOUND, "adapter", "has no adapter"),
    ("media", {"media": [b"png"]}, CODES.INVALID_ARGUMENT, "media[0]", "takes none"),
]


async def test_every_bad_field_is_named(client: AsyncClient) -> None:
    for name, wrong, code, field, part in BAD_REQUESTS:
        good = {"prompt": {"tokens": {"ids": [1, 2, 3]}}, "stop": {"max_tokens": 4}}
        error = await refusal(client, pb.GenerateRequest(**(good | wrong)))
        assert error.code == code, f"{name}: {error.code} {error.message}"
        assert [v.field for v in error.field_violations] == [renamed(field, OPTIONS)], f"{name}: {error.message}"
        assert part in error.message, f"{name}: {error.message}"
        assert len(error.message) < 1000, name


async def refusal(client: AsyncClient, request: pb.GenerateRequest) -> QuireError:
    try:
        async for _ in client.raw.Generate(request, timeout=30):
            pass
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error)
    raise AssertionError(f"accepted: {str(request)[:300]}")


async def test_a_request_as_large_as_the_pool_is_served(client: AsyncClient) -> None:
    result = await client.generate(token_ids=[5] * (MAX_TOKENS - 20), max_tokens=20, temperature=0.0, ignore_eos=True)
    assert len(result.token_ids) == 20


@pytest.mark.parametrize("data", [b"\x1a\x04\x0a\x02\xff\xfe", b"\xff\xff\xff", b"\x1a\x7f\x00"])
async def test_bytes_that_are_not_a_valid_request(client: AsyncClient, running: Running, data: bytes) -> None:
    """Invalid UTF-8 in a string field, and bytes that are not a protobuf message."""
    async with grpc.aio.insecure_channel(running.gateway.address) as channel:
        call = channel.unary_stream(GENERATE)(data, timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() == CODES.INVALID_ARGUMENT
    assert "GenerateRequest" in (caught.value.details() or "")


async def test_a_message_above_the_transport_limit(client: AsyncClient) -> None:
    error = await refusal(client, pb.GenerateRequest(prompt={"text": "x" * (16 << 20)}))
    assert error.code == CODES.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip])
async def test_a_small_message_that_decodes_to_millions_of_objects_is_not_decoded(
    client: AsyncClient, running: Running, compression: grpc.Compression | None
) -> None:
    """63 KB of gzip used to cost the gateway 1.7 GB of memory and 3 s."""
    memory_before = peak_memory_mb(running.gateway)
    empty_messages = b"\x0a\x00" * (7 << 20)  # empty messages of a chat
    chat = pb.GenerateRequest(prompt={"chat": {}}).SerializeToString()
    assert chat == b"\x1a\x02\x1a\x00"
    data = field(b"\x1a", field(b"\x1a", empty_messages))
    async with grpc.aio.insecure_channel(
        running.gateway.address, options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        for _ in range(3):
            call = channel.unary_stream(GENERATE, request_serializer=None)(data, timeout=60, compression=compression)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() == CODES.INVALID_ARGUMENT
            assert "more than 60000 fields" in (caught.value.details() or "")
    assert peak_memory_mb(running.gateway) - memory_before < 250


def field(tag: bytes, content: bytes) -> bytes:
    """A length-delimited field."""
    length, size = b"", len(content)
    while size > 0x7F:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    return tag + length + bytes([size]) + content


def peak_memory_mb(service: Service) -> int:
    assert service.process is not None
    status = Path(f"/proc/{service.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) >> 10


async def test_a_request_id_in_flight_is_refused_and_can_be_reused_later(client: AsyncClient) -> None:
    options: dict[str, Any] = {"token_ids": [1], "request_id": "mine", "temperature": 0.0, "ignore_eos": True}
    one = client.generate(**options, max_tokens=600)
    other = client.generate(**options, max_tokens=600)
    results = await asyncio.gather(one, other, return_exceptions=True)
    (refused,) = [result for result in results if isinstance(result, BaseException)]
    (served,) = [result for result in results if not isinstance(result, BaseException)]
    assert isinstance(refused, AlreadyExists)
    assert "mine" in refused.message
    assert len(served.token_ids) == 600
    assert len((await client.generate(**options, max_tokens=4)).token_ids) == 4


async def test_a_full_queue_says_when_to_retry(client: AsyncClient, running: Running) -> None:
    async with await AsyncClient.connect(running.gateway.address, retry=RetryPolicy(max_attempts=1)) as impatient:
        long = [impatient.stream(token_ids=[i], max_tokens=500, temperature=0.0, ignore_eos=True) for i in range(30)]
        results = await asyncio.gather(*(stream.__aenter__() for stream in long), return_exceptions=True)
        for stream in long:
            stream.cancel()
    refused = [result for result in results if isinstance(result, BaseException)]
    assert refused, f"30 long requests were accepted with 4 rows and a queue of {MAX_WAITING}"
    assert len(refused) < 30
    for error in refused:
        assert isinstance(error, Overloaded), error
        assert str(MAX_WAITING) in error.message
        assert error.retry_after_s is not None
        assert 0 < error.retry_after_s <= 60


async def test_unknown_models_and_requests(client: AsyncClient) -> None:
    with pytest.raises(ModelNotFound, match="missing"):
        await client.model("missing")
    with pytest.raises(ModelNotFound, match="missing"):
        await client.tokenize("x", model="missing")
    with pytest.raises(InvalidRequest, match=str(VOCAB_SIZE)):
        await client.detokenize([VOCAB_SIZE])
    assert (await client.abort("missing")).unknown_ids == ("missing",)


async def test_a_chat_template_that_raises_is_the_callers_error(model_dir: Path, tmp_path: Path) -> None:
    """The checkpoint's chat template may refuse a conversation; other requests are served."""
    folder = copy_of(model_dir, tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ raise_exception('Conversations must end with a question') }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with Stack(tmp_path) as stack:
        running = Running(stack, folder)
        async with await stack.connect(running.gateway) as client:
            with pytest.raises(InvalidRequest, match="must end with a question") as caught:
                await client.chat("hi")
            assert [v.field for v in caught.value.field_violations] == ["messages"]
            await check_works(running, client)


# -- checkpoints and workers -------------------------------------------------------------------------------------------


def copy_of(model_dir: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "broken"
    folder.mkdir()
    for path in model_dir.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def drop_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, folder / "model.safetensors")


def cut_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    weights[name] = weights[name][:-1].contiguous()
    save_file(weights, folder / "model.safetensors")


# One fault of each loading stage; tests/unit/engine/test_engine_checkpoint.py has all of them.
BROKEN = {
    "missing tensor": (drop_tensor, "model.layers.1.mlp.down_proj.weight"),
    "wrong shape": (cut_tensor, "model.layers.0.self_attn.k_proj.weight"),
    "heads do not divide": (lambda f: change_config(f, num_key_value_heads=3), "num_key_value_heads"),
}


def test_a_broken_checkpoint_ends_the_worker_with_an_error(model_dir: Path, tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        workers: dict[str, Service] = {}
        for name, (harm, _) in BROKEN.items():
            (tmp_path / name).mkdir()
            folder = copy_of(model_dir, tmp_path / name)
            harm(folder)
            workers[name] = stack.start_worker(scheduler, folder)
        for name, worker in workers.items():
            assert worker.wait(60) == 2, f"{name}: {worker.log()}"
            assert BROKEN[name][1] in worker.log(), f"{name}: {worker.log()}"
            assert "Traceback" not in worker.log(), f"{name}: {worker.log()}"
        assert scheduler.is_running


async def test_workers_that_do_not_match_are_refused(client: AsyncClient, running: Running, tmp_path: Path) -> None:
    stack = running.stack
    other_weights = make_checkpoint(tmp_path / "model", seed=9)
    mine = running.worker.command[running.worker.command.index("--model") + 1]
    strangers = {
        "block_size": stack.start_worker(running.scheduler, Path(mine), *FLAGS, "--block-size", "32"),
        "max_model_len": stack.start_worker(running.scheduler, Path(mine), *FLAGS, "--max-model-len", "512"),
        "weights_digest": stack.start_worker(running.scheduler, other_weights, *FLAGS, "--model-name", "model"),
    }
    for field, worker in strangers.items():
        await wait_for_log(worker, "refuses this worker")
        assert field in worker.log(), worker.log()
        schedulers = (await client.status()).schedulers
        assert is_ready(schedulers, running.worker)
        assert not is_ready(schedulers, worker)
        worker.terminate()


async def wait_for_log(service: Service, words: str) -> None:
    deadline = asyncio.get_running_loop().time() + 60
    while words not in service.log():
        assert service.is_running, service.log()
        assert asyncio.get_running_loop().time() < deadline, service.log()
        await asyncio.sleep(0.05)


def test_an_error_of_a_bad_flag_names_the_flag(tmp_path: Path, model_dir: Path) -> None:
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        scheduler.wait_ready()
        starts = {
            "--max-waiting": stack.start_scheduler("--max-waiting", "0"),
            "block_size": stack.start_worker(scheduler, model_dir, "--block-size", "17"),
            "--scheduler": stack.start_gateway(flags=("--scheduler", "nowhere")),
        }
        for flag, service in starts.items():
            assert service.wait() == 2, service.log()
            assert flag in service.log(), service.log()
            assert "Traceback" not in service.log(), service.log()
        taken = Service("twin", scheduler.command, scheduler.address, tmp_path / "twin.log")
        taken.start()
        assert taken.wait() == 2, taken.log()
        assert scheduler.address in taken.log()
