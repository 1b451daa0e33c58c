"""What asyncio leaves to its users."""

from __future__ import annotations

import asyncio
from typing import Any


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait for their ends, whatever they are."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
