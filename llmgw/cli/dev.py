"""`llmgw dev`: a whole cluster on this machine, for a first try and for tests.

Real etcd, real controllers, agents, gateway and engines, as one supervised tree. All state is below one directory, so
that the next start goes on where this one stopped, and deleting the directory deletes everything.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

import anyio
import anyio.abc
import click
import httpx2
import msgspec
import yaml

from llmgw.cli.dev_plan import Child, DevOptions, DevPlan, Ports, plan_dev
from llmgw.cli.dev_tree import Running, Tree, end_leftovers
from llmgw.config import EtcdConfig
from llmgw.core.snapshot import Kind
from llmgw.errors import Invalid, Problem, Refused, StoreError
from llmgw.store import keys
from llmgw.store.etcd import open_etcd

READY_S: Final = 90.0
"""How long the whole tree may take to be ready; a cold start takes about five seconds on two cores."""

COLOURS: Final = ("cyan", "green", "yellow", "blue", "magenta", "bright_cyan", "bright_green", "bright_yellow")


class State(msgspec.Struct, frozen=True, kw_only=True):
    """DIR/dev.json: what the next start, and whoever wants to play with the run, must know."""

    pid: int
    peer_ports: tuple[int, ...] = ()
    etcd: tuple[str, ...] = ()
    gateways: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()
    processes: tuple[Running, ...] = ()


class Printer:
    """Lines with the process's name before them, each process in its own colour on a terminal."""

    def __init__(self, names: list[str], *, colour: bool) -> None:
        self._width = max(len(name) for name in [*names, "dev"])
        self._colours = {name: COLOURS[n % len(COLOURS)] for n, name in enumerate(names)}
        self._colour = colour

    def __call__(self, name: str, line: str) -> None:
        """Print one line. A terminal or reader that has gone away (EIO, EPIPE) keeps no cluster from stopping."""
        head = f"{name:<{self._width}} |"
        if self._colour:
            head = click.style(head, fg=self._colours.get(name, "white"), bold=name == "dev")
        with contextlib.suppress(OSError):
            click.echo(f"{head} {line}")


def default_data() -> Path:
    """Where data lives unless --data says otherwise: the XDG state directory."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "llmgw" / "dev"


@contextlib.contextmanager
def locked(data: Path) -> Iterator[None]:
    """Hold the data directory for one run. Raises Refused when another run has it."""
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (data / "lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another `llmgw dev` runs on {data}; stop it, or choose another --data") from None
        yield


def read_state(data: Path) -> State | None:
    """What an earlier run left; None for a fresh directory. Raises Invalid when the file is damaged."""
    path = data / "dev.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=State)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        message = f"is damaged ({error}); delete it if no `llmgw dev` runs on this directory"
        raise Invalid((Problem(message=message, file=str(path)),)) from error


def write_private(path: Path, data: bytes) -> None:
    """Replace `path` in one step, readable by its owner only."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_name(path.name + ".new")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as handle:
        handle.write(data)
    fresh.replace(path)


def read_settings(handle: IO[str] | None) -> dict[str, dict[str, Any]]:
    """The --settings file: per process kind, what to put into its config. The processes judge the values."""
    if handle is None:
        return {}
    try:
        read = yaml.safe_load(handle)
    except yaml.YAMLError as error:
        raise Invalid((Problem(message=f"is not YAML: {error}", file=handle.name),)) from error
    if not isinstance(read, dict) or not all(isinstance(value, dict) for value in read.values()):
        raise Invalid((Problem(message="must map controller, agent or gateway to settings", file=handle.name),))
    return read


@click.command(name="dev")
@click.option("--controllers", default=3, show_default=True, type=click.IntRange(1, 9), help="How many controllers.")
@click.option(
    "--nodes", default=2, show_default=True, type=click.IntRange(1, 50), help="Nodes to play; they share the memory."
)
@click.option("--gateways", default=1, show_default=True, type=click.IntRange(1, 9), help="How many gateways.")
@click.option("--etcd-members", default=1, show_default=True, type=click.Choice([1, 3]), help="Members of etcd.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where all state goes [default: ~/.local/state/llmgw/dev].",
)
@click.option(
    "--model-dir",
    "model_dirs",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, resolve_path=True),
    help="Where weights lie, beside DATA/models; may be repeated.",
)
@click.option(
    "--etcd-bin",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True),
    help="The etcd to run [default: .tools/bin/etcd, then PATH].",
)
@click.option(
    "--settings", type=click.File(), help="YAML that overrides settings of all controllers, agents or gateways."
)
def dev(
    *,
    controllers: int,
    nodes: int,
    gateways: int,
    etcd_members: int,
    data: Path | None,
    model_dirs: tuple[str, ...],
    etcd_bin: str | None,
    settings: IO[str] | None,
) -> None:
    """Run a whole cluster on this machine.

    It has etcd, controllers, gateways, and agents that play nodes.

    It restarts what dies, keeps its state in one directory, and stops all of it, engines too, on Ctrl-C.
    """
    options = DevOptions(
        data=(data or default_data()).resolve(),
        controllers=controllers,
        nodes=nodes,
        gateways=gateways,
        etcd_members=etcd_members,
        model_dirs=model_dirs,
        etcd_bin=etcd_bin,
        settings=read_settings(settings),
    )
    with locked(options.data):
        anyio.run(run_dev, options, backend="trio")


