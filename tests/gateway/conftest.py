"""The gateway's tests run on what the gateway runs on: asyncio with uvloop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from llmgw.config import GatewayConfig
from llmgw.testing.gateway import Rig


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture
def config() -> GatewayConfig:
    """The configuration of the rig; a test or module that needs another overrides this."""
    return GatewayConfig()


@pytest.fixture
async def rig(config: GatewayConfig) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        running = await Rig(stack, config).start()
        yield running
        await running.stop()
