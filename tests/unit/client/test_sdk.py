"""Both clients against a real gRPC server in this process."""

import asyncio
import subprocess
import sys
import threading
import time
import tracemalloc

import grpc
import grpc.aio
import pytest
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2
from quire_client import (
    AlreadyExists,
    AsyncClient,
    Cancelled,
    Client,
    ConnectionFailed,
    DeadlineExceeded,
    Delta,
    FinishReason,
    GenerationFailed,
    InvalidRequest,
    Message,
    Overloaded,
    RetryPolicy,
    StreamCorrupted,
    Unimplemented,
)
from quire_client.connection.channel import call_metadata
from quire_client.testing import FakeGateway, sample_events

QUICK = RetryPolicy(max_attempts=3, initial_s=0.001, max_s=0.002)


@pytest.fixture
def gateway():
    with FakeGateway({"hi": "hello"}) as gateway:
        yield gateway


@pytest.fixture
def client(gateway):
    with Client.connect(gateway.target) as client:
        yield client


class Scripted(FakeGateway):
    """Answers each Generate call with the next callable; the last one repeats."""

    def __init__(self, *plays):
        super().__init__()
        self._plays = list(plays)

    def Generate(self, request, context):
        self.requests.append(request)
        play = self._plays.pop(0) if len(self._plays) > 1 else self._plays[0]
        yield from play(context)


def answering(text):
    return lambda context: numbered([accepted(), *sample_events(0, text)])


def playing(*events):
    return lambda context: numbered(list(events))


def failing(code, message="no", metadata=()):
    def play(context):
        context.set_trailing_metadata(metadata)
        context.abort(code, message)
        yield

    return play


def accepted():
    return pb.GenerateResponse(accepted=pb.Accepted(request_id="r1", seed=7, model="fake", prompt_tokens=3))


def numbered(events):
    for event_seq, event in enumerate(events):
        event.event_seq = event_seq
        yield event


def chunk(**fields):
    return pb.GenerateResponse(chunk=pb.Chunk(**fields))


def finished(**fields):
    return pb.GenerateResponse(finished=pb.Finished(**fields))


def rich_details(code, *details, message="no"):
    status = Status(code=code.value[0], message=message)
    for detail in details:
        status.details.add().Pack(detail)
    return (("grpc-status-details-bin", status.SerializeToString()),)


def run_script(*plays, **options):
    """Generate once with the sync client against a scripted gateway; returns the result and the gateway."""
    with Scripted(*plays) as gateway, Client.connect(gateway.target, retry=QUICK) as client:
        return client.generate("hi", **options), gateway


# Successful calls


def test_generate_returns_a_typed_result(client):
    result = client.generate("hi", seed=3)
    assert (result.text, result.token_ids, result.finish_reason) == (
        "hello",
        tuple(map(ord, "hello")),
        FinishReason.EOS,
    )
    assert (result.model, result.seed, result.usage.prompt_tokens, result.usage.total_tokens) == ("fake", 3, 2, 7)


def test_stream_yields_contiguous_deltas_and_a_result(client):
    with client.stream("hi", request_id="mine") as stream:
        assert (stream.request_id, stream.model, stream.num_prompt_tokens) == ("mine", "fake", 2)
        deltas = list(stream)
        assert deltas[0] == Delta(index=0, offset=0, token_ids=(ord("h"),), text="h")
        assert [delta.offset for delta in deltas] == [0, 1, 2, 3, 4]
        assert stream.result().text == "hello"
        assert stream.finished_samples == stream.result().samples


def test_unary_calls(client):
    assert client.tokenize(messages="hi").token_ids == (104, 105)
    assert client.tokenize("hi").max_model_len == 4096
    assert client.detokenize([104, 105]) == "hi"
    assert client.count_tokens("hi", temperature=0) == client.count_tokens(messages="no", timeout_s=5) == 2
    with pytest.raises(InvalidRequest, match=r"^temperature is 3"):
        client.count_tokens("hi", temperature=3)
    assert [m.name for m in client.models()] == ["fake"]
    assert client.status().schedulers[0].prefix_index == "memory"
    assert client.abort("a").unknown_ids == ()
    assert client.health() is True
    assert client.raw.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(text="a"))).ids == [97]


