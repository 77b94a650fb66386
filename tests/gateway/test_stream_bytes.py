"""The bytes of a stream reach the client as the engine wrote them, however they are cut up on the way."""

from __future__ import annotations

import pytest

from llmgw.testing.gateway import Rig, chat, request
from llmgw.testing.stub_engine import Stream

pytestmark = pytest.mark.anyio

TEXT = "ä€😀 中文 𝄞".encode()

PARTS = (
    b": a comment\n\n",
    b'data: {"choices":[{"delta":{"content":"' + TEXT + b'"}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"' + TEXT + b'"}}]}\r\n\r\n',
    b"event: x\nid: 7\ndata: first line\ndata: second " + TEXT + b"\n\n",
    b"data: [DONE]\n\n",
)


@pytest.mark.parametrize("alias", [False, True])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_d03_characters_cut_in_two_arrive_whole(rig: Rig, version: str, *, alias: bool) -> None:
    engine = await rig.engine(Stream(events=PARTS, bytewise=True))
    rig.route(engine.port)
    if alias:
        rig.names["other"] = rig.names["m"]
        rig.swap()
    model = "other" if alias else "m"
    answer = await rig.ask(request(chat(model=model, stream=True, say="ä€😀"), version=version))
    assert answer.body == b"".join(PARTS)
    assert answer.whole
    assert engine.seen[0].body == chat(model="m", stream=True, say="ä€😀")


async def test_d03_each_byte_is_passed_on_as_it_comes(rig: Rig) -> None:
    engine = await rig.engine(Stream(events=(TEXT,), bytewise=True, pause_s=60, hang_after=1))
    rig.route(engine.port)
    wire = await rig.connect()
    await wire.send(request(chat(stream=True)))
    await wire.head()
    got = b""
    while len(got) < len(TEXT):  # nothing is held back for the rest of a character
        got += await wire.chunk()
    assert got == TEXT
