"""The asyncio client. A build generates `quire_client.sync` from it (scripts/gen_sync.py)."""

from quire_client.aio.client import AsyncClient
from quire_client.aio.session import AsyncSession
from quire_client.aio.stream import AsyncGenerateStream

__all__ = ["AsyncClient", "AsyncGenerateStream", "AsyncSession"]