def test_every_option_reaches_the_request(client, gateway):
    client.generate(
        token_ids=[104, 105], model="fake", request_id="r", temperature=0, top_p=0.5, top_k=4, min_p=0.25, top_a=0.5,
        seed=9, n=1, max_tokens=2, stop="x", stop_token_ids=[5], ignore_eos=True, include_stop_in_output=True,
        send_text=False, send_token_ids=True, skip_special_tokens=False, priority=-3, cache_salt="s",
        determinism="exact", timeout_s=5,
    )  # fmt: skip
    assert gateway.requests[-1] == pb.GenerateRequest(
        request_id="r",
        model="fake",
        prompt=pb.Prompt(tokens=types_pb2.TokenIds(ids=[104, 105])),
        sampling=types_pb2.SamplingParams(temperature=0, top_p=0.5, top_k=4, min_p=0.25, top_a=0.5, seed=9, n=1),
        stop=types_pb2.StopParams(
            max_tokens=2, stop=["x"], stop_token_ids=[5], ignore_eos=True, include_stop_in_output=True
        ),
        output=pb.OutputParams(text=False, token_ids=True, skip_special_tokens=False),
        scheduling=pb.SchedulingParams(priority=-3, cache_salt="s", determinism=types_pb2.DETERMINISM_EXACT),
        joins_events=True,
    )


def test_a_schema_that_is_not_json_is_refused(client):
    with pytest.raises(InvalidRequest, match="json_schema is not JSON"):
        client.generate("hi", json_schema={"type": object()})


def test_options_not_given_stay_unset(client, gateway):
    client.generate("hi")
    assert gateway.requests[-1] == pb.GenerateRequest(prompt=pb.Prompt(text="hi"), joins_events=True)


def test_messages_in_every_form(client, gateway):
    client.chat(
        [Message("system", "a"), {"role": "user", "content": "b"}, ("assistant", "c")],
        template_kwargs={"enable_thinking": True},
        tools=[{"name": "t"}],
        continue_final_message=True,
    )
    chat = gateway.requests[-1].prompt.chat
    assert [(m.role, m.content) for m in chat.messages] == [("system", "a"), ("user", "b"), ("assistant", "c")]
    assert (chat.template_kwargs_json, chat.tools_json) == ('{"enable_thinking": true}', '[{"name": "t"}]')
    assert chat.continue_final_message


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "token_ids": [1]}, "prompt"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "seed": 2**64}, "seed"),
        ({"prompt": "a", "determinism": "maybe"}, "determinism"),
        ({"prompt": "a", "tools": [{}]}, "tools"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"messages": [{"role": "user"}]}, "messages"),
    ],
)
def test_errors_of_invalid_arguments_name_the_field(client, gateway, arguments, field):
    with pytest.raises(InvalidRequest) as caught:
        client.generate(**arguments)
    assert caught.value.field_violations[0].field == field
    assert gateway.requests == []


def test_a_request_for_too_many_samples_costs_nothing_before_the_server_refuses_it():
    refusing = Scripted(failing(grpc.StatusCode.INVALID_ARGUMENT, "n is above 16"))
    with refusing as gateway, Client.connect(gateway.target) as client:
        tracemalloc.start()
        try:
            with pytest.raises(InvalidRequest, match="above 16"):
                client.generate("hi", n=100_000)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak_bytes < 5_000_000  # one object per sample would take 19 MB


# Cancelling


class Endless(FakeGateway):
    """Streams until the client cancels."""

    def __init__(self):
        super().__init__()
        self.left = threading.Event()

    def Generate(self, request, context):
        context.add_callback(self.left.set)
        yield accepted()
        event_seq = 0
        while context.is_active():
            event_seq += 1
            event = chunk(offset=event_seq - 1, token_ids=[1])
            event.event_seq = event_seq
            yield event
            self.left.wait(0.001)


def test_leaving_the_stream_cancels_the_request():
    with Endless() as gateway, Client.connect(gateway.target) as client:
        with client.stream("hi") as stream:
            next(stream)
        assert gateway.left.wait(5)


def test_cancel_ends_the_iteration_with_cancelled():
    with Endless() as gateway, Client.connect(gateway.target) as client, client.stream("hi") as stream:
        next(stream)
        stream.cancel()
        with pytest.raises(Cancelled) as caught:
            stream.result()
        assert caught.value.request_id == "r1"


