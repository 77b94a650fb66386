"""The agent itself: supervisor, session and host put together.

Engines are supervised from the first moment, from the saved assignments; the store is joined when it answers.
"""

from __future__ import annotations

from llmgw.config import AgentConfig
from llmgw.core.ids import Ids
from llmgw.obs.clock import WallClock
from llmgw.store.port import Store
from llmgw_agent.host import Host


async def run_agent(store: Store, host: Host, config: AgentConfig, *, wall: WallClock, ids: Ids) -> None:
    """Run one node's agent until cancelled. With `on_exit: keep` the engines outlive it.

    Uses `anyio.current_time()` and `anyio.sleep` only, so a run under MockClock moves all of it.
    """
    raise NotImplementedError
