"""Gateways reduced to what they tell of their load: on a bare index with its sampler, and as a process on a store.

`Loads` belongs to a `Cluster`, where the test moves the clock; `LoadTeller` runs beside real controllers, under a real
or a virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import anyio
import msgspec

from llmgw.core.autoscale import moved, observe, waiting
from llmgw.core.live import LOAD_EVERY_S, GatewayLoad, Heard, ModelLoad, take_sample
from llmgw.errors import LeaseLost, OutcomeUnknown, Unavailable
from llmgw.store import codec, keys
from llmgw.store.port import PutOp, Store
from llmgw.testing.cluster import Cluster

TTL_S: Final = 30
"""Of a gateway's lease."""

RETRY_S: Final = 1.0
"""Pause after the store failed."""

SAMPLE_S: Final = 15.0
"""Between two samples, as `scale_every_s` has it by default."""

Requests = Mapping[str, tuple[int, int]]
"""Model -> (in flight, queued)."""


class Requesting:
    """The requests of one gateway, and since when each model has had none."""

    def __init__(self) -> None:
        self._now: dict[str, tuple[int, int]] = {}
        self._ended_s: dict[str, float] = {}

    def change(self, requests: Requests, *, mono_s: float) -> None:
        """From `mono_s` on these models have so many."""
        for model, (in_flight, queued) in requests.items():
            if not in_flight + queued and any(self._now.get(model, (0, 0))):
                self._ended_s[model] = mono_s
            self._now[model] = (in_flight, queued)

    def models(self, *, mono_s: float) -> dict[str, ModelLoad]:
        """As the record has them at `mono_s`."""
        return {
            model: ModelLoad(
                in_flight=in_flight,
                queued=queued,
                idle_s=0.0 if in_flight + queued else mono_s - self._ended_s[model],
            )
            for model, (in_flight, queued) in self._now.items()
            if in_flight + queued or model in self._ended_s
        }


class Loads:
    """Gateways over `cluster`, and the sampler of its leader."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.heard: dict[str, Heard] = {}
        self.vanished: dict[str, float] = {}
        self._gateways: dict[str, Requesting] = {}

    def tell(self, requests: Requests, *, gateway: str = "g") -> None:
        """A gateway has other requests from now on, and writes it; what can't wait for the next sample does not."""
        self._gateways.setdefault(gateway, Requesting()).change(requests, mono_s=self.cluster.now.mono_s)
        self._write(gateway)

    def tell_again(self) -> None:
        """Every gateway that can be read writes its record once more."""
        for gateway in list(self._gateways):
            if gateway in self.heard and self.heard[gateway].load is not None:
                self._write(gateway)

    def spoil(self, gateway: str = "g") -> None:
        """A gateway's record becomes unreadable."""
        self.heard[gateway] = Heard(load=None, revision=self._revision(gateway), mono_s=self.cluster.now.mono_s)

    def vanish(self, gateway: str = "g") -> None:
        """A gateway's record goes."""
        del self.heard[gateway]
        self.vanished[gateway] = self.cluster.now.mono_s

    def sample(self, only: frozenset[str] | None = None) -> None:
        """The leader takes a sample; what it leads to is dirty."""
        c = self.cluster
        sample = take_sample(self.heard, self.vanished, now=c.now, lost_after_s=c.settings.lost_after_s)
        load = observe(c.view.load, sample, index=c.index, now=c.now, only=only)
        c.view = msgspec.structs.replace(c.view, load=load)
        c.index.dirty.models |= moved(c.index, load, now=c.now)

    def run(self, seconds: float, *, every_s: float = SAMPLE_S, look: Callable[[], None] = lambda: None) -> None:
        """Time passes: gateways tell, samples are taken, passes run, agents answer; `look` is called each time."""
        end_s = self.cluster.now.mono_s + seconds
        while self.cluster.now.mono_s < end_s:
            self.cluster.advance(min(every_s, end_s - self.cluster.now.mono_s))
            self.tell_again()
            self.sample()
            self.cluster.settle()
            look()

    def _write(self, gateway: str) -> None:
        now = self.cluster.now
        models = self._gateways[gateway].models(mono_s=now.mono_s)
        load = GatewayLoad(gateway=gateway, models=models, at=now.wall_s)
        self.heard[gateway] = Heard(load=load, revision=self._revision(gateway), mono_s=now.mono_s)
        self.vanished.pop(gateway, None)
        if names := waiting(self.cluster.index, self.cluster.view.load, load):
            self.sample(names)

    def _revision(self, gateway: str) -> int:
        return self.heard[gateway].revision + 1 if gateway in self.heard else 1


class LoadTeller:
    """One gateway on a store: a leased record, kept and rewritten by `run`, changed at once by `say`.

    `wall`: its machine's clock, for `GatewayLoad.at`.
    """

    def __init__(self, store: Store, gateway: str, *, wall: Callable[[], float] = lambda: 0.0) -> None:
        self._store = store
        self._gateway = gateway
        self._wall = wall
        self._requests = Requesting()
        self._said = anyio.Event()

    def say(self, requests: Requests) -> None:
        """These models have so many requests (in flight, queued) from now on; the others stay as they are."""
        self._requests.change(requests, mono_s=anyio.current_time())
        self._said.set()

    async def run(self) -> None:
        """Tell until cancelled, then leave the store: the record goes with the lease.

        While the store can't be reached, what was to be told waits; a lease that ran out is replaced.
        """
        lease: int | None = None
        try:
            while True:
                self._said, pause_s = anyio.Event(), LOAD_EVERY_S
                try:
                    if lease is None:
                        lease = (await self._store.grant(TTL_S)).id
                    await self._store.keepalive(lease)
                    await self._write(lease)
                except LeaseLost:
                    lease, pause_s = None, RETRY_S
                except (Unavailable, OutcomeUnknown):
                    pause_s = RETRY_S
                with anyio.move_on_after(pause_s):
                    await self._said.wait()
        finally:
            if lease is not None:
                with anyio.move_on_after(1, shield=True):
                    await self._revoke(lease)

    async def _write(self, lease: int) -> None:
        load = GatewayLoad(
            gateway=self._gateway,
            models=self._requests.models(mono_s=anyio.current_time()),
            snapshot_age_s=0.0,
            at=self._wall(),
        )
        put = PutOp(key=keys.gateway_key(self._gateway), value=codec.encode_stored(load), lease=lease)
        await self._store.txn([], [put])

    async def _revoke(self, lease: int) -> None:
        try:
            await self._store.revoke(lease)
        except Unavailable:
            return  # it runs out by itself
