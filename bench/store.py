"""How fast the store on etcd is from one process, and what a long listing costs. A sanity figure, not a contest.

    python bench/store.py [--seconds S] [--backend trio|asyncio] [--members N]

Starts an etcd of its own. Client, members and load share the machine's cores, so figures compare with one another and
with an earlier run on the same machine only.
"""

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio

from llmgw.config import EtcdConfig
from llmgw.store.etcd import open_etcd
from llmgw.store.port import PutOp, Store
from llmgw.testing.etcd import Etcd

KEYS, VALUE = 10_000, b"x" * 1024


async def rate(call: Callable[[int], Awaitable[object]], *, at_once: int, seconds: float) -> str:
    """Calls a second, and the time of one, with so many under way."""
    took: list[float] = []
    end = time.perf_counter() + seconds

    async def loop(worker: int) -> None:
        while (start := time.perf_counter()) < end:
            await call(worker)
            took.append(time.perf_counter() - start)

    async with anyio.create_task_group() as tasks:
        for worker in range(at_once):
            tasks.start_soon(loop, worker)
    took.sort()
    p50, p99 = statistics.median(took), took[int(len(took) * 0.99)]
    return f"{len(took) / seconds:7.0f}/s   p50 {p50 * 1e3:6.2f} ms   p99 {p99 * 1e3:6.2f} ms"


async def calls(store: Store, seconds: float) -> None:
    """The unary calls, alone and many at once."""
    lease = await store.grant(600)

    async def put(worker: int) -> None:
        await store.txn([], [PutOp(key=f"/bench/{worker}", value=VALUE[:512])])

    async def get(worker: int) -> None:
        await store.get(f"/bench/{worker}")

    async def keepalive(_: int) -> None:
        await store.keepalive(lease.id)

    for name, call in (("put", put), ("get", get), ("keepalive", keepalive)):
        for at_once in (1, 8, 32):
            print(f"{name:<10} x{at_once:<3} {await rate(call, at_once=at_once, seconds=seconds)}", flush=True)


async def listing(store: Store) -> None:
    """A long listing, and the longest time for which it kept others from running."""
    for first in range(0, KEYS, 100):
        await store.txn([], [PutOp(key=f"/long/{n:06}", value=VALUE) for n in range(first, first + 100)])
    worst = 0.0

    async def tick() -> None:
        nonlocal worst
        while True:
            before = time.perf_counter()
            await anyio.sleep(0.001)
            worst = max(worst, time.perf_counter() - before - 0.001)

    for _ in range(3):
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        worst = 0.0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tick)
            await anyio.sleep(0.05)
            wall, cpu = time.perf_counter(), time.process_time()
            found = await store.list(["/long/"])
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            tasks.cancel_scope.cancel()
        assert len(found.items) == KEYS
        grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / 1024
        del found
        print(
            f"list of {KEYS} keys of {len(VALUE)} bytes: {wall * 1e3:.0f} ms, CPU {cpu * 1e3:.0f} ms,"
            f" longest stall {worst * 1e3:.1f} ms, peak memory +{grown_mb:.0f} MB",
            flush=True,
        )


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="for each figure")
    parser.add_argument("--backend", choices=["trio", "asyncio"], default="trio")
    parser.add_argument("--members", type=int, choices=[1, 3], default=3)
    given = parser.parse_args()

    async def run(etcd: Etcd) -> None:
        async with open_etcd(EtcdConfig(endpoints=etcd.endpoints), jitter=lambda: 0.0) as store:
            await calls(store, given.seconds)
            await listing(store)

    with tempfile.TemporaryDirectory() as directory, Etcd(Path(directory), members=given.members) as etcd:
        options = {"use_uvloop": True} if given.backend == "asyncio" else {}
        anyio.run(run, etcd, backend=given.backend, backend_options=options)


if __name__ == "__main__":
    main()
