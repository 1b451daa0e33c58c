"""Streams that break and are resumed: any break at any event gives the same result as no break."""

import asyncio
import contextlib
import random
import re
import socket
import struct
import threading
import time
from pathlib import Path

import grpc
import pytest
from google.protobuf import json_format
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2
from quire_client import (
    AsyncClient,
    Cancelled,
    Client,
    ConnectionFailed,
    DeadlineExceeded,
    FinishReason,
    InvalidRequest,
    RetryPolicy,
    StreamCorrupted,
    StreamEndedEarly,
)
from quire_client.assembly import StreamAssembler, load_digest
from quire_client.connection.channel import AVOID_FROZEN_S, AVOID_S, TargetRing, resolve_targets
from quire_client.errors import InternalError, Overloaded
from quire_client.testing import FakeGateway

QUICK = RetryPolicy(max_attempts=3, initial_s=0.001, max_s=0.002)
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE

# A gateway whose samples differ, with several tokens per chunk and text that lags behind the tokens


def ids_of(seed, index):
    """Output ids of a sample: two bytes of UTF-8 per character, so that a token may be half a character."""
    rng = random.Random(f"{seed}/{index}")
    return list("".join(rng.choice("aäoöuübc") for _ in range(rng.randint(1, 24))).encode())


class ByteGateway(FakeGateway):
    """One token is one byte of UTF-8. `breaks`: (number of events, function that breaks it) per Generate call."""

    def __init__(self, *, stop="", max_chunk=3, breaks=()):
        super().__init__()
        self.breaks = list(breaks)
        self._stop = stop
        self._max_chunk = max_chunk

    def Generate(self, request, context):
        num_events, how = self.breaks.pop(0) if self.breaks else (None, None)
        events = super().Generate(request, context)
        for sent, event in enumerate(events):
            if sent == num_events:
                how(context)
                return
            yield event
        if how is not None:
            how(context)

    def events(self, request):
        seed = request.sampling.seed or 7
        yield pb.GenerateResponse(
            accepted=pb.Accepted(
                request_id=request.request_id or "r1", seed=seed, model="fake", prompt_tokens=3, revision="abc"
            )
        )
        samples = {s.index: s for s in request.continuation.samples}
        streams = [
            self.sample(request, seed, index, samples.get(index, types_pb2.SampleState()))
            for index in range(max(1, request.sampling.n))
            if not samples.get(index, types_pb2.SampleState()).finished
        ]
        while streams:  # interleaved, like a batch
            for stream in list(streams):
                event = next(stream, None)
                if event is None:
                    streams.remove(stream)
                else:
                    yield event

    def sample(self, request, seed, index, state):
        ids, reason, matched = self.whole(request, seed, index)
        position = len(state.output_token_ids)
        assert list(state.output_token_ids) == ids[:position], "the continuation differs from the tokens sent"
        while position < len(ids):
            end = min(len(ids), position + self._max_chunk)
            text_from, text_to = self.shown(ids[:position]), self.shown(ids[:end])
            if end == len(ids):
                text_to = bytes(ids).decode(errors="replace").removesuffix(matched)
            yield self.chunk(index, position, ids[position:end], text_from, text_to)
            position = end
        held = bytes(ids).decode(errors="replace").removesuffix(matched)
        if len(state.output_token_ids) == len(ids) and held != self.shown(ids):
            yield self.chunk(index, position, [], self.shown(ids), held)  # repeated text: the client drops it
        yield pb.GenerateResponse(
            finished=pb.Finished(
                index=index,
                reason=reason,
                stop=matched or None,
                usage=types_pb2.Usage(prompt_tokens=3, output_tokens=len(ids) - len(state.output_token_ids)),
                output_digest=load_digest()(struct.pack(f"<{len(ids)}I", *ids)),
            )
        )

    def whole(self, request, seed, index):
        """All ids of a sample and why it ends."""
        ids = ids_of(seed, index)
        if self._stop and self._stop.encode() in bytes(ids):
            end = bytes(ids).index(self._stop.encode()) + len(self._stop.encode())
            return ids[:end], types_pb2.FINISH_REASON_STOP, self._stop
        if request.stop.max_tokens and len(ids) > request.stop.max_tokens:
            return ids[: request.stop.max_tokens], types_pb2.FINISH_REASON_LENGTH, ""
        return ids, types_pb2.FINISH_REASON_EOS, ""

    def shown(self, ids):
        """Text released after these ids: whole characters, without a possible start of a stop string."""
        text = bytes(ids).decode(errors="ignore")
        held = max((n for n in range(len(self._stop)) if text.endswith(self._stop[:n])), default=0)
        return text[: len(text) - held]

    @staticmethod
    def chunk(index, offset, ids, text_from, text_to):
        text = text_to[len(text_from) :]
        chunk = pb.Chunk(index=index, offset=offset, token_ids=ids, text=text, text_offset=len(text_from.encode()))
        return pb.GenerateResponse(chunk=chunk)


