"""The names by which trainers control a server over HTTP: those of vLLM, for the calls of RolloutService."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from quire.v1 import inference_pb2, types_pb2
from quire.v1 import rollouts_pb2 as pb
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway_svc.http.json_text import BOOLEANS, invalid, object_of, one_of, shown, text_of
from gateway_svc.http.openai.bodies import body_of
from gateway_svc.http.replies import Read, json_reply
from gateway_svc.operators.admin import AdminServicer
from gateway_svc.operators.rollouts import RolloutServicer
from gateway_svc.request.validation import RequestLimits
from gateway_svc.schedulers.directory import ModelDirectory
from svc_common.errors import InvalidRequestError, NotConfiguredError
from svc_common.observe.metrics import quire_version

UPDATE_ID = PAUSE_ID = "http"  # these calls name neither
PAUSE_MODES = {
    "keep": pb.PAUSE_MODE_KEEP, "retract": pb.PAUSE_MODE_RETRACT, "abort": pb.PAUSE_MODE_ABORT,
    "wait": pb.PAUSE_MODE_FINISH, "finish": pb.PAUSE_MODE_FINISH,
}  # fmt: skip
RUNNING_ROWS = {"recompute": pb.RUNNING_ROWS_RECOMPUTE, "keep": pb.RUNNING_ROWS_KEEP, "retire": pb.RUNNING_ROWS_RETIRE}
LEVELS = ("0", "1", "2")
ENDPOINTS = {  # names of handlers, which end the paths, by method and beginning of the path
    ("POST", ""): (
        *("pause", "resume", "init_weight_transfer_engine", "start_weight_update", "update_weights"),
        *("finish_weight_update", "abort_weight_update", "reset_prefix_cache", "sleep", "wake_up"),
    ),
    ("POST", "v1/"): ("load_lora_adapter", "unload_lora_adapter"),
    ("GET", ""): ("weight_info", "server_info", "get_world_size", "is_paused", "is_sleeping"),
}
DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "I8": "int8"}


class RolloutHandlers:
    """One method per endpoint. All need the key of an operator, if operators need keys."""

    def __init__(
        self,
        rollouts: RolloutServicer,
        admin: AdminServicer,
        directory: ModelDirectory,
        limits: RequestLimits,
        read: Read,
    ) -> None:
        self._rollouts = rollouts
        self._admin = admin
        self._directory = directory
        self._limits = limits
        self._read = read

    def routes(self) -> list[Route]:
        return [
            Route(f"/{prefix}{name}", getattr(self, name), methods=[method])
            for (method, prefix), names in ENDPOINTS.items()
            for name in names
        ]

    # -- pauses -------------------------------------------------------------------------------------------------------

    async def pause(self, request: Request) -> Response:
        """Compute no steps until /resume. `mode`: keep, retract, abort or wait."""
        mode = PAUSE_MODES[one_of("mode", request.query_params.get("mode", "keep"), PAUSE_MODES)]
        clears = one_of("clear_cache", request.query_params.get("clear_cache", "false").lower(), BOOLEANS)
        paused = await self._rollouts.Pause(pb.PauseRequest(pause_id=PAUSE_ID, mode=mode))
        if BOOLEANS[clears]:
            await self._rollouts.ResetPrefixCache(pb.ResetPrefixCacheRequest())
        samples = [
            {"request_id": one.request_id, "index": one.index, "num_output_tokens": one.num_output_tokens}
            for one in paused.samples
        ]
        return json_reply({"status": "paused", "samples": samples})

    async def resume(self, request: Request) -> Response:
        """End the pause."""
        await self._rollouts.Unpause(pb.UnpauseRequest(pause_id=PAUSE_ID))
        return json_reply({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        """Whether a pause has begun."""
        state = await self._rollouts.GetWeights(pb.GetWeightsRequest())
        return json_reply({"is_paused": bool(state.pause_ids)})

    async def sleep(self, request: Request) -> Response:
        """Free memory of all workers until /wake_up. `tags`: weights, kv_cache; without tags both."""
        one_of("level", request.query_params.get("level", "1"), LEVELS)
        await self._rollouts.Sleep(pb.SleepRequest(tags=request.query_params.getlist("tags")))
        return json_reply({"status": "asleep"})

    async def wake_up(self, request: Request) -> Response:
        """Get the memory back."""
        await self._rollouts.Wake(pb.WakeRequest(tags=request.query_params.getlist("tags")))
        return json_reply({"status": "awake"})

    async def is_sleeping(self, request: Request) -> Response:
        """Whether some memory is free."""
        state = await self._rollouts.GetWeights(pb.GetWeightsRequest())
        return json_reply({"is_sleeping": bool(state.asleep), "tags": list(state.asleep)})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget all cached prefixes."""
        await self._rollouts.ResetPrefixCache(pb.ResetPrefixCacheRequest())
        return json_reply({"success": True})

    # -- weights ------------------------------------------------------------------------------------------------------

    async def init_weight_transfer_engine(self, request: Request) -> Response:
        """Agree on how tensors arrive: `{"init_info": {"backend": "files"}}`, which is the default."""
        info = object_of("init_info", (await self._body(request)).get("init_info", {}))
        if "master_address" in info:
            raise NotConfiguredError(
                "the workers take tensors from files, not by NCCL: send init_info without master_address, and in "
                "/update_weights the path of a safetensors file below --weights-dir",
                field="init_info.master_address",
            )
        if info.get("backend", "files") != "files":
            raise invalid("init_info.backend", f"is {shown(info['backend'])}; use files")
        await self._rollouts.GetWeights(pb.GetWeightsRequest())
        return json_reply({"message": "tensors are files below --weights-dir"})

    async def start_weight_update(self, request: Request) -> Response:
        """Begin an update. `version`: above that of the weights in use; unset: the next one."""
        body = await self._body(request)
        version = body.get("version", 0)
        if type(version) is not int or not 0 <= version < 1 << 63:
            raise invalid("version", f"is {shown(version)}; must be a number of 0 or more")
        begun = await self._rollouts.BeginUpdate(pb.BeginUpdateRequest(update_id=UPDATE_ID, version=version))
        return json_reply({"version": begun.version})

    async def update_weights(self, request: Request) -> Response:
        """Add a safetensors file. `update_info` has its `path`, and may have `names`, `dtype_names` and `shapes`."""
        info = object_of("update_info", (await self._body(request)).get("update_info", {}))
        path = info.get("path")
        if not isinstance(path, str) or not path:
            raise invalid("update_info.path", "is missing; name a safetensors file below the workers' --weights-dir")
        put = await self._rollouts.put(pb.PutTensorsRequest(update_id=UPDATE_ID, path=path), _nothing())
        found = {one.name: one for one in put.tensors}
        problem = _difference(info, found)
        if problem is not None:
            await self._rollouts.AbortUpdate(pb.AbortUpdateRequest(update_id=UPDATE_ID))
            raise problem
        return json_reply({"tensors": [_tensor(one) for one in put.tensors]})

    async def finish_weight_update(self, request: Request) -> Response:
        """Compute with the new weights. `running_rows`: recompute, keep or retire; `digest`: of all tensors."""
        body = await self._body(request)
        rows = RUNNING_ROWS[one_of("running_rows", body.get("running_rows", "recompute"), RUNNING_ROWS)]
        digest = text_of("digest", body.get("digest", ""))
        done = await self._rollouts.CommitUpdate(
            pb.CommitUpdateRequest(update_id=UPDATE_ID, digest=digest, running_rows=rows)
        )
        return json_reply({**_weights(done.weights), "num_rows": done.num_rows, "num_workers": done.num_workers})

    async def abort_weight_update(self, request: Request) -> Response:
        """End an update without a change."""
        await self._rollouts.AbortUpdate(pb.AbortUpdateRequest(update_id=UPDATE_ID))
        return json_reply({})

    async def weight_info(self, request: Request) -> Response:
        """The weights in use, and the tensors of an open update."""
        state = await self._rollouts.GetWeights(pb.GetWeightsRequest())
        update = {"update_id": state.update_id, "version": state.update_version} if state.update_id else None
        tensors = [_tensor(one) for one in state.tensors]
        return json_reply(
            {**_weights(state.weights), "num_workers": state.num_workers, "update": update, "tensors": tensors}
        )

    async def load_lora_adapter(self, request: Request) -> Response:
        """Load a LoRA adapter on all workers: `lora_name`, `lora_path`."""
        body = await self._body(request)
        name, path = (text_of(field, body.get(field)) for field in ("lora_name", "lora_path"))
        await self._admin.LoadAdapter(inference_pb2.LoadAdapterRequest(name=name, path=path))
        return json_reply({"status": "loaded"})

    async def unload_lora_adapter(self, request: Request) -> Response:
        """Unload a LoRA adapter: `lora_name`."""
        name = text_of("lora_name", (await self._body(request)).get("lora_name"))
        await self._admin.UnloadAdapter(inference_pb2.UnloadAdapterRequest(name=name))
        return json_reply({"status": "unloaded"})

    # -- facts --------------------------------------------------------------------------------------------------------

    async def server_info(self, request: Request) -> Response:
        """Facts about model and server in the form that trainers read."""
        model = self._directory.find_text("")
        info = model.info
        most = self._limits.max_logprobs
        config = {
            "model_config": {
                "model": model.name,
                "dtype": f"torch.{info.dtype}",
                "max_model_len": info.max_model_len,
                "quantization": info.quantization or None,
                "logprobs_mode": _logprobs_mode(self._limits),
                "max_logprobs": most,
            },
            "parallel_config": {"world_size": await self._num_workers()},
            "weight_transfer_config": {"backend": "files"},
        }
        return json_reply({"vllm_config": config, "vllm_env": {}, "version": quire_version()})

    async def get_world_size(self, request: Request) -> Response:
        """The number of workers."""
        return json_reply({"world_size": await self._num_workers()})

    async def _body(self, request: Request) -> dict[str, Any]:
        """The JSON object of a body; empty if there is none."""
        if not await request.body():
            return {}
        found: dict[str, Any] = await self._read(request, body_of)
        return found

    async def _num_workers(self) -> int:
        return (await self._rollouts.GetWeights(pb.GetWeightsRequest())).num_workers


