"""Which services of other projects a gateway serves (--grpc-compat), and their registration."""

from __future__ import annotations

from quire.foreign.kserve_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from quire.foreign.orca_pb2_grpc import add_OpenRcaServiceServicer_to_server
from quire.foreign.vllm_engine_pb2_grpc import add_VllmEngineServicer_to_server

from gateway_svc.foreign.kserve import KServeServicer
from gateway_svc.foreign.loads import LoadReports
from gateway_svc.foreign.vllm_engine import VllmServicer
from gateway_svc.request.threads import Lane
from gateway_svc.schedulers.directory import ModelDirectory
from gateway_svc.servicer import InferenceServicer
from svc_common.config import Flag, one_of
from svc_common.serve import GrpcServer

COMPAT_FLAG = Flag("--grpc-compat", one_of("none", "services", "loads"),
    "services of other projects at --listen (docs/grpc.md). services: KServe V2 and vLLM's engine protocol; loads: "
    "also load reports (ORCA) at the end of calls and as a stream, which show the load of all callers to each one",
    default="services",
)  # fmt: skip
ENGINES = ("inference.GRPCInferenceService", "vllm.grpc.engine.VllmEngine")
LOADS = "xds.service.orca.v3.OpenRcaService"


def names_of(compat: str) -> tuple[str, ...]:
    """The services of a value of --grpc-compat."""
    return {"none": (), "services": ENGINES, "loads": (*ENGINES, LOADS)}[compat]


def add_services(
    compat: str,
    servicer: InferenceServicer,
    directory: ModelDirectory,
    lane: Lane,
    server: GrpcServer,
    *,
    is_open: bool,
) -> None:
    """Add the services to the port for inference. `is_open`: every caller is an operator."""
    names = names_of(compat)
    if LOADS in names:
        reports = LoadReports(directory, servicer.generation.streams, server.stopping)
        add_OpenRcaServiceServicer_to_server(reports, server.grpc)
        server.set_trailers(reports.trailers)
    if names:
        engine = VllmServicer(
            servicer, directory, lane, is_serving=lambda: server.is_serving, shows_loads=is_open or LOADS in names
        )
        kserve = KServeServicer(servicer, directory, lane, lambda: server.is_serving)
        add_VllmEngineServicer_to_server(engine, server.grpc)
        add_GRPCInferenceServiceServicer_to_server(kserve, server.grpc)