async def test_async_cancel_is_cancelled_but_a_cancelled_task_stays_cancelled():
    with Endless() as gateway:
        async with await AsyncClient.connect(gateway.target) as client:
            async with client.stream("hi") as stream:
                await anext(stream)
                stream.cancel()
                with pytest.raises(Cancelled):
                    await stream.result()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.generate("hi"), 0.05)
            assert await asyncio.to_thread(gateway.left.wait, 5)


CALLS = {
    "generate": lambda client: client.generate("hi"),
    "tokenize": lambda client: client.tokenize("hi"),
    "count_tokens": lambda client: client.count_tokens("hi"),
    "models": lambda client: client.models(),
    "abort": lambda client: client.abort("r1"),
    "health": lambda client: client.health(),
}


@pytest.mark.parametrize("num_targets", [1, 2])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_call_on_a_closed_client_is_cancelled(gateway, call, num_targets):
    client = Client.connect([gateway.target] * num_targets)
    client.close()
    with pytest.raises(Cancelled, match="the client is closed"):
        call(client)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_every_async_call_on_a_channel_closed_elsewhere_is_cancelled(gateway, call):
    channel = grpc.aio.insecure_channel(gateway.target)
    async with AsyncClient(channel) as client:
        await channel.close()
        with pytest.raises(Cancelled, match="the client is closed"):
            await call(client)


def test_deadline():
    with Endless() as gateway, Client.connect(gateway.target) as client:
        with pytest.raises(DeadlineExceeded):
            client.generate("hi", timeout_s=0.5)  # enough to reach the gateway
        assert gateway.left.wait(20)


def test_a_stream_must_be_entered(client):
    with pytest.raises(RuntimeError, match=r"with client\.stream"):
        next(client.stream("hi"))
    with pytest.raises(RuntimeError, match=r"with client\.stream"):
        _ = client.stream("hi").request_id


# Errors


def test_bad_request_details_are_decoded():
    code = grpc.StatusCode.INVALID_ARGUMENT
    violation = {"field": "sampling.top_p", "description": "1.5 is above 1"}
    play = failing(code, "sampling.top_p is 1.5", rich_details(code, BadRequest(field_violations=[violation])))
    with pytest.raises(InvalidRequest, match=r"^top_p is 1\.5$") as caught:
        run_script(play)
    assert [(v.field, v.description) for v in caught.value.field_violations] == [("top_p", "1.5 is above 1")]
    assert caught.value.wire_message == "sampling.top_p is 1.5"
    assert caught.value.details == {"google.rpc.BadRequest": {"field_violations": [violation]}}
    assert caught.value.code is code


def test_invalid_error_details_are_ignored():
    play = failing(grpc.StatusCode.UNIMPLEMENTED, "beam_width", (("grpc-status-details-bin", b"\xff\xff\x07"),))
    with pytest.raises(Unimplemented, match="beam_width") as caught:
        run_script(play)
    assert caught.value.details == {}


def test_the_error_of_a_failed_sample_has_the_result_so_far():
    play = playing(
        accepted(),
        chunk(token_ids=[], text="par"),
        finished(reason=types_pb2.FINISH_REASON_ERROR, message="NaN", output_digest=EMPTY_DIGEST),
    )
    with pytest.raises(GenerationFailed, match="NaN") as caught:
        run_script(play)
    assert caught.value.result.text == "par"


def test_connect_without_a_gateway_fails():
    started = time.monotonic()
    with pytest.raises(ConnectionFailed, match=r"no gateway answers at localhost:1: connection refused.*quire up"):
        Client.connect("localhost:1", connect_timeout_s=0.3)
    assert time.monotonic() - started < 5


class Listening(FakeGateway):
    """Records the metadata of ListModels."""

    def ListModels(self, request, context):
        self.metadata = [tuple(pair) for pair in context.invocation_metadata()]
        return super().ListModels(request, context)


def test_target_and_key_from_environment(monkeypatch):
    with Listening() as gateway:
        monkeypatch.setenv("QUIRE_TARGET", gateway.target)
        monkeypatch.setenv("QUIRE_API_KEY", "sesame")
        with Client.connect() as client:
            client.models()
    assert ("authorization", "Bearer sesame") in gateway.metadata


@pytest.mark.parametrize("key", ["sesäme", "two\nlines"])
def test_an_invalid_api_key_is_refused(key):
    with pytest.raises(InvalidRequest, match="api_key contains a character that is not allowed in a header") as caught:
        Client.connect("localhost:1", api_key=key)
    assert caught.value.field_violations[0].field == "api_key"
    assert call_metadata(" sesame\n") == (("authorization", "Bearer sesame"),)


