"""The etcd of the tests is etcd: it can be killed, stopped, restarted, and is empty again for the next test."""

from pathlib import Path

import anyio
import httpx2
import pytest

from llmgw.testing.etcd import Etcd

pytestmark = pytest.mark.etcd


async def put(etcd: Etcd, *, member: int = 0) -> dict[str, object]:
    async with etcd.client() as client:
        answer = await client.post(f"{etcd.endpoints[member]}/v3/kv/put", json={"key": "YQ==", "value": "YQ=="})
        answer.raise_for_status()
        reply: dict[str, object] = answer.json()
        return reply


async def count(etcd: Etcd) -> int:
    async with etcd.client() as client:
        answer = await client.post(f"{etcd.endpoints[0]}/v3/kv/range", json={"key": "AA==", "range_end": "AA=="})
        return int(answer.json().get("count", "0"))


@pytest.mark.anyio
@pytest.mark.parametrize("turn", [1, 2])
async def test_each_test_finds_it_empty(etcd: Etcd, turn: int) -> None:
    assert await count(etcd) == 0
    await put(etcd)
    assert await count(etcd) == 1


@pytest.mark.anyio
async def test_data_and_port_outlive_a_kill(etcd: Etcd) -> None:
    await put(etcd)
    before = etcd.members[0].pid
    etcd.members[0].kill()
    with pytest.raises(httpx2.TransportError):
        await put(etcd)
    etcd.members[0].restart()
    await etcd.healthy()
    assert await count(etcd) == 1
    assert etcd.members[0].pid != before


@pytest.mark.anyio
async def test_a_stopped_member_of_three_answers_nothing_and_the_others_write(etcd3: Etcd) -> None:
    etcd3.members[0].stop()
    async with etcd3.client(timeout_s=0.5) as client:
        with pytest.raises(httpx2.TimeoutException):
            await client.get(f"{etcd3.endpoints[0]}/health")
    with anyio.fail_after(30):
        while True:
            try:
                await put(etcd3, member=1)
                break
            except httpx2.HTTPError:  # until the two have a leader
                continue
    etcd3.members[0].cont()
    await etcd3.healthy()
    assert await count(etcd3) == 1


def test_a_member_that_ends_by_itself_is_reported_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "m0").write_text("no directory for data")
    with pytest.raises(RuntimeError, match=r"member m0 ended\n.*m0"):
        Etcd(tmp_path)
