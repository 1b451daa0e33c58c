"""The CPU backends by name."""

from __future__ import annotations

import logging
import os

from worker_svc.engine.backend import Backend, BackendUnavailableError
from worker_svc.engine.config import Determinism, Quantization
from worker_svc.engine.cpu.backend import CpuBackend
from worker_svc.engine.cpu.reference import ReferenceBackend
from worker_svc.engine.kernels.build import KernelBuildError
from worker_svc.engine.kernels.paths import PATH_ENV, CpuPathError

logger = logging.getLogger(__name__)


def make_backend(name: str, threads: int, determinism: Determinism, quantize: Quantization | None = None) -> Backend:
    """Makes the named backend. `cpu` falls back to `reference` if the kernels cannot be compiled.

    Raises BackendUnavailableError for an unknown name, and if the path that QUIRE_CPU_PATH names cannot run here.
    """
    if name == "reference":
        return ReferenceBackend(determinism, quantize)
    if name != "cpu":
        raise BackendUnavailableError(f"backend {name!r} is not one of cpu, cuda and reference")
    try:
        return CpuBackend(threads, quantize)
    except CpuPathError as error:
        raise BackendUnavailableError(str(error)) from error
    except KernelBuildError as error:
        if path := os.environ.get(PATH_ENV):
            raise BackendUnavailableError(f"{PATH_ENV} = {path}: {error}") from error
        logger.warning("no CPU kernels; plain torch operations are used, about 8 times slower: %s", error)
        return ReferenceBackend(determinism, quantize)