# Retries


def test_unavailable_before_the_first_event_is_retried():
    result, gateway = run_script(
        failing(grpc.StatusCode.UNAVAILABLE), failing(grpc.StatusCode.UNAVAILABLE), answering("ok")
    )
    assert (result.text, len(gateway.requests)) == ("ok", 3)


def test_a_call_cancelled_by_a_stopping_server_is_retried():
    result, _ = run_script(failing(grpc.StatusCode.CANCELLED, ""), answering("ok"))
    assert result.text == "ok"


def test_retries_are_limited():
    with Scripted(failing(grpc.StatusCode.UNAVAILABLE, "draining")) as gateway:
        with Client.connect(gateway.target, retry=QUICK) as client, pytest.raises(ConnectionFailed, match="draining"):
            client.generate("hi")
        assert len(gateway.requests) == 3


def test_overloaded_without_a_retry_delay_is_final():
    with Scripted(failing(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")) as gateway:
        with Client.connect(gateway.target, retry=QUICK) as client, pytest.raises(Overloaded, match="full"):
            client.generate("hi")
        assert len(gateway.requests) == 1


def retry_info(milliseconds):
    info = RetryInfo()
    info.retry_delay.FromMilliseconds(milliseconds)
    return rich_details(grpc.StatusCode.RESOURCE_EXHAUSTED, info)


@pytest.mark.parametrize("metadata", [retry_info(20), (("grpc-retry-pushback-ms", "20"),)])
def test_overloaded_is_retried_after_the_retry_delay(metadata):
    started = time.monotonic()
    result, _ = run_script(failing(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", metadata), answering("ok"))
    assert result.text == "ok"
    assert time.monotonic() - started >= 0.02


def test_no_retry_past_the_deadline():
    started = time.monotonic()
    with pytest.raises(Overloaded) as caught:
        run_script(failing(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_info(60_000)), timeout_s=30)
    assert caught.value.retry_after_s == 60
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("code", "kind"),
    [(grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest), (grpc.StatusCode.ALREADY_EXISTS, AlreadyExists)],
)
def test_other_codes_are_final(code, kind):
    with pytest.raises(kind):
        run_script(failing(code), answering("never"))


def test_without_resume_a_break_after_the_first_event_is_final():
    def play(context):
        yield accepted()
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    with pytest.raises(ConnectionFailed, match="gone"):
        run_script(play, answering("never"), resume=False)


# Corrupted streams

EMPTY_DIGEST = 0x2D06800538D394C2  # xxh3_64 of no bytes


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        ([accepted(), finished(output_digest=1)], "digest"),
        ([accepted(), chunk(offset=1, token_ids=[1])], "position 1, expected 0"),
        ([accepted(), chunk(text="é"), chunk(text="x", text_offset=1)], "byte 1, expected 2"),
        ([accepted(), accepted()], "Accepted must be the first event"),
        ([chunk(token_ids=[1])], "Accepted must be the first event"),
        ([accepted(), chunk(index=1)], "sample 1, but n of the request is 1"),
        ([accepted(), finished(output_digest=EMPTY_DIGEST), chunk(token_ids=[1])], "after its Finished"),
        ([accepted()], "0 of 1 samples finished"),
        ([], "before the request was accepted"),
    ],
)
def test_corrupted_streams_are_detected(events, complaint):
    with pytest.raises(StreamCorrupted, match=complaint):
        run_script(playing(*events), resume=False)


def test_a_gap_in_the_events_is_detected():
    def play(context):
        yield accepted()
        yield pb.GenerateResponse(event_seq=2, chunk=pb.Chunk(token_ids=[1]))

    with pytest.raises(StreamCorrupted, match="received event 2, expected event 1"):
        run_script(play)


def test_without_token_ids_the_digest_is_not_checked():
    play = playing(accepted(), chunk(text="only text"), finished(reason=types_pb2.FINISH_REASON_EOS, output_digest=5))
    result, _ = run_script(play, send_token_ids=False, resume=False)
    assert (result.text, result.token_ids) == ("only text", ())


# Importing


def test_import_loads_nothing_heavy():
    code = (
        "import sys, quire_client\n"
        "heavy = {'torch', 'numpy', 'transformers', 'tokenizers', 'redis', 'xxhash', 'google.rpc'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
