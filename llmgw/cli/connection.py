"""How a command reaches the store: options, environment, and one clear error when it can't."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import click

from llmgw.config import ClientConfig, EtcdConfig, load_config
from llmgw.core.snapshot import Index, Kind
from llmgw.errors import LlmgwError, OutcomeUnknown, Unavailable
from llmgw.store import codec, keys
from llmgw.store.port import Store

if TYPE_CHECKING:
    from llmgw.store.etcd import EtcdStore

T = TypeVar("T")


class Unreachable(LlmgwError):
    """The store gave no answer. Carries the endpoints that were tried."""

    def __init__(self, endpoints: tuple[str, ...], why: str) -> None:
        self.endpoints, self.why = endpoints, why
        super().__init__(f"the store is not reachable at {', '.join(endpoints)}: {why}")


class Connection:
    """What the options say of the store. `overrides` by dotted key, as `load_config` takes them."""

    def __init__(self, overrides: dict[str, str | tuple[str, ...]]) -> None:
        self._overrides = overrides

    def config(self) -> EtcdConfig:
        """Options over LLMGW_ETCD over the default. Raises: Invalid."""
        return load_config(None, ClientConfig, env=os.environ, overrides=self._overrides).etcd

    def run(self, command: Callable[[EtcdStore], Awaitable[T]]) -> T:
        """Run `command` on the store. Raises: Unreachable, Invalid, and what `command` raises."""
        return anyio.run(self._run, command, backend="trio")

    async def _run(self, command: Callable[[EtcdStore], Awaitable[T]]) -> T:
        async with self.open() as store:
            return await command(store)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[EtcdStore]:
        """The store. What stays unanswered inside becomes Unreachable."""
        from llmgw.store.etcd import open_etcd  # noqa: PLC0415  # a fifth of a second, and `--help` needs none of it

        config = self.config()
        try:
            async with open_etcd(config) as store:
                yield store
        except (Unavailable, OutcomeUnknown) as error:
            raise Unreachable(config.endpoints, str(error)) from error


def store_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the options that say where the store is; it gets them as one `connection`."""

    @functools.wraps(command)
    def wrapper(
        *,
        etcd: str | None,
        ca: str | None,
        cert: str | None,
        key: str | None,
        user: str | None,
        password_file: str | None,
        **options: Any,
    ) -> Any:
        given: dict[str, str | tuple[str, ...] | None] = {
            "etcd.endpoints": None if etcd is None else tuple(etcd.split(",")),
            "etcd.ca": ca,
            "etcd.cert": cert,
            "etcd.key": key,
            "etcd.user": user,
            "etcd.password_file": password_file,
        }
        connection = Connection({name: value for name, value in given.items() if value is not None})
        return command(connection=connection, **options)

    for option in (
        click.option("--password-file", metavar="FILE", help="Its password, in a file."),
        click.option("--user", metavar="NAME", help="User of etcd's own authentication."),
        click.option("--key", metavar="FILE", help="Key of --cert (PEM)."),
        click.option("--cert", metavar="FILE", help="Client certificate (PEM, without a CN)."),
        click.option("--ca", metavar="FILE", help="Authority that etcd's certificate must come from (PEM)."),
        click.option(
            "--etcd", metavar="URL[,URL…]", help="Where etcd is [default: $LLMGW_ETCD, then http://127.0.0.1:2379]."
        ),
    ):
        wrapper = option(wrapper)
    return wrapper


async def read_index(store: Store, kinds: tuple[Kind, ...]) -> Index:
    """Every record of `kinds`, at one revision. Raises: as `Store.list`."""
    listing = await store.list([keys.prefix(kind) for kind in kinds])
    changes = (codec.change(item) for item in listing.items)
    index = Index()
    index.reset([change for change in changes if change is not None], revision=listing.revision)
    return index
