"""What an agent that comes up makes of its saved state and of the processes that bear its mark.

Three things can have happened since: the agent died and the engines did not, the engines died too, or the machine was
restarted. A process counts as the saved one only when pid, start time, boot and mark all agree; whatever else bears
a shard's mark is a left-over of it, ended before anything new is started.
"""

from __future__ import annotations

from typing import Final

import msgspec

from llmgw.config import AgentConfig
from llmgw.core.units import Now
from llmgw_agent.event import Restored
from llmgw_agent.host import Found
from llmgw_agent.shard import GONE, Shard, Stage, in_gang
from llmgw_agent.state import SavedShard

_STAGES: Final = {stage.value: stage for stage in Stage}
_UNSEEN: Final = "ended while no agent watched"


def restore(event: Restored, *, boot_id: str, now: Now, config: AgentConfig) -> list[Shard]:
    """The shards to begin with: all saved ones, and one for each found name that was not saved."""
    saved, found = event.saved, event.found
    by_name: dict[str, list[Found]] = {}
    for item in found:
        if item.node == config.name:
            by_name.setdefault(item.shard, []).append(item)
    shards = [
        _restore(
            _older(entry, by_name.get(entry.name, [])) if event.lost else entry,
            by_name.pop(entry.name, []),
            boot_id=boot_id,
            now=now,
            config=config,
        )
        for entry in (() if saved is None else saved.shards)
    ]
    shards.extend(_found(name, items, now) for name, items in sorted(by_name.items()))
    return shards


def _older(entry: SavedShard, found: list[Found]) -> SavedShard:
    """An entry of a copy that is older than what was lost: good for its order, not for what became of it.

    What runs is taken as it is; what does not run may have been told to stop, so it waits for the store's word.
    """
    if not found:
        over = entry.stop or entry.order is None or entry.stage in (Stage.STOPPED.value, Stage.FAILED.value)
        began = entry.stage not in (Stage.HELD.value, Stage.WAITING.value)
        stage = Stage.STOPPED if over else Stage.FAILED if began and in_gang(entry.order) else Stage.HELD
        return msgspec.structs.replace(entry, stage=stage.value, process=None, incarnation=None)
    main = min(found, key=lambda item: item.process.started)
    port = entry.port if main.port is None else main.port
    stage = Stage.TERMINATING if entry.stop else Stage.FOUND if entry.order is None else Stage.LOADING
    return msgspec.structs.replace(
        entry, stage=stage.value, process=main.process, incarnation=main.incarnation, port=port
    )


def _restore(entry: SavedShard, found: list[Found], *, boot_id: str, now: Now, config: AgentConfig) -> Shard:
    shard = Shard(
        name=entry.name,
        stage=Stage.HELD,
        phase_at=entry.phase_at,
        order=entry.order,
        order_rev=entry.order_rev,
        assigned=entry.assigned,
        stop=entry.stop,
        port=entry.port,
        build=entry.build,
        attempts=entry.attempts,
        reason=entry.reason,
        stage_mono_s=now.mono_s,
    )
    stage = _STAGES.get(entry.stage)
    main = next((item for item in found if item.incarnation == entry.incarnation and _same(item, entry)), None)
    if main is not None and stage not in GONE:
        shard.process, shard.incarnation = main.process, main.incarnation
        shard.port = entry.port if entry.port is not None else main.port
        _adopt(shard, entry, stage, now=now, config=config)
    elif found:
        # The main process is gone, the rest of its tree is not.
        shard.stage, shard.after = Stage.KILLING, stage if stage in GONE else _next(shard)
        if stage not in GONE:
            _lost(shard, _UNSEEN, config=config)
    elif stage in (Stage.HELD, Stage.WAITING, Stage.STOPPED, Stage.FAILED):
        shard.stage = stage
    else:
        _gone(shard, entry, boot_id=boot_id, now=now, config=config)
    if shard.stage in GONE:
        shard.port = None
    if shard.stage is not stage:
        shard.phase_at = now.wall_s
    return shard


