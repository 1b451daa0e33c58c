"""The asyncio client. scripts/gen_sync.py generates `quire_client.sync` from it."""

from quire_client.aio.client import AsyncClient
from quire_client.aio.stream import AsyncGenerateStream

__all__ = ["AsyncClient", "AsyncGenerateStream"]
