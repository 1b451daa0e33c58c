"""A valid request of every RPC, as the services send it: the messages of one call, in order."""

from __future__ import annotations

import numpy as np
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from quire.foreign import kserve_pb2, orca_pb2
from quire.foreign import vllm_engine_pb2 as vllm
from quire.internal.v1 import scheduler_pb2, worker_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1 import rollouts_pb2, types_pb2
from quire.v1 import session_pb2 as spb

REQUEST_ID = "example-request"
WORKER_ID = "example-worker"
UNREACHABLE = "127.0.0.1:9"
# Valid calls of an insider that change the system: a drained worker does not return, and a pause does not end, by
# itself. `ControlRollouts` brings pauses to schedulers.
SKIPPED = ("Drain", "Pause", "Sleep", "ControlRollouts")


def _u32(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def _sampling() -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(
        temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, top_a=0.01, seed=7, n=2, repetition_penalty=1.1,
        frequency_penalty=0.2, presence_penalty=0.1, logit_bias={5: 1.5}, banned_token_ids=[9], bad_words=["return"],
    )  # fmt: skip


def _continuation() -> types_pb2.Continuation:
    return types_pb2.Continuation(samples=[types_pb2.SampleState(index=0, output_token_ids=[6, 7])])


def _chat() -> pb.Chat:
    return pb.Chat(
        messages=[
            pb.ChatMessage(role="user", content="What does os.path.join do?", name="me"),
            pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="c1", name="look", arguments='{"key": 1}')]),
            pb.ChatMessage(role="tool", content="joins", tool_call_id="c1", parts=[pb.ContentPart(text="paths")]),
        ],
        template_kwargs_json='{"thinking": false}',
        tools_json='[{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]',
    )


def _generate(prompt: pb.Prompt) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt=prompt,
        sampling=_sampling(),
        stop=types_pb2.StopParams(max_tokens=4, stop=["zq"], stop_token_ids=[3], ignore_eos=True),
        output=pb.OutputParams(logprobs=1),
        scheduling=pb.SchedulingParams(cache_salt="salt", determinism=types_pb2.DETERMINISM_EXACT),
        truncate_prompt_tokens=64,
    )


def _infer(*, stream: bool) -> kserve_pb2.ModelInferRequest:
    request = kserve_pb2.ModelInferRequest(id=REQUEST_ID, outputs=[{"name": "text_output"}, {"name": "output_ids"}])
    request.parameters["temperature"].double_param = 0.5
    tensors = {
        "input_ids": ("INT32", _u32(5, 6)),
        "max_tokens": ("INT64", _u32(4, 0)),
        "stream": ("BOOL", bytes([stream])),
    }
    tensors["sampling_parameters"] = ("BYTES", b"\x0b\0\0\0" + b'{"seed": 7}')
    for name, (datatype, raw) in tensors.items():
        request.inputs.add(name=name, datatype=datatype, shape=[1, 2 if name == "input_ids" else 1])
        request.raw_input_contents.append(raw)
    return request


def _engine_calls() -> dict[str, list[list[Message]]]:
    """The calls of VllmEngine, whose methods have the names of other ones."""
    tokens = vllm.TokenizedInput(original_text="a", input_ids=[5, 6, 7])
    choice = vllm.ChoiceConstraint(choices=["a", "b"])
    params = vllm.SamplingParams(max_tokens=4, logprobs=1, logit_bias={5: 1.5}, n=2, stop=["zq"], choice=choice)
    calls: dict[str, Message] = {
        "Generate": vllm.GenerateRequest(tokenized=tokens, sampling_params=params, stream=True),
        "Embed": vllm.EmbedRequest(tokenized=tokens),
        "Abort": vllm.AbortRequest(request_ids=[REQUEST_ID, 70 * "x"]),
        "HealthCheck": vllm.HealthCheckRequest(),
        "GetModelInfo": vllm.GetModelInfoRequest(),
        "GetServerInfo": vllm.GetServerInfoRequest(),
        "GetLoads": vllm.GetLoadsRequest(include=["core"]),
        "GetTokenizer": vllm.GetTokenizerRequest(),
    }
    return {f"VllmEngine.{name}": [[call]] for name, call in calls.items()}


def _submit() -> scheduler_pb2.Submit:
    return scheduler_pb2.Submit(
        handle=1,
        request_id=REQUEST_ID,
        prompt_token_ids=_u32(*range(5, 40)),
        sampling=_sampling(),
        stop=types_pb2.StopParams(max_tokens=4, ignore_eos=True),
        deadline_ms=60_000,
        tenant_id="example",
        logprobs=1,
        continuation=_continuation(),
    )


