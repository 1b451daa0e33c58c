"""Memory that a worker of another host writes to over NIXL (https://github.com/ai-dynamo/nixl): RDMA where the network
has it, else TCP. NIXL neither authenticates nor encrypts; the records are checked like any others.

There is no progress thread, because it would use a core all the time. The writer waits for its own writes; the owner of
the memory calls `progress` while it waits for them, which a first connection and a network without RDMA need.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import secrets
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
from quire.internal.v1 import worker_pb2

BACKENDS = ["UCX"]
MAX_PEERS = 16
WRITE_TIMEOUT_S = 5.0  # of a message's worth of records
REST_S = 60.0  # after a failure, records go by gRPC
POLL_S = 0.0001


def has_nixl() -> bool:
    """Whether the package is installed. Does not import it."""
    return find_spec("nixl") is not None


class NixlError(RuntimeError):
    """NIXL cannot write; the message says why."""


class NixlAgent:
    """The end of this process. Its methods may be called in any thread."""

    def __init__(self) -> None:
        """Raises NixlError if the library finds no network that it can use."""
        from nixl import _api as nixl  # its import takes seconds

        for name in ("nixl", nixl.__name__.partition(".")[0], nixl.__name__):
            logging.getLogger(name).setLevel(logging.WARNING)
        config = nixl.nixl_agent_config(
            enable_prog_thread=False, backends=BACKENDS, sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        with _named_errors("NIXL does not start"):
            self._agent = nixl.nixl_agent(f"quire-{secrets.token_hex(8)}", config)
        self._guard = threading.Lock()  # of what follows
        self._registered: dict[int, object] = {}  # by address
        self._forgotten: list[memoryview] = []  # never unmapped: a late write would hit what is there by then
        self._peers: dict[bytes, str] = {}  # names of other agents by their descriptions; last used last
        self._staging = np.empty(0, np.uint8)
        self._rests_until = 0.0

    @property
    def is_resting(self) -> bool:
        """A write has failed a short time ago, so another one would probably cost its timeout."""
        return time.monotonic() < self._rests_until

    # -- the owner of the memory --------------------------------------------------------------------------------------

    def register(self, view: memoryview) -> worker_pb2.NixlMemory:
        """Let others write to this memory until `forget`. Raises NixlError."""
        address = _address(view)
        with self._guard, _named_errors("NIXL does not register memory"):
            if address not in self._registered:
                self._registered[address] = self._agent.register_memory([(address, len(view), 0, "")], "DRAM")
            return worker_pb2.NixlMemory(agent=self._agent.get_agent_metadata(), address=address)

    def forget(self, view: memoryview) -> None:
        """End the use of memory. Without RDMA, a write that has begun may still arrive, so the memory stays mapped,
        without its pages.
        """
        with self._guard:
            registered = self._registered.pop(_address(view), None)
            if registered is None:
                return
            self._agent.deregister_memory(registered)
            self._forgotten.append(view)
        with contextlib.suppress(OSError):
            if isinstance(view.obj, mmap.mmap):
                view.obj.madvise(mmap.MADV_REMOVE)

    def progress(self) -> None:
        """Let writes of others proceed."""
        with contextlib.suppress(Exception):  # the writer learns of a failure, and says so in its call
            self._agent.get_new_notifs()

    # -- the writer ---------------------------------------------------------------------------------------------------

    def staging(self, num_bytes: int) -> memoryview:
        """Memory to write from. Only one thread may use it."""
        if len(self._staging) < num_bytes:
            self.forget(self._staging.data)
            self._staging = np.empty(max(num_bytes, 2 * len(self._staging)), np.uint8)
            self.register(self._staging.data)
        return self._staging.data[:num_bytes]

    def write(self, memory: worker_pb2.NixlMemory, offset: int, data: memoryview) -> None:
        """Copy a part of `staging` to the memory of another worker, and wait for it. Raises NixlError."""
        try:
            with _named_errors("NIXL does not write to the memory of the caller"):
                self._write(memory, offset, data)
        except NixlError:
            self._rests_until = time.monotonic() + REST_S
            self._drop_peer(memory.agent)
            raise

    def _write(self, memory: worker_pb2.NixlMemory, offset: int, data: memoryview) -> None:
        agent, give_up_at = self._agent, time.monotonic() + WRITE_TIMEOUT_S
        here = agent.get_xfer_descs([(_address(data), len(data), 0)], "DRAM")
        there = agent.get_xfer_descs([(memory.address + offset, len(data), 0)], "DRAM")
        handle = agent.initialize_xfer("WRITE", here, there, self._peer(memory.agent))
        try:
            state = agent.transfer(handle)
            while state == "PROC" and time.monotonic() < give_up_at:
                time.sleep(POLL_S)
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise NixlError("the time is over" if state == "PROC" else state)
        finally:
            handle.release()

    def _peer(self, description: bytes) -> str:
        with self._guard:
            name = self._peers.pop(description, None) or self._agent.add_remote_agent(description)
            self._peers[description] = name
            for other in list(self._peers)[:-MAX_PEERS]:
                self._remove(other)
            return name

    def _drop_peer(self, description: bytes) -> None:
        with self._guard:
            if description in self._peers:
                self._remove(description)

    def _remove(self, description: bytes) -> None:
        name = self._peers.pop(description)
        if name not in self._peers.values():
            self._agent.remove_remote_agent(name)


@contextlib.contextmanager
def _named_errors(what: str) -> Iterator[None]:
    """The library's errors, which have no common class, as NixlError."""
    try:
        yield
    except Exception as error:
        raise NixlError(f"{what}: {error}") from None


def _address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data
