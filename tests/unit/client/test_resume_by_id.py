"""`resume`: a client that has only the id of a request continues it, and its stream may break too."""

import contextlib

import grpc
import pytest
from quire.v1 import inference_pb2 as pb
from quire_client import Client, InvalidRequest, NotConfigured, RequestNotFound
from quire_client.testing import FakeGateway

from tests.unit.client.test_resume import BREAKS, QUICK, ByteGateway

N = 3


class RecordingGateway(ByteGateway):
    """Knows one request with N samples and seed 7. `breaks` apply to Resume."""

    def Resume(self, request, context):
        original = pb.GenerateRequest(request_id=request.request_id, sampling={"n": N, "seed": 7})
        for position in request.after:
            ids = self.whole(original, 7, position.index)[0][: position.num_tokens]
            original.continuation.samples.add(index=position.index, output_token_ids=ids)
        for event in ByteGateway.Generate(self, original, context):
            if event.HasField("accepted"):
                event.accepted.n = N
            yield event


@contextlib.contextmanager
def gateways(breaks=()):
    with (
        RecordingGateway(breaks=breaks) as one,
        RecordingGateway(breaks=breaks) as two,
        Client.connect([one.target, two.target], retry=QUICK, resume_timeout_s=5) as client,
    ):
        yield one, client


def whole(client):
    with client.resume("r1") as stream:
        return stream.result()


@pytest.mark.parametrize("how", BREAKS)
def test_a_resumed_stream_that_breaks_continues(how):
    with gateways() as (_, client):
        expected = whole(client)
        assert len(expected.samples) == N
    for position in range(1, 14):
        with gateways([(position, BREAKS[how])]) as (_, client):
            result = whole(client)
            assert [(s.token_ids, s.text, s.finish_reason) for s in result.samples] == [
                (s.token_ids, s.text, s.finish_reason) for s in expected.samples
            ]
            assert [s.usage.output_tokens for s in result.samples] == [len(s.token_ids) for s in expected.samples]
            assert result.resumes >= 1


def test_the_output_begins_after_the_given_positions():
    with gateways() as (_, client):
        expected = whole(client)
        for after in ({0: 1}, {0: 2, 2: 3}, {i: len(s.token_ids) for i, s in enumerate(expected.samples)}):
            with client.resume("r1", after=after) as stream:
                deltas = list(stream)
                result = stream.result()
            for index, sample in enumerate(result.samples):
                start = after.get(index, 0)
                assert sample.token_ids == expected.samples[index].token_ids[start:]
                assert expected.samples[index].text.endswith(sample.text)
                offsets = [delta.offset for delta in deltas if delta.index == index and delta.token_ids]
                assert not offsets or offsets[0] == start


def test_wrong_positions_are_refused_before_the_call():
    with gateways() as (_, client):
        for after in (-1, {0: -1}, {-1: 0}):
            with pytest.raises(InvalidRequest):
                client.resume("r1", after=after)


def refusing(code):
    class Refusing(FakeGateway):
        def Resume(self, request, context):
            from svc_common.errors import NotConfiguredError, NotFoundError, status_metadata

            kind = NotFoundError if code is grpc.StatusCode.NOT_FOUND else NotConfiguredError
            error = kind("no record", field="request_id")
            context.set_trailing_metadata(status_metadata(error))
            context.abort(code, error.message)

    return Refusing()


@pytest.mark.parametrize(
    ("code", "kind"),
    [(grpc.StatusCode.NOT_FOUND, RequestNotFound), (grpc.StatusCode.FAILED_PRECONDITION, NotConfigured)],
)
def test_refusals_have_their_own_types(code, kind):
    with (
        refusing(code) as gateway,
        Client.connect(gateway.target, retry=QUICK) as client,
        pytest.raises(kind),
        client.resume("r1"),
    ):
        pass