def _register() -> scheduler_pb2.RegisterRequest:
    info = types_pb2.ModelInfo(
        model="demo", revision="r", max_model_len=2048, vocab_size=2048, eos_token_ids=[2], block_size=16,
        max_num_blocks=64, determinism=types_pb2.DETERMINISM_EXACT, dtype="float32", max_num_seqs=8, numerics="sim",
        weights_digest="w", bundle_digest=bytes(16),
    )  # fmt: skip
    return scheduler_pb2.RegisterRequest(
        worker_id=WORKER_ID,
        address=UNREACHABLE,
        worker_epoch=77,
        state=types_pb2.WORKER_STATE_LOADING,
        load_progress=0.5,
        capacity=scheduler_pb2.WorkerCapacity(
            info=info, num_blocks=64, block_size=16, max_num_seqs=8, max_num_batched_tokens=64, pipeline_depth=2
        ),
    )


def step_batch(fence: worker_pb2.Fence | None = None, step_id: int = 1) -> worker_pb2.StepBatch:
    """A step that opens one row with 20 tokens and computes them."""
    return worker_pb2.StepBatch(
        step_id=step_id,
        fence=fence or worker_pb2.Fence(scheduler_epoch=1, worker_epoch=2, nonce=3),
        opens=[
            worker_pb2.RowOpen(
                row=0, token_ids=_u32(*range(5, 25)), prompt_len=20, block_table=_u32(0, 1), sampling=_sampling(),
                request_id=REQUEST_ID, logprobs=1, banned_ids=_u32(2), banned_before=2,
            )
        ],
        rows=_u32(0),
        query_lens=_u32(20),
        context_lens=_u32(0),
        sample_mask=b"\1",
        slot_mapping=_u32(*range(20)),
        commit_blocks=_u32(0),
        commit_hashes=bytes(range(16)),
    )  # fmt: skip