def _adopt(shard: Shard, entry: SavedShard, stage: Stage | None, *, now: Now, config: AgentConfig) -> None:
    """Its main process lives: go on where the last agent was."""
    order_start_s = 0.0 if shard.order is None else shard.order.start_s
    drain_s = 0.0 if shard.order is None else shard.order.drain_s
    match stage:
        case Stage.READY if shard.port is not None and shard.order is not None and not shard.stop:
            shard.stage, shard.context, shard.slots = Stage.READY, entry.context, entry.slots
            shard.due_mono_s = now.mono_s + config.stable_s if shard.attempts else None
        case Stage.LEAVING | Stage.DRAINING if shard.port is not None:
            shard.stage, shard.due_mono_s = Stage.DRAINING, now.mono_s + drain_s
        case Stage.TERMINATING | Stage.KILLING:
            shard.stage, shard.after = Stage.KILLING, _next(shard)
        case Stage.FOUND:
            shard.stage = Stage.FOUND
        case _ if shard.stop or shard.order is None or shard.port is None:
            shard.stage, shard.after = Stage.KILLING, _next(shard)
        case _:
            shard.stage, shard.due_mono_s = Stage.LOADING, now.mono_s + order_start_s
            shard.progress_mono_s = now.mono_s


def _gone(shard: Shard, entry: SavedShard, *, boot_id: str, now: Now, config: AgentConfig) -> None:
    """Nothing of it lives. After a reboot that is nobody's fault; within one boot the engine failed."""
    rebooted = entry.process is not None and entry.process.boot_id != boot_id
    if shard.stop:
        shard.stage = Stage.STOPPED
    elif shard.order is None:
        # What it was is not known here. If the store has its order it starts again, if not it is forgotten.
        shard.stage, shard.reason = Stage.HELD, "its process is gone, and its order is not known yet"
    elif shard.gang:
        # Its peers have lost it, whatever the cause: only a new gang will do.
        shard.stage, shard.reason = Stage.FAILED, "the machine was restarted" if rebooted else _UNSEEN
    elif rebooted or entry.stage in (Stage.LAUNCHING.value, Stage.TERMINATING.value, Stage.KILLING.value):
        shard.stage = Stage.WAITING
        shard.reason = "the machine was restarted" if rebooted else shard.reason
    else:
        shard.stage = Stage.WAITING
        _lost(shard, _UNSEEN, config=config)
        if shard.after is Stage.FAILED:
            shard.stage, shard.after = Stage.FAILED, None
        else:
            shard.due_mono_s = now.mono_s + config.restart_backoff_s * 2 ** (shard.attempts - 1)


def _lost(shard: Shard, why: str, *, config: AgentConfig) -> None:
    """Count a failure that nobody saw."""
    if shard.stop or shard.order is None:
        return
    shard.attempts += 1
    shard.reason = why
    if shard.attempts > config.restart_attempts or shard.gang:
        shard.after = Stage.FAILED


def _next(shard: Shard) -> Stage:
    """Without an order, and never told to stop, it has failed: stopped is final, so nobody would build it anew.

    So has a part of a gang: it is never started twice.
    """
    if shard.stop:
        return Stage.STOPPED
    return Stage.FAILED if shard.order is None or shard.gang else Stage.WAITING


def _same(item: Found, entry: SavedShard) -> bool:
    """Whether a live process is the saved one. None was saved: its start was not heard of, its mark says enough."""
    return entry.process is None or item.process == entry.process


def _found(name: str, items: list[Found], now: Now) -> Shard:
    """Runs, and no state says what it is: kept running until an order does."""
    main = min(items, key=lambda item: item.process.started)
    return Shard(
        name=name,
        stage=Stage.FOUND,
        phase_at=now.wall_s,
        assigned=False,
        incarnation=main.incarnation,
        process=main.process,
        port=main.port,
        reason="found running; the agent's state does not know it",
        stage_mono_s=now.mono_s,
    )
