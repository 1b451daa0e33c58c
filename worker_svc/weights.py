"""Changes the weights of this worker: they are loaded beside those in use, and exchanged between two steps."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from quire.internal.v1 import worker_pb2
from quire.v1 import rollouts_pb2, types_pb2

from svc_common.calls import first_of, read_rest
from svc_common.errors import InvalidRequestError, NotConfiguredError, ServiceError
from worker_svc.adapters import found_below
from worker_svc.engine.checkpoint.model_folder import CheckpointError
from worker_svc.engine.config import EngineInfo, StagedWeights
from worker_svc.lifecycle import Lifecycle
from worker_svc.steps.executor import StepExecutor

if TYPE_CHECKING:
    from worker_svc.engine.weight_updates import UpdatableWeights

log = logging.getLogger(__name__)
T = TypeVar("T")

Announce = Callable[[EngineInfo], Awaitable[types_pb2.ModelInfo]]


class WorkerWeights:
    """Stages and activates updates, one call at a time. `folder`: where their files are; None: nothing can be updated.
    `announce` makes a changed model part of the registration, and returns it as a message. `clear_tiers` forgets the
    blocks outside the pool.
    """

    def __init__(
        self,
        executor: StepExecutor,
        lifecycle: Lifecycle,
        folder: Path | None,
        announce: Announce,
        clear_tiers: Callable[[], Awaitable[None]],
    ) -> None:
        self._executor = executor
        self._lifecycle = lifecycle
        self._folder = folder
        self._announce = announce
        self._clear_tiers = clear_tiers
        self._staged: StagedWeights | None = None
        self._staged_key: tuple[int, tuple[str, ...]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._turn = asyncio.Lock()

    async def change(self, request: worker_pb2.ChangeWeightsRequest) -> worker_pb2.ChangeWeightsResponse:
        """Raises InvalidRequestError for an update that does not fit, NotConfiguredError, StaleEpochError."""
        actions = {
            worker_pb2.WEIGHTS_ACTION_CHECK: self._check,
            worker_pb2.WEIGHTS_ACTION_STAGE: self._stage,
            worker_pb2.WEIGHTS_ACTION_ACTIVATE: self._activate,
            worker_pb2.WEIGHTS_ACTION_DROP: self._drop,
            worker_pb2.WEIGHTS_ACTION_SLEEP: self._sleep,
            worker_pb2.WEIGHTS_ACTION_WAKE: self._wake,
            worker_pb2.WEIGHTS_ACTION_FORGET_PREFIXES: self._forget_prefixes,
        }
        action = actions.get(request.action)
        if action is None:
            raise InvalidRequestError(f"action is {request.action}, which this worker does not know", field="action")
        async with self._turn:
            self._executor.check_fence(request.fence)
            return await action(request)

    async def _check(self, request: worker_pb2.ChangeWeightsRequest) -> worker_pb2.ChangeWeightsResponse:
        runner, files = self._runner(), self._paths(request.files)
        sums = await self._run(lambda: runner.check_update(files))
        return worker_pb2.ChangeWeightsResponse(tensors=[rollouts_pb2.TensorChecksum(**asdict(one)) for one in sums])

    async def _stage(self, request: worker_pb2.ChangeWeightsRequest) -> worker_pb2.ChangeWeightsResponse:
        runner, files = self._runner(), self._paths(request.files)
        key = request.version, tuple(request.files)
        if self._staged is None or self._staged_key != key:
            self._staged = None  # its memory is free before the next weights are loaded
            self._staged = await self._run(lambda: runner.stage(request.version, files))
            self._staged_key = key
        used = [name for name, path in zip(request.files, files, strict=True) if path in self._staged.used]
        return worker_pb2.ChangeWeightsResponse(used_files=used, info=_changed_facts(self._staged.info))

    async def _activate(self, request: worker_pb2.ChangeWeightsRequest) -> worker_pb2.ChangeWeightsResponse:
        runner, staged = self._runner(), self._staged
        if staged is None or staged.info.weight_version != request.version:
            raise InvalidRequestError(f"version {request.version} is not staged; stage it first", field="version")
        lease = self._executor.check_fence(request.fence)
        await self._executor.between_steps(lease, lambda: runner.activate(staged))
        self._staged = None
        self._lifecycle.weights = worker_pb2.UpdatedWeights(version=request.version, files=request.files)
        self._lifecycle.is_asleep = False
        log.info("weights of version %d, digest %s", request.version, staged.info.weights_digest)
        return worker_pb2.ChangeWeightsResponse(info=await self._announce(staged.info))

    async def _drop(self, request: worker_pb2.ChangeWeightsRequest) -> worker_pb2.ChangeWeightsResponse:
        self._staged = None
        return worker_pb2.ChangeWeightsResponse()

    async def _sleep(self, request: worker_pb2.ChangeWeightsRequest) -> worker_pb2.ChangeWeightsResponse:
        runner, tags = self._runner(), list(request.tags)
        lease = self._executor.check_fence(request.fence)

        def sleep() -> None:
            lease.is_pool_asleep |= "kv_cache" in tags
            runner.sleep(tags)

        await self._executor.between_steps(lease, sleep)
        if "weights" in tags:
            self._lifecycle.is_asleep = True
        return worker_pb2.ChangeWeightsResponse()

    async def _wake(self, request: worker_pb2.ChangeWeightsRequest) -> worker_pb2.ChangeWeightsResponse:
        lease = self._executor.check_fence(request.fence)
        if "kv_cache" in request.tags:
            lease.is_pool_asleep = False
        if "weights" not in request.tags or not self._lifecycle.is_asleep:
            return worker_pb2.ChangeWeightsResponse()
        await self._stage(request)
        return await self._activate(request)

    async def _forget_prefixes(self, request: worker_pb2.ChangeWeightsRequest) -> worker_pb2.ChangeWeightsResponse:
        runner, lease = self._executor.runner, self._executor.check_fence(request.fence)
        await self._executor.between_steps(lease, runner.forget_prefixes)
        await self._clear_tiers()
        return worker_pb2.ChangeWeightsResponse()

    async def write(self, requests: AsyncIterator[worker_pb2.WriteTensorsRequest]) -> None:
        """Write a file whose bytes arrive. It appears when it is complete."""
        try:
            await self._write(requests)
        except ServiceError:
            await read_rest(requests)
            raise

    async def _write(self, requests: AsyncIterator[worker_pb2.WriteTensorsRequest]) -> None:
        first = await first_of(aiter(requests), "path")
        self._executor.check_fence(first.fence)
        target = self._path(first.path)
        part = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            with await self._run(lambda: _create(part)) as file:
                await self._run(lambda: file.write(first.data))
                async for request in requests:
                    await self._run(lambda data=request.data: file.write(data))  # type: ignore[misc]
                await self._run(lambda: os.fsync(file.fileno()))
            part.replace(target)
        except OSError as error:
            raise NotConfiguredError(f"cannot write {target}: {error.strerror}", field="path") from None
        finally:
            part.unlink(missing_ok=True)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _runner(self) -> UpdatableWeights:
        runner = self._executor.runner
        if not runner.has_new_weights:
            raise NotConfiguredError("weights of this backend cannot be updated; use --backend cpu")
        return cast("UpdatableWeights", runner)

    def _paths(self, files: Sequence[str]) -> list[Path]:
        return [self._path(name) for name in files]

    def _path(self, name: str) -> Path:
        if self._folder is None:
            raise NotConfiguredError(
                "this worker has no folder for updates of its weights; start it with --weights-dir", field="path"
            )
        return found_below(self._folder, name, "--weights-dir")

    async def _run(self, function: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function)
        except CheckpointError as error:
            raise InvalidRequestError(str(error), field="tensors") from None
        except ValueError as error:
            raise NotConfiguredError(str(error)) from None


def _create(path: Path):  # type: ignore[no-untyped-def]
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("wb")


def _changed_facts(info: EngineInfo) -> types_pb2.ModelInfo:
    """What changes with the weights."""
    return types_pb2.ModelInfo(
        weight_version=info.weight_version, weights_revision=info.weights_revision, weights_digest=info.weights_digest
    )
