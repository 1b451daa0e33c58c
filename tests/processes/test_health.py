"""grpc.health.v1 Watch on the port of each service."""

from __future__ import annotations

import signal
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire_client.demo import demo_model_dir

from tests.processes.stack import Stack


@pytest.mark.timeout(180)
def test_watch_reports_serving_and_then_not_serving_on_drain(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        worker = stack.start_worker(scheduler, demo_model_dir(), "--executor", "sim")
        gateway = stack.start_gateway(scheduler)
        for service in (scheduler, worker, gateway):
            service.wait_ready()
        for service in (gateway, worker, scheduler):
            with grpc.insecure_channel(service.address) as channel:
                watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
                assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
                service.signal(signal.SIGTERM)
                assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
                assert service.wait() == 0, service.log()
