"""What is counted, and that nobody outside decides how many series there are."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmgw.testing.gateway import Rig, chat, request
from llmgw.testing.stub_engine import Stream, sse

pytestmark = pytest.mark.anyio


async def scrape(rig: Rig) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample, by name and labels."""
    answer = await rig.ask(request(method="GET", path="/metrics"))
    assert answer.headers[b"content-type"].startswith(b"text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
    }


def sample(samples: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float | None:
    return samples.get((name, frozenset(labels.items())))


async def test_what_a_request_leaves_behind(rig: Rig) -> None:
    engine = await rig.engine(Stream(events=sse("a", "b")))
    rig.route(engine.port, model='odd "name"\n\\')
    name = 'odd "name"\n\\'
    await rig.ask(request(chat(model=name, stream=True)))
    await rig.ask(request(chat(model=name)))
    samples = await scrape(rig)
    assert sample(samples, "llmgw_gateway_requests_total", model=name, code="200") == 2
    assert sample(samples, "llmgw_gateway_request_seconds_count", model=name) == 2
    assert sample(samples, "llmgw_gateway_first_byte_seconds_count", model=name) == 1
    assert sample(samples, "llmgw_gateway_chunks_total", model=name) == 3
    assert sample(samples, "llmgw_gateway_in_flight", model=name) == 0
    assert sample(samples, "llmgw_gateway_queued", model=name) == 0
    assert sample(samples, "llmgw_gateway_replicas", model=name, state="in_rotation") == 1
    assert sample(samples, "llmgw_gateway_replicas", model=name, state="ejected") == 0


async def test_h03_no_caller_makes_series(rig: Rig) -> None:
    rig.route(model="m")
    await rig.ask()
    before = await scrape(rig)
    for n in range(300):
        await rig.ask(request(chat(model=f"model-{n}")))
        await rig.ask(request(chat(), path=f"/v1/{n}"))
        await rig.ask(request(chat(), method="PURGE", path=f"/v1/{n}"))
        await rig.ask(request(b"{%d" % n))
        await rig.ask(b"\x00%d" % n)
    after = await scrape(rig)
    assert len(after) - len(before) <= 4
    assert sample(after, "llmgw_gateway_requests_rejected_total", code="404") == 900


async def test_h01_a_model_that_is_gone_leaves_no_series(rig: Rig) -> None:
    rig.route(model="stays")
    before = {key for key, _ in ((key, 0) for key in await scrape(rig))}
    for n in range(50):
        rig.route(model=f"gone-{n}")
        await rig.ask(request(chat(model=f"gone-{n}")))
    rig.names = {"stays": rig.names["stays"]}
    rig.routes = {}
    rig.swap()
    samples = await scrape(rig)
    assert not [key for key in samples if any(value.startswith("gone") for _, value in key[1])]
    assert len(samples) <= len(before) + 2
