"""The properties that all workers of one scheduler share. A worker that differs is refused."""

from __future__ import annotations

import logging

import grpc
from quire.v1 import types_pb2

from svc_common.errors import ServiceError

log = logging.getLogger(__name__)

# num_blocks and max_num_seqs may differ between workers; these may not.
SHARED_FACTS = (
    "model",
    "dtype",  # dtype to bundle_digest are checked before the revision: it depends on them, but does not explain them
    "quantization",
    "kv_cache_dtype",
    "determinism",
    "numerics",  # compared for exact workers only
    "weights_digest",
    "bundle_digest",
    "revision",
    "block_size",
    "max_model_len",
    "attention_window",
    "vocab_size",
    "eos_token_ids",
    "encoder",
)
SETTINGS = {"weights_digest": "checkpoint (--model)"}  # the setting to change, if it is not named like the fact


class WorkerRefusedError(ServiceError):
    """The worker differs from the other workers. It may serve under another scheduler."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Agreement:
    """The facts of the first worker. Later workers must share them while the model is in use.

    `pinned`: the only revision that this scheduler accepts; empty: any.
    """

    def __init__(self, pinned: str = "") -> None:
        self._pinned = pinned
        self._worker_id = ""
        self._info: types_pb2.ModelInfo | None = None

    @property
    def info(self) -> types_pb2.ModelInfo | None:
        """The model, as described by the first worker; None before the first worker."""
        return self._info

    def start_with(self, worker_id: str, info: types_pb2.ModelInfo) -> None:
        """Set the first worker."""
        self._worker_id, self._info = worker_id, info

    def check_pinned(self, worker_id: str, info: types_pb2.ModelInfo) -> None:
        """Raise WorkerRefusedError if the worker does not have the pinned revision."""
        if self._pinned and info.revision != self._pinned:
            raise WorkerRefusedError(
                f"worker {worker_id} has revision {info.revision!r}, but this scheduler accepts only {self._pinned!r} "
                "(--revision); start the worker with that checkpoint, or change --revision of all schedulers",
                field="capacity.info.revision",
            )

    def check(self, worker_id: str, info: types_pb2.ModelInfo) -> None:
        """Raise WorkerRefusedError, naming the first difference, if this worker differs from the first worker."""
        if self._info is None:
            return
        is_exact = info.determinism == types_pb2.DETERMINISM_EXACT
        is_updated = info.revision == self._info.revision  # then the worker gets the updates of the weights
        for name in SHARED_FACTS:
            if (name == "numerics" and not is_exact) or (name == "weights_digest" and is_updated):
                continue
            mine, theirs = getattr(info, name), getattr(self._info, name)
            if mine != theirs:
                raise WorkerRefusedError(
                    f"worker {worker_id} has {name} {_shown(name, mine)}, but this scheduler serves "
                    f"{_shown(name, theirs)} (from worker {self._worker_id}); start the worker with the same "
                    f"{SETTINGS.get(name, name)}, or under another scheduler",
                    field=f"capacity.info.{name}",
                )

    def warn_numerics_mismatch(self, worker_id: str, info: types_pb2.ModelInfo) -> None:
        """Warn about differences that are accepted but may change tokens of a sequence that moves between workers."""
        for name in ("numerics", "build"):
            mine, theirs = getattr(info, name), getattr(self._info, name)
            if mine != theirs:
                log.warning(
                    "worker %s has %s %s, worker %s has %s: a sequence that moves between them may continue with "
                    "another token where two tokens are almost equally likely",
                    worker_id, name, _shown(name, mine), self._worker_id, _shown(name, theirs),
                )  # fmt: skip


def _shown(name: str, value: object) -> str:
    """A fact as text for messages: digests as hex, enums by name."""
    if isinstance(value, bytes):
        return value.hex()
    if name == "determinism" and isinstance(value, int):
        return types_pb2.Determinism.Name(types_pb2.Determinism.ValueType(value)).removeprefix("DETERMINISM_").lower()
    if value == "":
        return "none"
    return repr(value) if isinstance(value, str) else str(value)