def _streams() -> dict[str, list[list[Message]]]:
    """Calls by method name. Several calls of a method reach different code."""
    attach = scheduler_pb2.AttachRequest
    begin = rollouts_pb2.BeginUpdateRequest(update_id="u", version=3, model="m")
    commit = rollouts_pb2.CommitUpdateRequest(update_id="u", digest="0" * 32, running_rows="RUNNING_ROWS_KEEP")
    pause = rollouts_pb2.PauseRequest(pause_id="p", mode="PAUSE_MODE_RETRACT")
    put: list[Message] = [
        rollouts_pb2.PutTensorsRequest(update_id="u", path="../a"), rollouts_pb2.PutTensorsRequest(data=b"tensors")
    ]  # fmt: skip
    hello = attach(hello=scheduler_pb2.Hello(gateway_id="example", protocol_version=1, deltas_interval_ms=5))
    cancel = scheduler_pb2.Cancel(handle=1, sample_index=1, reason=types_pb2.FINISH_REASON_STOP)
    heartbeat = attach(heartbeat=scheduler_pb2.GatewayHeartbeat())
    prompts = (
        pb.Prompt(text="Return a new"), pb.Prompt(tokens=types_pb2.TokenIds(ids=[5, 6, 7])), pb.Prompt(chat=_chat())
    )  # fmt: skip
    continued = _generate(prompts[1])
    continued.continuation.CopyFrom(_continuation())
    constrained = pb.GenerateRequest(
        prompt=prompts[0],
        sampling=types_pb2.SamplingParams(json_schema='{"type": "integer"}', seed=3),
        stop=types_pb2.StopParams(max_tokens=4),
    )
    beams = pb.GenerateRequest(
        prompt=prompts[0],
        sampling=types_pb2.SamplingParams(beam_width=2, n=2, length_penalty=1.0),
        stop=types_pb2.StopParams(max_tokens=4),
    )
    decide = pb.DecideRequest(request=pb.GenerateRequest(prompt=prompts[2], request_id=REQUEST_ID))
    decide.questions.add(instructions=[pb.ContentPart(text="b")], choices=[pb.Choice(label="c"), pb.Choice(label="d")])
    decide.questions.add(instructions=[pb.ContentPart(image=b"e")], levels=[pb.Choice(label="f", description="g")] * 2)
    fence, two = worker_pb2.Fence(scheduler_epoch=1, worker_epoch=2, nonce=3), bytes([1, 0, 0, 0, 2, 0, 0, 0])
    source = worker_pb2.BlockSource(worker_id=WORKER_ID, address="127.0.0.1:1", worker_epoch=2, block_ids=two)
    return {
        "Attach": [
            [hello, attach(submit=_submit()), attach(cancel=cancel), heartbeat],
            [hello, attach(batch=scheduler_pb2.AttachBatch(messages=[attach(submit=_submit()), heartbeat]))],
        ],
        "Register": [[_register(), _register()]],
        "CountWorkers": [[scheduler_pb2.CountWorkersRequest()]],
        "LendBlocks": [
            [scheduler_pb2.LendBlocksRequest(worker_id=WORKER_ID, layout=bytes(16), hashes=bytes(32), token_ids=two)]
        ],
        "GetBundle": [[scheduler_pb2.GetBundleRequest(digest=bytes(16))]],
        "ReleaseWorker": [[scheduler_pb2.ReleaseWorkerRequest(worker_id=WORKER_ID, timeout_s=1.0)]],
        "AbortRequests": [[scheduler_pb2.AbortRequestsRequest(request_ids=[REQUEST_ID, "b"])]],
        "GetSchedulerStatus": [[scheduler_pb2.GetSchedulerStatusRequest()]],
        "GetPools": [[scheduler_pb2.GetPoolsRequest()]],
        "GetHistory": [[scheduler_pb2.GetHistoryRequest()]],
        "InspectScheduler": [[scheduler_pb2.InspectSchedulerRequest(kind=pb.INSPECT_KIND_PROFILE, seconds=0.1)]],
        "Lease": [[worker_pb2.LeaseRequest(scheduler_epoch=5, scheduler_id="example", protocol_version=1)]],
        "StepStream": [[worker_pb2.StepStreamRequest(batch=step_batch(), then=[step_batch(step_id=2)])]],
        "StepBatch": [[worker_pb2.StepBatchRequest(batch=step_batch())]],
        "ListBlocks": [[worker_pb2.ListBlocksRequest(fence=fence)]],
        "FetchBlocks": [
            [worker_pb2.FetchBlocksRequest(fence=fence, block_ids=two, hashes=bytes(32), token_ids=bytes(32))],
            [worker_pb2.FetchBlocksRequest(fence=fence, block_ids=two, hashes=bytes(32), source=source)],
        ],
        "WatchTier": [[worker_pb2.WatchTierRequest(fence=fence)]],
        "ReadBlocks": [
            [worker_pb2.ReadBlocksRequest(worker_epoch=2, layout=bytes(16), block_ids=two, hashes=bytes(32))]
        ],
        "Drain": [[worker_pb2.DrainRequest(timeout_s=float("nan"))]],
        "GetWorkerBundle": [[worker_pb2.GetWorkerBundleRequest()]],
        "InspectWorker": [[worker_pb2.InspectWorkerRequest(kind=pb.INSPECT_KIND_REPORT)]],
        "Generate": [[m] for m in (*map(_generate, prompts), continued, constrained, beams)],
        "Resume": [[pb.ResumeRequest(request_id=REQUEST_ID, after=[pb.ResumePosition(index=0, num_tokens=3)])]],
        "Abort": [[pb.AbortRequest(request_ids=[REQUEST_ID])]],
        "Tokenize": [[pb.TokenizeRequest(prompt=prompt)] for prompt in prompts],
        "CountTokens": [[pb.CountTokensRequest(request=m)] for m in (*map(_generate, prompts), constrained)],
        "Embed": [[pb.EmbedRequest(inputs=[prompt], dimensions=8, prompt_name="query")] for prompt in prompts],
        "Score": [[pb.ScoreRequest(pairs=[pb.TextPair(query="a", document="b")], instruction="match")]],
        "Decide": [[decide]],
        "Detokenize": [[pb.DetokenizeRequest(ids=[5, 6, 7])]],
        "ListModels": [[pb.ListModelsRequest()]],
        "GetModel": [[pb.GetModelRequest()]],
        "GetStatus": [[pb.GetStatusRequest()]],
        "LoadWorkerAdapter": [[worker_pb2.LoadWorkerAdapterRequest(fence=fence, name="a", path="../../etc")]],
        "UnloadWorkerAdapter": [[worker_pb2.UnloadWorkerAdapterRequest(fence=fence, name="a")]],
        "SwapWorkerAdapter": [[worker_pb2.SwapWorkerAdapterRequest(fence=fence, digest=bytes(16), kept=[bytes(3)])]],
        "AddAdapter": [[scheduler_pb2.AddAdapterRequest(name="a", path="a")]],
        "RemoveAdapter": [[scheduler_pb2.RemoveAdapterRequest(name="a")]],
        "GetAdapters": [[scheduler_pb2.GetAdaptersRequest()]],
        "Checkpoint": [[spb.CheckpointRequest(session_id=REQUEST_ID)]],
        "Fork": [[spb.ForkRequest(session_id=REQUEST_ID, n=64)]],
        "Rewind": [[spb.RewindRequest(session_id=REQUEST_ID, num_tokens=3)]],
        "Pin": [[spb.PinRequest(session_id=REQUEST_ID, ttl_s=float("nan"))], [spb.PinRequest(session_id="a", ttl_s=5)]],
        "GetSession": [[spb.GetSessionRequest(session_id=REQUEST_ID)]],
        "ListSessions": [[spb.ListSessionsRequest()]],
        "DeleteSession": [[spb.DeleteSessionRequest(session_id=REQUEST_ID)]],
        "LoadAdapter": [[pb.LoadAdapterRequest(name="a", path="../a", model="m")]],
        "UnloadAdapter": [[pb.UnloadAdapterRequest(name="a")]],
        "SetRoute": [[pb.SetRouteRequest(route=pb.Route(name="a", targets={"m": 90, "a": 10}, shadow="b"))]],
        "ListRoutes": [[pb.ListRoutesRequest()]],
        "ListAdapters": [[pb.ListAdaptersRequest(model="m")]],
        "Inspect": [[pb.InspectRequest(kind=pb.INSPECT_KIND_REPORT, service="gateway")]],
        "DrainWorker": [[pb.DrainWorkerRequest(worker_id=WORKER_ID, timeout_s=1.0)]],
        "ChangeWeights": [
            [
                worker_pb2.ChangeWeightsRequest(
                    fence=fence, action=action, version=1, files=["../a", "b"], tags=["weights"]
                )
            ]
            for action in worker_pb2.WeightsAction.values()
        ],
        "WriteTensors": [
            [worker_pb2.WriteTensorsRequest(fence=fence, path="../a"), worker_pb2.WriteTensorsRequest(data=b"tensors")]
        ],
        "ControlRollouts": [
            [scheduler_pb2.ControlRolloutsRequest(begin=begin)],
            [scheduler_pb2.ControlRolloutsRequest(commit=commit)],
            [scheduler_pb2.ControlRolloutsRequest(pause=pause)],
            [scheduler_pb2.ControlRolloutsRequest(unpause=rollouts_pb2.UnpauseRequest())],
        ],
        "AddTensors": [put],
        "BeginUpdate": [[begin]],
        "PutTensors": [put],
        "CommitUpdate": [[commit]],
        "AbortUpdate": [[rollouts_pb2.AbortUpdateRequest(update_id="u")]],
        "GetWeights": [[rollouts_pb2.GetWeightsRequest()]],
        "Pause": [[pause]],
        "Unpause": [[rollouts_pb2.UnpauseRequest(pause_id="p")]],
        "Sleep": [[rollouts_pb2.SleepRequest(tags=["disk"])]],
        "Wake": [[rollouts_pb2.WakeRequest(tags=["weights"])]],
        "ResetPrefixCache": [[rollouts_pb2.ResetPrefixCacheRequest(model="m")]],
        **{
            name: [[getattr(kserve_pb2, f"{name}Request")()]]
            for name in ("ServerLive", "ServerReady", "ServerMetadata")
        },
        "ModelReady": [[kserve_pb2.ModelReadyRequest(name="m", version="1")]],
        "ModelMetadata": [[kserve_pb2.ModelMetadataRequest(name="")]],
        "ModelInfer": [[_infer(stream=False)]],
        "StreamCoreMetrics": [[orca_pb2.OrcaLoadReportRequest(report_interval={"seconds": 1})]],
        **_engine_calls(),
        "ModelStreamInfer": [[_infer(stream=True), _infer(stream=False)]],
        "Check": [[health_pb2.HealthCheckRequest(service="")]],
        "Watch": [[health_pb2.HealthCheckRequest(service="")]],
        "ServerReflectionInfo": [[reflection_pb2.ServerReflectionRequest(list_services="*")]],
    }


CALLS = _streams()
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
INFERENCE = pb.DESCRIPTOR.services_by_name["InferenceService"]
SESSIONS = spb.DESCRIPTOR.services_by_name["SessionService"]
KSERVE = kserve_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
ENGINE = vllm.DESCRIPTOR.services_by_name["VllmEngine"]
ORCA = orca_pb2.DESCRIPTOR.services_by_name["OpenRcaService"]
ADMIN = pb.DESCRIPTOR.services_by_name["AdminService"]
ROLLOUTS = rollouts_pb2.DESCRIPTOR.services_by_name["RolloutService"]
SCHEDULER = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
WORKER = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]


def name_of(method: MethodDescriptor) -> str:
    """The name of a method among CALLS."""
    return f"{ENGINE.name}.{method.name}" if method.containing_service == ENGINE else str(method.name)


def calls_of(method: MethodDescriptor) -> list[list[Message]]:
    """Valid calls of a method. Raises KeyError for a method without an example."""
    return CALLS[name_of(method)]


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def methods_of(*services: ServiceDescriptor) -> list[MethodDescriptor]:
    return [method for service in services for method in service.methods]
