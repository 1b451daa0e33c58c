"""Conveniences of the SDK: token ids, lazy connections, defaults, metadata, partial output, logs, plain results."""

import asyncio
import dataclasses
import json
import pickle

import grpc
import pytest
import quire_client
from quire_client import (
    AsyncClient,
    Client,
    ConnectionFailed,
    Delta,
    FieldViolation,
    FinishReason,
    GenerationFailed,
    InternalError,
    InvalidRequest,
    Overloaded,
    QuireError,
    RetryPolicy,
    Sample,
)
from quire_client.testing import FakeGateway

ONCE = RetryPolicy(max_attempts=1)


@pytest.fixture
def gateway():
    with FakeGateway({"hi": "hello"}) as gateway:
        yield gateway


@pytest.fixture
def client(gateway):
    with Client(gateway.target) as client:
        yield client


def test_a_list_of_token_ids_is_a_prompt(client, gateway):
    for prompt in ([104, 105], (104, 105), iter([104, 105])):
        assert client.generate(prompt).text == "hello"
    assert list(gateway.requests[-1].prompt.tokens.ids) == [104, 105]


@pytest.mark.parametrize("prompt", [["hi"], 7, [{"role": "user", "content": "hi"}], [True]])
def test_other_prompts_are_refused(client, prompt):
    with pytest.raises(InvalidRequest, match="prompt must be a str, a list of token ids, PromptEmbeddings or Audio"):
        client.generate(prompt)


def test_a_client_from_an_address_connects_at_the_first_call(monkeypatch):
    lazy = Client("localhost:1", retry=ONCE)  # nothing listens there
    with lazy, pytest.raises(ConnectionFailed, match="connection refused: nothing listens there"):
        lazy.generate("hi")
    with FakeGateway({"hi": "hello"}) as gateway:
        monkeypatch.setenv("QUIRE_TARGET", gateway.target)
        with Client() as client:
            assert client.chat("hi").text == "hello"
    with pytest.raises(InvalidRequest, match="is a URL"):
        Client("http://localhost:50051")


def test_an_asyncio_client_is_created_outside_of_a_loop(gateway):
    client = AsyncClient(gateway.target)

    async def use():
        async with client:
            return (await client.chat("hi")).text

    assert asyncio.run(use()) == "hello"


def test_a_second_event_loop_is_named(gateway):
    client = AsyncClient(gateway.target)

    async def use():
        return (await client.chat("hi")).text

    async def use_and_close():
        async with client:
            await use()

    runner = asyncio.Runner()
    assert runner.run(use()) == "hello"
    with pytest.raises(RuntimeError, match=r"second event loop.*create one client per event loop"):
        asyncio.run(use())
    runner.run(client.close())
    runner.close()


def test_events_are_typed(client):
    with client.stream("hi", n=2) as stream:
        events = list(stream.events())
    deltas = [event for event in events if isinstance(event, Delta)]
    samples = [event for event in events if isinstance(event, Sample)]
    assert "".join(delta.text for delta in deltas if delta.index == 1) == "hello"
    assert [(sample.index, sample.finish_reason, sample.usage.output_tokens) for sample in samples] == [
        (0, FinishReason.EOS, 5),
        (1, FinishReason.EOS, 5),
    ]
    assert events.index(samples[0]) < len(events) - 1  # delivered when it ends
    assert stream.result().samples == tuple(samples)


class Breaking(FakeGateway):
    """Fails after two tokens of a request."""

    def events(self, request):
        for number, event in enumerate(super().events(request)):
            if number == 3:
                raise RuntimeError
            yield event

    def Generate(self, request, context):
        try:
            yield from super().Generate(request, context)
        except RuntimeError:
            context.abort(grpc.StatusCode.INTERNAL, "out of luck")


def test_an_error_has_the_partial_output():
    with (
        Breaking({"hi": "hello"}) as gateway,
        Client(gateway.target) as client,
        pytest.raises(InternalError, match="out of luck") as caught,
    ):
        client.generate("hi")
    (partial,) = caught.value.partial
    assert (partial.index, partial.text, partial.token_ids, partial.is_finished) == (0, "he", (104, 101), False)


class Recording(FakeGateway):
    """Records the metadata of every call."""

    seen = ()

    def Generate(self, request, context):
        self.seen = dict(context.invocation_metadata())
        return super().Generate(request, context)

    def ListModels(self, request, context):
        self.seen = dict(context.invocation_metadata())
        return super().ListModels(request, context)


def test_metadata_of_calls():
    with Recording() as gateway, Client(gateway.target, api_key="key") as client:
        client.generate("hi", metadata={"X-Team": "search"})
        assert (gateway.seen["x-team"], gateway.seen["authorization"]) == ("search", "Bearer key")
        client.generate("hi")
        assert "x-team" not in gateway.seen
        team = client.with_options(metadata={"x-team": "all", "authorization": "Bearer other"})
        team.models()
        assert (gateway.seen["x-team"], gateway.seen["authorization"]) == ("all", "Bearer other")
        for wrong in ({"a b": "c"}, {"grpc-timeout": "1"}, {"a": "\n"}, {"a": 1}, {"a-bin": "b"}):
            with pytest.raises(InvalidRequest, match="metadata"):
                client.generate("hi", metadata=wrong)


def test_with_options(client, gateway):
    greedy = client.with_options(temperature=0, max_tokens=2, model="fake")
    assert greedy.generate("hi").text == "he"
    assert greedy.generate("hi", max_tokens=3).text == "hel"
    request = gateway.requests[-1]
    assert (request.model, request.sampling.temperature, request.stop.max_tokens) == ("fake", 0, 3)
    assert client.generate("hi").text == "hello"
    assert greedy.model().name == "fake"
    assert greedy.with_options(max_tokens=1).generate("hi").text == "h"
    with pytest.raises(TypeError, match="unknown option temprature"):
        client.with_options(temprature=1)


def test_results_become_json(client):
    result = client.generate("hi", stop="l")
    fields = json.loads(json.dumps(result.to_dict()))
    assert fields["samples"][0]["finish_reason"] == "stop"
    assert fields["samples"][0]["token_ids"] == [104, 101, 108]
    assert fields["samples"][0]["usage"]["output_tokens"] == 3
    assert json.dumps([model.to_dict() for model in client.models()])
    assert json.dumps(client.status().to_dict())
    assert dataclasses.is_dataclass(result)


def test_errors_can_be_pickled(client):
    full = Overloaded(
        "full", request_id="r", details={"a": b"b"}, field_violations=(FieldViolation("f", "d"),), retry_after_s=2.0
    )
    failed = GenerationFailed("bad", result=client.generate("hi"))
    for error in (full, failed, QuireError("x", code=grpc.StatusCode.ABORTED)):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert (copy.args, copy.__dict__) == (error.args, error.__dict__)
        assert str(copy) == str(error)


def test_names_are_imported_on_demand():
    assert quire_client.types.Delta is quire_client.Delta
    assert set(quire_client.__all__) <= set(dir(quire_client))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        quire_client.Nothing  # noqa: B018


# The fake gateway
