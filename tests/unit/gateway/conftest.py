"""A fake scheduler with a byte-level tokenizer, and a gateway attached to it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.unit.gateway.fakes import FakeScheduler, TestGateway, make_bundle, make_info


@pytest.fixture(scope="session")
def bundle() -> bytes:
    return make_bundle()


@pytest.fixture
async def scheduler(bundle: bytes) -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler(make_info(bundle), bundle)
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def gateway(scheduler: FakeScheduler) -> AsyncIterator[TestGateway]:
    async with TestGateway([scheduler.address]) as running:
        await running.ready()
        yield running
