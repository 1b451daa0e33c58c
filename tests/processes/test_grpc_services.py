"""Services of other projects, with real processes: a kill in the middle of KServe's stream, and balancing by load."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
from pathlib import Path

import grpc
from quire.foreign import kserve_pb2 as kserve
from quire.foreign import orca_pb2
from quire.foreign import vllm_engine_pb2 as vllm
from quire.foreign.kserve_pb2_grpc import GRPCInferenceServiceStub
from quire.foreign.vllm_engine_pb2_grpc import VllmEngineStub
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from quire_client.demo import demo_model_dir

from tests.processes.load import wave_prompts
from tests.processes.models import make_checkpoint
from tests.processes.stack import Service, Stack, wait_idle

FLAGS = ("--dtype", "float32", "--num-blocks", "96", "--max-num-seqs", "8", "--model-name", "demo")
MAX_TOKENS = 240
BUF = Path(sys.executable).parent / "buf"


def infer(request_id: str, ids: list[int]) -> kserve.ModelInferRequest:
    request = kserve.ModelInferRequest(model_name="demo", id=request_id)
    tensors = {"input_ids": ids, "request_output_len": [MAX_TOKENS], "random_seed": [3], "streaming": [1]}
    for name, values in tensors.items():
        tensor = request.inputs.add(name=name, datatype="INT32", shape=[1, len(values)])
        tensor.contents.int_contents.extend(values)
    request.inputs[-1].datatype = "BOOL"
    request.inputs[-1].contents.ClearField("int_contents")
    request.inputs[-1].contents.bool_contents.append(True)
    request.parameters["ignore_eos"].bool_param = True
    request.parameters["temperature"].double_param = 1.0
    return request


async def stream(address: str, killed: Service | None) -> dict[str, list[int]]:
    """The output of eight requests in one stream. `killed` ends when each has some tokens."""
    outputs: dict[str, list[int]] = {}
    async with grpc.aio.insecure_channel(address) as channel:
        call = GRPCInferenceServiceStub(channel).ModelStreamInfer()
        for i, ids in enumerate(wave_prompts(0)):
            await call.write(infer(str(i), ids))
        await call.done_writing()
        async for response in call:
            assert not response.error_message
            answer = response.infer_response
            (raw,) = answer.raw_output_contents
            outputs.setdefault(answer.id, []).extend(memoryview(raw).cast("i"))
            if killed is not None and len(outputs) == 8 and min(map(len, outputs.values())) > 5:
                assert max(map(len, outputs.values())) < MAX_TOKENS
                killed.kill()
                killed = None
    assert killed is None
    return outputs


async def test_streams_continue_after_a_kill(tmp_path: Path) -> None:
    model_dir = make_checkpoint(tmp_path / "model")
    with Stack(tmp_path) as stack:
        scheduler = stack.start_scheduler()
        workers = [stack.start_worker(scheduler, model_dir, *FLAGS) for _ in range(2)]
        gateway = stack.start_gateway(scheduler)
        async with await stack.connect(gateway, workers=2) as client:
            undisturbed = await stream(gateway.address, None)
            assert [len(ids) for ids in undisturbed.values()] == [MAX_TOKENS] * 8
            engine = [await engine_ids(gateway.address, ids) for ids in wave_prompts(0)[:2]]
            assert engine == [undisturbed["0"], undisturbed["1"]]
            assert await stream(gateway.address, workers[0]) == undisturbed
            await wait_idle(stack, client)


async def engine_ids(address: str, ids: list[int]) -> list[int]:
    """The output of the same request over vLLM's engine protocol."""
    params = vllm.SamplingParams(max_tokens=MAX_TOKENS, seed=3, ignore_eos=True)
    tokens = vllm.TokenizedInput(input_ids=ids)
    async with grpc.aio.insecure_channel(address) as channel:
        call = VllmEngineStub(channel).Generate(vllm.GenerateRequest(tokenized=tokens, sampling_params=params))
        return [token async for response in call for token in response.complete.output_ids]


async def test_grpc_balances_by_load_reports(tmp_path: Path) -> None:
    """gRPC's own policy weighted_round_robin sends most calls to the deployment with more rows."""
    with Stack(tmp_path) as stack:
        gateways = []
        for rows in ("2", "64"):
            scheduler = stack.start_scheduler()
            sim = ("--executor", "sim", "--sim-step-ms", "10", "--model-name", "demo", "--max-num-seqs", rows)
            stack.start_worker(scheduler, demo_model_dir(), *sim)
            gateways.append(stack.start_gateway(scheduler, flags=("--grpc-compat", "loads")))
        for gateway in gateways:
            async with await stack.connect(gateway):
                pass
        policy = {"weighted_round_robin": {"blackoutPeriod": "0s", "weightUpdatePeriod": "0.1s"}}
        options = [("grpc.service_config", json.dumps({"loadBalancingConfig": [policy]}))]
        target = "ipv4:" + ",".join(gateway.address for gateway in gateways)
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            await asyncio.gather(*(generate_all(InferenceServiceStub(channel), 25) for _ in range(6)))
        small, large = (gateway.log().count(" ended (") for gateway in gateways)
        assert small + large == 150
        assert 0 < small < large / 2
        check_buf(gateways[1].address)


async def generate_all(stub: InferenceServiceStub, count: int) -> None:
    for _ in range(count):
        request = pb.GenerateRequest(prompt=pb.Prompt(tokens={"ids": [5]}), stop={"max_tokens": 8, "ignore_eos": True})
        async for _ in stub.Generate(request):
            pass


def check_buf(address: str) -> None:
    """A client without proto files lists all methods, and shows the load report that grpc's own client keeps."""

    def curl(*words: str) -> str:
        command = [BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout + done.stderr

    methods = set(curl("--list-methods", f"http://{address}").split())
    assert {
        "inference.GRPCInferenceService/ModelStreamInfer",
        "xds.service.orca.v3.OpenRcaService/StreamCoreMetrics",
    } <= (methods)
    shown = curl("-v", "-d", "{}", f"http://{address}/quire.v1.InferenceService/ListModels")
    data = next(line.split()[-1] for line in shown.splitlines() if "endpoint-load-metrics-bin" in line.lower())
    report = orca_pb2.OrcaLoadReport.FromString(base64.b64decode(data + "=="))
    assert report.rps_fractional > 0
    assert 0 < report.application_utilization < 0.5
