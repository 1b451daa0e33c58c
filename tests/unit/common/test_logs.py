"""Log lines for collectors: one JSON object each, with the request id if there is one."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator

import pytest

from svc_common.observe.logs import current_request_id, setup_logging


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_has_time_service_and_instance(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("worker", "json", "info", instance="worker-0")
    logging.getLogger("here").info("loaded %d", 7, extra={"row": 3})
    logging.getLogger("here").debug("not wanted")
    (line,) = lines(capsys)
    assert str(line.pop("time")).endswith("Z")
    assert line == {
        "level": "info",
        "service": "worker",
        "instance": "worker-0",
        "logger": "here",
        "message": "loaded 7",
        "row": 3,
    }


def test_a_traceback_stays_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("worker", "json")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("here").exception("failed")
    (line,) = lines(capsys)
    assert "ValueError: two\nlines" in str(line["exception"])


async def test_each_task_has_its_own_request_id(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("gateway", "json", "info")
    log = logging.getLogger("here")

    async def handle(request_id: str) -> None:
        current_request_id.set(request_id)
        await asyncio.sleep(0)
        log.info("working")

    await asyncio.gather(handle("r1"), handle("r2"))
    log.info("no request")
    log.info("explicit", extra={"request_id": "r3"})
    assert [line.get("request_id") for line in lines(capsys)] == ["r1", "r2", None, "r3"]


def test_a_name_that_a_peer_chose_cannot_forge_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("scheduler")
    logging.getLogger("here").info("gateway %s attached", "g\n12:00:00 scheduler INFO forged\r\x1b[2J\u2028é")
    (line,) = capsys.readouterr().err.split("\n")[:-1]
    assert line.endswith("gateway g\\n12:00:00 scheduler INFO forged\\r\\x1b[2J\\u2028é attached")


def test_a_client_that_has_left_is_not_logged_as_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """gRPC logs a traceback when it cannot write the answer. A stranger could fill the log with them."""
    setup_logging("gateway", "json", "info")
    log = logging.getLogger("grpc._cython.cygrpc")
    log.error("%s raised in core by servicer method [%s]", "ExecuteBatchError", "/quire.v1.InferenceService/Generate")
    log.error("Unexpected [%s] raised by servicer method [%s]", "KeyError", "/quire.v1.InferenceService/Generate")
    assert [str(line["message"])[:21] for line in lines(capsys)] == ["Unexpected [KeyError]"]
