"""Asking a llama-server: is it what was ordered, does its work, answers, is idle.

Ready means that the model's own task was seen done, not that a port is open: `/health` is green for a hung device.
Source: llama-server at build 10434, each answer seen in 2026-12.
"""

from __future__ import annotations

from typing import Any, Final

import httpx2
import msgspec

from llmgw.core.catalog import Task
from llmgw.core.replica import Assignment
from llmgw_agent.engines.llama_cpp import alias
from llmgw_agent.host import Loading, Probe, Purpose, Silent, Working, Wrong

ASK_S: Final = 4.0
"""Bound of a plain question, seconds: connecting and answering."""

WORK_S: Final = 50.0
"""Bound of the first real work, seconds: one token of a large model on a slow CPU, its weights still being paged in."""

WORDS_MAX: Final = 300
"""Most characters of an engine's own words that are passed on."""


class _Settings(msgspec.Struct):
    n_ctx: int


class _Props(msgspec.Struct):
    total_slots: int
    default_generation_settings: _Settings


class _Slot(msgspec.Struct):
    is_processing: bool = False


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Completion(msgspec.Struct):
    choices: list[msgspec.Raw]
    usage: _Usage


class _Embedding(msgspec.Struct):
    embedding: list[float]


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]


class _Score(msgspec.Struct):
    relevance_score: float


class _Ranking(msgspec.Struct):
    results: list[_Score]


class _Words(msgspec.Struct):
    message: str = ""


class _Error(msgspec.Struct):
    error: _Words


async def probe(http: httpx2.AsyncClient, base: str, order: Assignment, purpose: Purpose) -> Probe:
    """Ask the server at `base` (scheme, host, port). Bounded; raises nothing that a server or network may do."""
    headers = {"Authorization": f"Bearer {order.engine_key.reveal()}"}
    try:
        match purpose:
            case Purpose.LIVE:
                answer = await http.get(f"{base}/health", timeout=ASK_S)
                return Working() if answer.status_code == 200 else Loading(detail=_words(answer))
            case Purpose.IDLE:
                answer = await http.get(f"{base}/slots", headers=headers, timeout=ASK_S)
                slots = msgspec.json.decode(answer.content, type=list[_Slot]) if answer.status_code == 200 else None
                return Working(busy=None if slots is None else sum(slot.is_processing for slot in slots))
            case Purpose.READY:
                return await _ready(http, base, order, headers)
    except httpx2.ConnectError:
        return Loading(detail="nothing listens yet") if purpose is Purpose.READY else Silent(why="nothing listens")
    except httpx2.TimeoutException as error:
        return Silent(why=f"no answer in time ({type(error).__name__})")
    except httpx2.HTTPError as error:
        return Silent(why=str(error) or type(error).__name__)
    except msgspec.DecodeError as error:
        return Wrong(reason=f"it answers in a way llama-server does not: {error}")


async def _ready(http: httpx2.AsyncClient, base: str, order: Assignment, headers: dict[str, str]) -> Probe:
    answer = await http.get(f"{base}/health", timeout=ASK_S)
    if answer.status_code != 200:
        return Loading(detail=_words(answer))
    answer = await http.get(f"{base}/props", headers=headers, timeout=ASK_S)
    if answer.status_code == 503:
        return Loading(detail=_words(answer))
    if answer.status_code != 200:
        return Wrong(reason=f"/props answers {answer.status_code}, so it is not the engine that was started")
    props = msgspec.json.decode(answer.content, type=_Props)
    want, context = order.launch, props.default_generation_settings.n_ctx
    if props.total_slots != want.slots:
        return Wrong(reason=f"{want.slots} slots were ordered, the engine has {props.total_slots}")
    if context < want.context:
        return Wrong(
            reason=f"a context of {want.context} tokens a slot was ordered, the engine gives {context}: "
            "the model was trained for no more"
        )
    path, body, kind = _work(order)
    answer = await http.post(f"{base}{path}", headers=headers, json=body, timeout=WORK_S)
    if answer.status_code in (500, 503):
        return Loading(detail=_words(answer))
    if answer.status_code != 200:
        return Wrong(reason=f"it can't {want.task.value}: {answer.status_code} {_words(answer)}")
    if not _did(msgspec.json.decode(answer.content, type=kind)):
        return Wrong(reason=f"asked to {want.task.value} it answers nothing")
    return Working(context=context, slots=props.total_slots)


def _work(order: Assignment) -> tuple[str, dict[str, Any], type[msgspec.Struct]]:
    """The smallest piece of real work of the model's task: path, body, type of the answer."""
    name = alias(order)
    match order.launch.task:
        case Task.GENERATE:
            return "/v1/completions", {"model": name, "prompt": "Hi", "max_tokens": 1}, _Completion
        case Task.EMBED:
            return "/v1/embeddings", {"model": name, "input": "Hi"}, _Embeddings
        case Task.RERANK:
            return "/v1/rerank", {"model": name, "query": "Hi", "documents": ["Hi", "Ho"]}, _Ranking


def _did(done: object) -> bool:
    match done:
        case _Completion():
            return bool(done.choices) and done.usage.completion_tokens > 0
        case _Embeddings():
            return bool(done.data) and bool(done.data[0].embedding)
        case _Ranking():
            return bool(done.results)
        case _:
            return False


def _words(answer: httpx2.Response) -> str:
    """What the engine itself says went wrong, bounded."""
    try:
        words = msgspec.json.decode(answer.content, type=_Error).error.message
    except msgspec.DecodeError:
        words = answer.text
    return (words or f"status {answer.status_code}")[:WORDS_MAX]
