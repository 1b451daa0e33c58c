"""The synchronous client. scripts/gen_sync.py generates every module but `transport` from `quire_client.aio`."""

from quire_client.sync.client import Client
from quire_client.sync.session import Session
from quire_client.sync.stream import GenerateStream

__all__ = ["Client", "GenerateStream", "Session"]