class JoiningGateway(ByteGateway):
    """Sends three events per message. An error that follows them in the stream arrives after these messages."""

    def Generate(self, request, context):
        assert request.joins_events
        message = None
        for event in super().Generate(request, context):
            if message is None:
                message = event
            else:
                message.following.append(event)
            if len(message.following) == 2:
                yield message
                message = None
        if message is not None:
            yield message


def ending(code, message):
    def how(context):
        context.abort(code, message)

    return how


def end_of_stream(context):
    return None


BREAKS = {
    "unavailable": ending(UNAVAILABLE, "Socket closed"),
    "rst": ending(grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2"),
    "reset": ending(grpc.StatusCode.INTERNAL, "recvmsg:Connection reset by peer"),
    "core": ending(grpc.StatusCode.INTERNAL, "Internal error from Core"),
    "unknown": ending(grpc.StatusCode.UNKNOWN, "Stream removed"),
    "no words": ending(grpc.StatusCode.UNKNOWN, ""),
    "stopped server": ending(grpc.StatusCode.CANCELLED, ""),
    "end": end_of_stream,
}


@contextlib.contextmanager
def gateways(count=2, kind=ByteGateway, **options):
    """Several gateways and a client of all of them."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(kind(**options)) for _ in range(count)]
        targets = [server.target for server in servers]
        client = stack.enter_context(Client.connect(targets, retry=QUICK, resume_timeout_s=5))
        yield servers, client


def play(servers, client, breaks, **options):
    """Run one request with these breaks, in the order of calls. Checks the deltas against the result."""
    plan = list(breaks)
    lock = threading.Lock()

    class Shared(list):
        """The same plan for all gateways."""

        def __bool__(self):
            return bool(plan)

        def pop(self, index):
            with lock:
                return plan.pop(index)

    for server in servers:
        server.breaks = Shared()
        server.requests.clear()
    texts, ids = {}, {}
    with client.stream("hi", **options) as stream:
        for delta in stream:
            assert delta.offset == len(ids.get(delta.index, [])) or not delta.token_ids
            ids.setdefault(delta.index, []).extend(delta.token_ids)
            texts[delta.index] = texts.get(delta.index, "") + delta.text
        result = stream.result()
        assert stream.resumes == result.resumes
    for sample in result.samples:
        assert (texts.get(sample.index, ""), tuple(ids.get(sample.index, ()))) == (sample.text, sample.token_ids)
    return result


def essence(result):
    return [(s.index, s.token_ids, s.text, s.finish_reason, s.matched, s.usage) for s in result.samples]


@pytest.mark.parametrize("how", BREAKS)
def test_every_kind_of_break_at_every_event(how):
    with gateways() as (servers, client):
        unbroken = play(servers, client, [], seed=5)
        assert unbroken.resumes == 0
        for position in range(1, 12):
            result = play(servers, client, [(position, BREAKS[how])], seed=5)
            assert essence(result) == essence(unbroken)


@pytest.mark.parametrize("how", ["unavailable", "end"])
def test_breaks_between_joined_events_change_nothing(how):
    with gateways(kind=JoiningGateway) as (servers, client):
        unbroken = play(servers, client, [], seed=5, n=2)
        for position in range(1, 16):
            result = play(servers, client, [(position, BREAKS[how])], seed=5, n=2)
            assert essence(result) == essence(unbroken), position


@pytest.mark.parametrize(
    ("setup", "options"),
    [
        ({}, {"n": 3}),
        ({"stop": "öu"}, {"n": 3}),
        ({"stop": "aaa", "max_chunk": 1}, {"n": 2}),
        ({}, {"n": 3, "max_tokens": 7}),
    ],
)
def test_random_breaks_change_nothing(setup, options):
    rng = random.Random(str((setup, options)))
    with gateways(count=3, **setup) as (servers, client):
        for seed in range(1, 9):
            unbroken = play(servers, client, [], seed=seed, **options)
            breaks = [(rng.randint(1, 12), rng.choice(list(BREAKS.values()))) for _ in range(rng.randint(1, 5))]
            result = play(servers, client, breaks, seed=seed, **options)
            assert essence(result) == essence(unbroken), f"seed {seed}, breaks {breaks}"


def test_the_continuation_has_all_tokens_so_far():
    with gateways() as (servers, client):
        play(servers, client, [(4, BREAKS["unavailable"])], n=2, temperature=0.5, max_tokens=20)
        first, second = (server.requests[0] for server in sorted(servers, key=lambda s: s.requests[0].request_id))
    assert not first.HasField("continuation")
    assert second.continuation.revision == "abc"
    assert (second.request_id, second.model, second.sampling.seed) == ("r1", "fake", 7)
    assert (second.prompt, second.stop, second.sampling.n) == (first.prompt, first.stop, 2)
    assert [(s.index, list(s.output_token_ids), s.finished) for s in second.continuation.samples] == [
        (0, ids_of(7, 0)[:6], False),
        (1, ids_of(7, 1)[:3], False),
    ]


def test_finished_samples_are_not_requested_again():
    with gateways(max_chunk=100) as (servers, client):
        result = play(servers, client, [(4, BREAKS["unavailable"])], n=2)
        resumed = next(s.requests[0] for s in servers if s.requests[0].HasField("continuation"))
    assert [sample.finished for sample in resumed.continuation.samples] == [True, False]
    assert [sample.finish_reason for sample in result.samples] == [FinishReason.EOS, FinishReason.EOS]


@pytest.mark.parametrize("how", ["unavailable", "no words", "end"])
def test_a_break_after_the_last_event_is_ignored(how):
    with gateways(max_chunk=100) as (servers, client):
        assert play(servers, client, [(3, BREAKS[how])]).resumes == 0


def test_token_ids_stay_hidden_if_not_requested():
    with gateways() as (servers, client):
        unbroken = play(servers, client, [], send_token_ids=False)
        result = play(servers, client, [(4, BREAKS["rst"])], send_token_ids=False)
        assert servers[0].requests[0].output.token_ids
        assert (result.resumes, result.text, result.token_ids) == (1, unbroken.text, ())
        assert result.usage.output_tokens == len(ids_of(7, 0))
        client.generate("hi", send_token_ids=False, resume=False)
        assert any(not r.output.token_ids for server in servers for r in server.requests)


async def test_async_client_resumes():
    with ByteGateway() as one, ByteGateway() as two:
        async with await AsyncClient.connect(f"{one.target}, {two.target}") as client:
            unbroken = await client.generate("hi", n=3)
            for position in range(1, 14):
                one.breaks = [(position, BREAKS["unavailable"])]
                two.breaks = [(position, BREAKS["end"])]
                result = await client.generate("hi", n=3)
                assert essence(result) == essence(unbroken)
                assert result.resumes >= 1 or position > 13


# Breaks that are not resumed


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        (ending(grpc.StatusCode.INTERNAL, "internal error in Generate: KeyError"), InternalError),
        (ending(grpc.StatusCode.INVALID_ARGUMENT, "no"), InvalidRequest),
        (ending(grpc.StatusCode.CANCELLED, "by the operator"), Cancelled),
        (ending(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"), Overloaded),
    ],
)
def test_errors_of_the_server_are_final(how, kind):
    with gateways() as (servers, client), pytest.raises(kind):
        play(servers, client, [(1, how)] * 1000, resume_timeout_s=0.2)


def test_resume_can_be_disabled():
    with gateways() as (servers, client):
        with pytest.raises(ConnectionFailed):
            play(servers, client, [(3, BREAKS["unavailable"])], resume=False)
        with pytest.raises(StreamEndedEarly, match="0 of 1 samples finished"):
            play(servers, client, [(3, BREAKS["end"])], resume=False)


def test_resuming_ends_with_its_timeout_and_with_the_deadline():
    always = [(1, BREAKS["unavailable"])] * 1000
    with gateways() as (servers, client):
        started = time.monotonic()
        with pytest.raises(ConnectionFailed, match=r"could not be resumed within 0\.3 s"):
            play(servers, client, always, resume_timeout_s=0.3)
        with pytest.raises((ConnectionFailed, DeadlineExceeded)):
            play(servers, client, always, timeout_s=0.3)
        assert time.monotonic() - started < 20


@pytest.mark.parametrize("code", [grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.NOT_FOUND, UNAVAILABLE])
def test_a_refused_continuation_is_retried(code):
    refused = (0, ending(code, "not yet"))
    with gateways() as (servers, client):
        result = play(servers, client, [(3, BREAKS["unavailable"]), refused, refused])
        assert (result.resumes, list(result.token_ids)) == (1, ids_of(7, 0))


def test_cancel_ends_the_resuming():
    always = [(1, BREAKS["unavailable"])] * 1000
    with (
        ByteGateway(breaks=always) as gateway,
        Client.connect(gateway.target, retry=QUICK) as client,
        client.stream("hi") as stream,
    ):
        canceller = threading.Timer(0.1, stream.cancel)
        canceller.start()
        with pytest.raises(Cancelled):
            stream.result()
        canceller.join()


# Wrong continuations


class Wrong(ByteGateway):
    """Changes the events of continuations."""

    def __init__(self, change, **options):
        super().__init__(**options)
        self._change = change

    def events(self, request):
        for event in super().events(request):
            if request.HasField("continuation"):
                self._change(event)
            yield event


def shift_offset(event):
    if event.HasField("chunk"):
        event.chunk.offset -= 1


def shift_text(event):
    if event.HasField("chunk"):
        event.chunk.text_offset += 1


def change_seed(event):
    if event.HasField("accepted"):
        event.accepted.seed += 1


def change_prompt(event):
    if event.HasField("accepted"):
        event.accepted.prompt_tokens += 1


def change_id(event):
    if event.HasField("chunk") and event.chunk.token_ids:
        event.chunk.token_ids[0] ^= 1


def repeat_other_text(event):
    if event.HasField("chunk"):
        event.chunk.text_offset = 0
        event.chunk.text = "zzzzzzzz"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (shift_offset, "position 5, expected 6"),
        (shift_text, "expected"),
        (change_seed, "seed was 7"),
        (change_prompt, "prompt_tokens was 3"),
        (change_id, "digest"),
        (repeat_other_text, "changed after the stream broke"),
    ],
)
def test_a_wrong_continuation_is_detected(change, complaint):
    def once(event, done=[]):  # noqa: B006
        if event.HasField("accepted") or not done:
            change(event)
        if event.HasField("chunk"):
            done.append(1)

    with (
        Wrong(once, breaks=[(3, BREAKS["unavailable"])]) as gateway,
        Client.connect(gateway.target, retry=QUICK) as client,
        pytest.raises(StreamCorrupted, match=complaint),
    ):
        client.generate("hi")


# Real connections that break or freeze


class Proxy:
    """A TCP proxy in front of a gateway. The connection can be cut and frozen."""

    def __init__(self, target):
        self._address = ("localhost", int(target.rpartition(":")[2]))
        self._sockets = []
        self.frozen = threading.Event()
        self._going = threading.Event()
        self._going.set()
        self._listener = socket.create_server(("localhost", 0))
        self.target = f"localhost:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def freeze(self):
        self._going.clear()

    def thaw(self):
        self._going.set()

    def cut(self):
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.thaw()
        self.cut()
        for thread in self._threads:
            thread.join(5)
        for each in self._sockets:
            each.close()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._address)
            self._sockets += [near, far]
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=self._pump, args=(source, sink))
                self._threads.append(thread)
                thread.start()

    def _pump(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._going.wait()
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class Slow(ByteGateway):
    """Waits for `go` after each event."""

    def __init__(self):
        super().__init__(max_chunk=1)
        self.go = threading.Semaphore(0)
        self.left = threading.Event()

    def Generate(self, request, context):
        context.add_callback(self.left.set)
        for event in super().Generate(request, context):
            yield event
            while not self.go.acquire(timeout=0.01):
                if not context.is_active():
                    return


@contextlib.contextmanager
def slow_and_spare():
    """A slow gateway behind a proxy, and a healthy gateway."""
    with Slow() as slow, ByteGateway() as spare:
        proxy = Proxy(slow.target)
        try:
            yield slow, proxy, spare
        finally:
            slow.go.release(1000)
            proxy.close()


def test_a_stream_leaves_a_frozen_gateway(monkeypatch):
    monkeypatch.setattr("quire_client.sync.transport.PROBE_TIMEOUT_S", 1.0)
    with (
        slow_and_spare() as (slow, proxy, spare),
        Client.connect([proxy.target, spare.target], stall_timeout_s=0.1) as client,
    ):
        slow.go.release(4)
        with client.stream("hi") as stream:
            deltas = [next(stream) for _ in range(3)]
            proxy.freeze()
            deltas += list(stream)
            assert stream.resumes == 1
        assert [id_ for delta in deltas for id_ in delta.token_ids] == ids_of(7, 0)
        assert client.generate("hi").resumes == 0  # the frozen gateway is avoided
        assert not slow.left.is_set()
        proxy.thaw()
        assert slow.left.wait(5)  # its stream is cancelled


def test_a_stream_waits_for_a_slow_gateway():
    with Slow() as slow, Client.connect(slow.target, stall_timeout_s=0.05) as client:
        slow.go.release(2)
        with client.stream("hi") as stream:
            next(stream)
            releaser = threading.Timer(0.5, slow.go.release, [1000])
            releaser.start()
            assert list(stream.result().token_ids) == ids_of(7, 0)
            assert stream.resumes == 0
            releaser.join()


def test_a_stream_waits_for_the_only_gateway_even_if_it_is_frozen(monkeypatch):
    monkeypatch.setattr("quire_client.sync.transport.PROBE_TIMEOUT_S", 0.1)
    with (
        slow_and_spare() as (slow, proxy, _),
        Client.connect(proxy.target, stall_timeout_s=0.05) as client,
        client.stream("hi") as stream,
    ):
        proxy.freeze()
        slow.go.release(1000)
        thawer = threading.Timer(0.5, proxy.thaw)
        thawer.start()
        assert list(stream.result().token_ids) == ids_of(7, 0)
        assert stream.resumes == 0
        thawer.join()


# docs/resume-protocol.md

DOC = Path(__file__).parents[3] / "docs" / "resume-protocol.md"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", DOC.read_text(), re.DOTALL)


@pytest.mark.parametrize("n", [1, 3])
def test_the_documented_client_resumes(n):
    scope = {}
    exec(blocks("python")[0], scope)
    rng = random.Random(n)
    with ByteGateway() as one, ByteGateway() as two:
        for gateway in (one, two):
            gateway.breaks = [(rng.randint(2, 8), BREAKS[how]) for how in ("unavailable", "rst", "end", "no words")]
        request = pb.GenerateRequest(prompt=pb.Prompt(text="hi"), sampling=types_pb2.SamplingParams(n=n))
        ids, texts = {}, {}
        for index, new_ids, text in scope["generate"]([one.target, two.target], request):
            ids.setdefault(index, []).extend(new_ids)
            texts[index] = texts.get(index, "") + text
        assert one.requests[1:]
        assert two.requests
    assert ids == {index: ids_of(7, index) for index in range(n)}
    assert texts == {index: bytes(ids_of(7, index)).decode(errors="replace") for index in range(n)}


def test_the_documented_events_are_consistent():
    before, first, after, second = [
        [json_format.Parse(line, kind()) for line in block.splitlines()]
        for block, kind in zip(blocks("json"), [pb.GenerateRequest, pb.GenerateResponse] * 2, strict=True)
    ]
    assembler = StreamAssembler(before[0], can_resume=True)
    assert assembler.next_request() == before[0]
    for event in first:
        assembler.feed(event)
    assert assembler.next_request() == after[0]
    for event in second:
        assembler.feed(event)
    assert assembler.result().text == "Return the number of items in a contain"


# Before the first event, and unary calls


def test_one_reachable_gateway_is_enough():
    with FakeGateway({"hi": "hello"}) as gateway, Client.connect(["localhost:1", gateway.target]) as client:
        for _ in range(4):
            assert client.generate("hi").text == "hello"
            assert client.models()[0].name == "fake"
        assert client.abort("a").aborted_ids == ("a",)


def test_no_gateway_is_reachable():
    with pytest.raises(ConnectionFailed, match="no gateway answers at localhost:1, localhost:2: "):
        Client.connect("localhost:1,localhost:2", connect_timeout_s=0.2)


def test_requests_are_spread_over_gateways():
    with gateways(count=3) as (servers, client):
        for _ in range(6):
            client.generate("hi")
        assert [len(server.requests) for server in servers] == [2, 2, 2]


def test_a_retry_takes_over_a_request_id_that_was_sent_before():
    lost, taken = (0, BREAKS["unavailable"]), (0, ending(grpc.StatusCode.ALREADY_EXISTS, "in flight"))
    with gateways() as (servers, client):
        assert list(play(servers, client, [lost, taken], request_id="mine", seed=7).token_ids) == ids_of(7, 0)
        sent = [request for server in servers for request in server.requests]
    assert sorted(request.HasField("continuation") for request in sent) == [False, True, True]
    assert {request.request_id for request in sent} == {"mine"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a:1", ("a:1",)),
        ("a:1, b:2,,a:1", ("a:1", "b:2")),
        (["a:1", "b:2,c:3"], ("a:1", "b:2", "c:3")),
        ("ipv4:1.2.3.4:5,6.7.8.9:5", ("ipv4:1.2.3.4:5,6.7.8.9:5",)),
        (None, ("x:1", "y:2")),
        ("", ("localhost:50051",)),
    ],
)
def test_targets(given, expected, monkeypatch):
    monkeypatch.setenv("QUIRE_TARGET", "x:1,y:2")
    assert resolve_targets(given) == expected


def test_no_target():
    with pytest.raises(InvalidRequest, match="names no gateway"):
        resolve_targets([])


@pytest.mark.parametrize("option", [{"stall_timeout_s": 0}, {"resume_timeout_s": -1}])
def test_invalid_resume_options_are_refused(option):
    with (
        FakeGateway() as gateway,
        Client.connect(gateway.target) as client,
        pytest.raises(InvalidRequest, match=next(iter(option))),
    ):
        client.generate("hi", **option)


# The decisions, without I/O


def test_ring_avoids_failed_gateways():
    ring = TargetRing(3)
    assert [ring.next(0.0) for _ in range(4)] == [0, 1, 2, 0]
    ring.failed(1, 0.0)
    assert [ring.next(0.1) for _ in range(3)] == [2, 0, 2]
    ring.failed(2, 0.2, is_frozen=True)
    ring.failed(0, 0.2)
    assert not ring.has_working(0.3)
    assert ring.next(0.3) == 1  # the avoid time of gateway 1 ends first
    assert ring.next(0.2 + AVOID_S) == 0
    assert ring.frozen() == [2]
    assert {ring.next(3.0) for _ in range(4)} == {0, 1}
    ring.works(2, 3.0)
    assert 2 in {ring.next(3.0) for _ in range(3)}
    ring.failed(2, 4.0, is_frozen=True)
    ring.failed(2, 4.0)  # a frozen gateway stays avoided when its connection breaks
    assert 2 not in {ring.next(4.0 + AVOID_FROZEN_S / 2) for _ in range(4)}


async def test_a_cancelled_task_stops_resuming():
    always = [(1, BREAKS["unavailable"])] * 1000
    with ByteGateway(breaks=always) as gateway:
        async with await AsyncClient.connect(gateway.target, retry=QUICK) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.generate("hi"), 0.2)