async def run_dev(options: DevOptions) -> None:
    """Run the tree until a signal comes or it can't go on. Raises Refused or Invalid in the latter case."""
    earlier = read_state(options.data)
    printer = Printer([], colour=False)
    if earlier is not None:
        await end_leftovers(earlier.processes, printer)
    plan = plan_dev(options, Ports(), kept_peers=earlier.peer_ports if earlier else ())
    say = Printer([child.name for child in plan.children], colour=_colourful())
    for note in plan.notes:
        say("dev", note)
    (options.data / "env").unlink(missing_ok=True)  # whoever reads it before this run is ready would go elsewhere
    (options.data / "models").mkdir(exist_ok=True, mode=0o700)
    for child in plan.children:
        if child.config is not None:
            write_private(child.config, child.text.encode())
    tree = Tree(say=say, changed=lambda: _save(options.data, plan, tree.running()))
    hurry, over = anyio.Event(), anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(_signals, say, over, hurry)
        await _live(plan, tree, options.data, say=say, over=over, hurry=hurry)
        group.cancel_scope.cancel()
    if tree.failed is not None:
        raise tree.failed


async def _live(plan: DevPlan, tree: Tree, data: Path, *, say: Printer, over: anyio.Event, hurry: anyio.Event) -> None:
    """Start in order, wait for the end, stop in reverse order."""

    def give_up(why: str) -> None:
        say("dev", why)
        over.set()

    etcd = [child for child in plan.children if child.kind == "etcd"]
    others = [child for child in plan.children if child.kind != "etcd"]
    async with anyio.create_task_group() as children:
        try:
            for child in etcd:
                children.start_soon(partial(tree.supervise, child, give_up=give_up))
            if await _until(lambda: _healthy(etcd), over, say, "etcd"):
                for child in others:
                    children.start_soon(partial(tree.supervise, child, give_up=give_up))
                if await _until(lambda: _all_there(plan), over, say, "the cluster"):
                    _welcome(plan, data, say)
            await over.wait()
        finally:
            with anyio.CancelScope(shield=True):
                say("dev", "stopping")
                for kind in ("gateway", "agent", "controller", "etcd"):
                    await tree.stop([child for child in plan.children if child.kind == kind], hurry=hurry)
                _save(data, plan, [])
                (data / "env").unlink(missing_ok=True)
                say("dev", "stopped")


async def _signals(say: Printer, over: anyio.Event, hurry: anyio.Event) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        async for _ in signals:
            if over.is_set():
                say("dev", "hurrying: killing what has not stopped yet")
                hurry.set()
            over.set()


async def _until(condition: Any, over: anyio.Event, say: Printer, what: str) -> bool:
    """Await a condition (an async callable: what is still missing, or None). False when the tree ends first."""
    began = anyio.current_time()
    told = began
    missing: str | None = "everything"
    while not over.is_set():
        missing = await condition()
        now = anyio.current_time()
        if missing is None:
            return True
        if now - began > READY_S:
            say("dev", f"{what} is not ready after {READY_S:.0f} s: {missing}")
            raise Refused(f"{what} did not become ready: {missing}")
        if now - told >= 5.0:
            say("dev", f"waiting for {missing}")
            told = now
        with anyio.move_on_after(0.1):
            await over.wait()
    return False


async def _healthy(children: list[Child]) -> str | None:
    """The name of a child whose health URL does not answer 200; None when all do."""
    async with httpx2.AsyncClient(trust_env=False, timeout=1.0) as client:
        for child in children:
            if child.health is None:
                continue
            try:
                answer = await client.get(child.health)
            except httpx2.HTTPError:
                return child.name
            if answer.status_code != httpx2.codes.OK:
                return child.name
    return None


async def _all_there(plan: DevPlan) -> str | None:
    """What the cluster still lacks: a healthy process, a leader, or a node's session; None when it is complete."""
    sick = await _healthy([child for child in plan.children if child.kind != "etcd"])
    if sick is not None:
        return sick
    wanted = {child.name for child in plan.children if child.kind == "agent"}
    try:
        async with open_etcd(EtcdConfig(endpoints=plan.etcd_urls)) as store:
            listing = await store.list([keys.prefix(Kind.SESSION), keys.prefix(Kind.LEADER)])
    except StoreError as error:
        return f"etcd ({error})"
    refs = [keys.parse(item.key) for item in listing.items]
    if not any(ref is not None and ref.kind is Kind.LEADER for ref in refs):
        return "a leader"
    absent = wanted - {ref.name for ref in refs if ref is not None and ref.kind is Kind.SESSION}
    return ", ".join(sorted(absent)) or None


def _save(data: Path, plan: DevPlan, running: list[Running]) -> None:
    state = State(
        pid=os.getpid(),
        peer_ports=plan.peer_ports,
        etcd=plan.etcd_urls,
        gateways=plan.gateway_urls,
        pages=plan.page_urls,
        processes=tuple(running),
    )
    write_private(data / "dev.json", msgspec.json.format(msgspec.json.encode(state), indent=1))


def _welcome(plan: DevPlan, data: Path, say: Printer) -> None:
    settings = {
        "LLMGW_ETCD": ",".join(plan.etcd_urls),
        "LLMGW_GATEWAY": plan.gateway_urls[0],
        "LLMGW_PAGE": plan.page_urls[0],
    }
    lines = [f"export {name}={shlex.quote(value)}" for name, value in settings.items()]
    write_private(data / "env", ("\n".join(lines) + "\n").encode())
    say("dev", "ready")
    say("dev", f"  API      {plan.gateway_urls[0]}/v1")
    say("dev", f"  page     {plan.page_urls[0]}/")
    say("dev", f"  weights  {data / 'models'}")
    say("dev", f"  shell    source {shlex.quote(str(data / 'env'))} && llmgw status")


def _colourful() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
