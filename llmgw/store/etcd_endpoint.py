"""Where etcd is and who we are there, from a process's `etcd:` settings; everything wrong in them is said at once.

Nothing here talks to etcd. Passwords and keys stay in their files until they are needed.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import anyio.to_thread

from llmgw.config import EtcdConfig, read_secret
from llmgw.core.ids import Secret
from llmgw.errors import Denied, Invalid, Problem
from llmgw.store.etcd_call import Login


def tls_context(config: EtcdConfig) -> ssl.SSLContext:
    """Check the whole of `config` and return what its certificates make. Raises Invalid, naming every problem."""
    problems = [*_endpoints(config), *_certificates(config), *_login(config), *_durations(config)]
    if problems:
        raise Invalid(tuple(problems))
    try:
        context = ssl.create_default_context(cafile=config.ca)
    except OSError as error:
        message = f"{config.ca} holds no PEM certificate: {_reason(error)}"
        raise Invalid((Problem(path="etcd.ca", message=message),)) from error
    try:
        if config.cert is not None:
            context.load_cert_chain(config.cert, config.key)
    except OSError as error:
        message = f"{config.cert} and {config.key} are no PEM certificate with its key: {_reason(error)}"
        raise Invalid((Problem(path="etcd.cert", message=message),)) from error
    return context


def login(config: EtcdConfig) -> Login | None:
    """Who to be; None where etcd asks nobody."""
    if config.user is None or config.password_file is None:
        return None
    return Login(user=config.user, password=partial(_password, config.password_file))


async def _password(file: str) -> Secret:
    try:
        return await anyio.to_thread.run_sync(read_secret, file)
    except Invalid as error:
        raise Denied(f"etcd.password_file {error}") from error


def _endpoints(config: EtcdConfig) -> Iterator[Problem]:
    if not config.endpoints:
        yield Problem(path="etcd.endpoints", message="at least one URL is needed")
    for index, url in enumerate(config.endpoints):
        path = f"etcd.endpoints[{index}]"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            yield Problem(path=path, message=f"{url!r} is no URL: {error}")
            continue
        if parts.username or parts.password:
            yield Problem(path=path, message="no user or password in a URL: use etcd.user and etcd.password_file")
        elif parts.scheme not in {"http", "https"} or not parts.hostname:
            nearest = f"http://{url}" if "://" not in url and url else None
            yield Problem(path=path, message=f"{url!r} is no http:// or https:// URL", nearest=nearest)
        elif parts.path not in {"", "/"} or parts.query or parts.fragment:
            nearest = f"{parts.scheme}://{parts.netloc}"
            yield Problem(path=path, message=f"{url!r} has more than host and port", nearest=nearest)
        elif port is None:
            yield Problem(path=path, message=f"{url!r} has no port", nearest=f"{parts.scheme}://{parts.netloc}:2379")
        elif parts.scheme == "http" and (config.ca or config.cert):
            message = f"{url!r} is plain HTTP, but etcd.ca or etcd.cert is given"
            yield Problem(path=path, message=message, nearest=f"https://{parts.netloc}")


def _certificates(config: EtcdConfig) -> Iterator[Problem]:
    if (config.cert is None) != (config.key is None):
        yield Problem(path="etcd.cert", message="etcd.cert and etcd.key go together")
    for name, file in (("ca", config.ca), ("cert", config.cert), ("key", config.key)):
        if file is not None and (why := _unreadable(file)) is not None:
            yield Problem(path=f"etcd.{name}", message=f"can't read {file}: {why}")


def _login(config: EtcdConfig) -> Iterator[Problem]:
    if (config.user is None) != (config.password_file is None):
        yield Problem(path="etcd.user", message="etcd.user and etcd.password_file go together")
    if config.password_file is not None and (why := _unreadable(config.password_file)) is not None:
        yield Problem(path="etcd.password_file", message=f"can't read {config.password_file}: {why}")


def _durations(config: EtcdConfig) -> Iterator[Problem]:
    for name in ("connect_timeout_s", "read_timeout_s", "watch_silence_s", "relist_s"):
        value = getattr(config, name)
        if not value > 0:
            yield Problem(path=f"etcd.{name}", message=f"{value:g} is not above 0")


def _unreadable(file: str) -> str | None:
    try:
        with Path(file).open("rb"):
            return None
    except OSError as error:
        return _reason(error)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
