"""Real etcd for tests: one or three members on loopback, each a process that can be killed, stopped and restarted.

Started by deploy/etcd/start, with the settings that ship. Members keep their ports for the life of the cluster. Waiting
is always for a condition, with a dead-line; a member that fails says so with the last lines of its log.
"""

import os
import signal
import ssl
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import anyio
import httpx2
import msgspec
import trustme

from llmgw.testing.port import HeldPort

DEPLOY: Final = Path(__file__).resolve().parents[2] / "deploy" / "etcd"
START_S: Final = 60.0
"""Dead-line for a member to become healthy, seconds. It takes about one; the rest is for a busy machine."""


class Certificates(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a throw-away authority. The client's certificate has no CN: etcd's JSON gateway refuses one with it.

    `named` is one with a CN, to show just that.
    """

    ca: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path
    named: Path
    named_key: Path

    @classmethod
    def make(cls, directory: Path) -> "Certificates":
        """Writes them into `directory`; keys with mode 0600."""
        directory.mkdir(mode=0o700, exist_ok=True)
        made = cls(
            ca=directory / "ca.pem",
            server=directory / "server.pem",
            server_key=directory / "server.key",
            client=directory / "client.pem",
            client_key=directory / "client.key",
            named=directory / "named.pem",
            named_key=directory / "named.key",
        )
        authority = trustme.CA()
        authority.cert_pem.write_to_path(made.ca)
        for certificate, chain, key in (
            (authority.issue_cert("127.0.0.1", "localhost"), made.server, made.server_key),
            (authority.issue_cert("llmgw.test"), made.client, made.client_key),
            (authority.issue_cert("llmgw.test", common_name="agent-1"), made.named, made.named_key),
        ):
            chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
            key.touch(mode=0o600)
            key.write_bytes(certificate.private_key_pem.bytes())
        return made

    def context(self) -> ssl.SSLContext:
        """A client's TLS context: trusts `ca` alone and shows `client`."""
        context = ssl.create_default_context(cafile=self.ca)
        context.load_cert_chain(self.client, self.client_key)
        return context


class Member:
    """One etcd process."""

    def __init__(
        self, name: str, directory: Path, certificates: Certificates | None, *, options: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.options = tuple(options)
        self.directory = directory
        self.certificates = certificates
        self.log = directory / f"{name}.log"
        self._client_port, self._peer_port = HeldPort(), HeldPort()
        scheme = "http" if certificates is None else "https"
        self.client_url = f"{scheme}://127.0.0.1:{self._client_port.number}"
        self.peer_url = f"{scheme}://127.0.0.1:{self._peer_port.number}"
        self._process: subprocess.Popen[bytes] | None = None
        self._argv: list[str] = []

    @property
    def pid(self) -> int:
        """The process id of etcd itself. Raises RuntimeError when it does not run."""
        if self._process is None:
            raise RuntimeError(f"etcd member {self.name} does not run")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Started and not ended (a stopped process runs)."""
        return self._process is not None and self._process.poll() is None

    def start(self, cluster: str = "") -> None:
        """Starts it; returns at once. The first time needs `cluster`: every member as NAME=PEER-URL, comma between."""
        if self.running:
            raise RuntimeError(f"etcd member {self.name} runs already")
        if cluster:
            self._argv = self._command(cluster)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _command(self, cluster: str) -> list[str]:
        argv = [str(DEPLOY / "start"), "--name", self.name, "--data", str(self.directory / self.name)]
        argv += ["--client-url", self.client_url, "--peer-url", self.peer_url, "--cluster", cluster]
        if self.certificates is not None:
            for role in ("", "peer-"):
                argv += [f"--{role}cert", str(self.certificates.server), f"--{role}key"]
                argv += [str(self.certificates.server_key), f"--{role}ca", str(self.certificates.ca)]
        return [*argv, *self.options]

    def kill(self) -> None:
        """SIGKILL, and waits for its end. Nothing happens to one that does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """SIGSTOP: connections stay open, nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def cont(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def restart(self) -> None:
        """Kills it if it runs, and starts it on the same data and ports; returns at once."""
        self.kill()
        self.start()

    def close(self) -> None:
        """Ends it and lets go of its ports."""
        self.kill()
        self._client_port.close()
        self._peer_port.close()

    def last_lines(self, count: int = 10) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])


class Etcd:
    """A cluster. Use as a context manager, or `close` it.

    Attributes:
        members: by position; `m0`, `m1`, `m2`.
        certificates: None for plain HTTP.
        passwords: with auth on, a directory with one file a user (see deploy/etcd/roles), else None.
    """

    def __init__(
        self,
        directory: Path,
        *,
        members: int = 1,
        tls: bool = False,
        auth: bool = False,
        options: Sequence[str] = (),
    ) -> None:
        """Starts it and waits until every member is healthy.

        `directory` should be new and empty; `options` go to deploy/etcd/start as they are.
        """
        self.directory = directory
        self.certificates = Certificates.make(directory / "tls") if tls else None
        self.passwords: Path | None = None
        self.members = tuple(
            Member(f"m{index}", directory, self.certificates, options=options) for index in range(members)
        )
        cluster = ",".join(f"{member.name}={member.peer_url}" for member in self.members)
        try:
            for member in self.members:
                member.start(cluster)
            self.wait_healthy()
            if auth:
                self.passwords = directory / "passwords"
                self.roles("init")
        except BaseException:
            self.close()
            raise

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The client URLs."""
        return tuple(member.client_url for member in self.members)

    def password(self, user: str) -> str:
        """A user's password, such as of `llmgw-controller`. Raises RuntimeError without auth."""
        if self.passwords is None:
            raise RuntimeError("this etcd has no users")
        return (self.passwords / user).read_text()

    def roles(self, *command: str) -> str:
        """Runs deploy/etcd/roles (`agent`, NODE) against this cluster and returns what it printed."""
        if self.passwords is None:
            raise RuntimeError("this etcd has no users")
        argv = [str(DEPLOY / "roles"), *command, "--passwords", str(self.passwords)]
        argv += ["--endpoints", ",".join(self.endpoints), *self._etcdctl_tls()]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=120)
        if done.returncode != 0:
            raise RuntimeError(f"roles {' '.join(command)} exited with {done.returncode}: {done.stderr}")
        return done.stdout

    def _etcdctl_tls(self) -> list[str]:
        if self.certificates is None:
            return []
        files = self.certificates
        return ["--cacert", str(files.ca), "--cert", str(files.client), "--key", str(files.client_key)]

    def client(self, *, timeout_s: float = 5.0) -> httpx2.AsyncClient:
        """An HTTP client that gets through this cluster's TLS; for looking at etcd from outside."""
        verify = True if self.certificates is None else self.certificates.context()
        return httpx2.AsyncClient(verify=verify, timeout=timeout_s, trust_env=False)

    async def healthy(self, *, timeout_s: float = START_S) -> None:
        """Returns once every member that was started can commit.

        Raises:
            RuntimeError: one ended by itself; its log is in the message.
            TimeoutError: one is not healthy in `timeout_s`; as above.
        """
        pending = [member for member in self.members if member.running]
        with anyio.move_on_after(timeout_s):
            async with self.client(timeout_s=2.0) as client:
                while pending:
                    for member in list(pending):
                        if await self._commits(client, member):
                            pending.remove(member)
                    await anyio.sleep(0.02)
        if pending:
            logs = "\n".join(f"{member.name}: {member.last_lines()}" for member in pending)
            raise TimeoutError(f"etcd is not healthy after {timeout_s} s\n{logs}")

    async def _commits(self, client: httpx2.AsyncClient, member: Member) -> bool:
        if not member.running:
            raise RuntimeError(f"etcd member {member.name} ended\n{member.last_lines()}")
        try:
            answer = await client.get(f"{member.client_url}/health")
        except httpx2.TransportError:  # not listening yet, or too busy to answer: asked again until the dead-line
            return False
        return answer.status_code == 200 and answer.json().get("health") in ("true", True)

    def wait_healthy(self, *, timeout_s: float = START_S) -> None:
        """The same for callers outside a loop."""

        async def wait() -> None:
            await self.healthy(timeout_s=timeout_s)

        anyio.run(wait, backend="trio")

    async def empty(self) -> None:
        """Deletes every key and lease (without auth only), so that one cluster can serve many tests."""
        async with self.client() as client:

            async def call(path: str, body: Mapping[str, str]) -> dict[str, Any]:
                answer = await client.post(f"{self.endpoints[0]}/v3/{path}", json=body)
                answer.raise_for_status()
                reply: dict[str, Any] = answer.json()
                return reply

            await call("kv/deleterange", {"key": "AA==", "range_end": "AA=="})  # from "\0" on: all
            for lease in (await call("lease/leases", {})).get("leases", ()):
                await call("lease/revoke", {"ID": lease["ID"]})

    def heal(self) -> None:
        """Everything runs, is healthy and empty again, whatever a test did to it."""
        for member in self.members:
            if member.running:
                member.cont()
            else:
                member.start()

        async def heal() -> None:
            await self.healthy()
            await self.empty()

        anyio.run(heal, backend="trio")

    def close(self) -> None:
        """Ends every member."""
        for member in self.members:
            member.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