def _logprobs_mode(limits: RequestLimits) -> str:
    is_processed = limits.logprobs_mode == types_pb2.LOGPROBS_MODE_PROCESSED
    return "processed_logprobs" if is_processed else "raw_logprobs"


async def _nothing() -> AsyncIterator[pb.PutTensorsRequest]:
    return
    yield


def _difference(info: dict[str, Any], found: dict[str, pb.TensorChecksum]) -> InvalidRequestError | None:
    """The first difference between the caller's announcement and the file."""
    announced: dict[str, list[Any]] = {
        "names": list(found),
        "dtype_names": [DTYPE_NAMES.get(one.dtype, one.dtype) for one in found.values()],
        "shapes": [list(one.shape) for one in found.values()],
    }
    names = info.get("names", announced["names"])
    if not isinstance(names, list) or sorted(map(str, names)) != sorted(found):
        return invalid("update_info.names", "are not those of the file")
    order = {name: place for place, name in enumerate(found)}
    for field in ("dtype_names", "shapes"):
        expected = [announced[field][order[name]] for name in names]
        if info.get(field, expected) != expected:
            return invalid(f"update_info.{field}", "are not those of the file")
    return None


def _tensor(one: pb.TensorChecksum) -> dict[str, Any]:
    return {"name": one.name, "dtype": one.dtype, "shape": list(one.shape), "checksum": one.checksum}


def _weights(weights: types_pb2.WeightVersion) -> dict[str, Any]:
    return {"weight_version": weights.version, "revision": weights.revision, "weights_digest": weights.weights_digest}
