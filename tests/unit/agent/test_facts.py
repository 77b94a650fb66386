"""What the machine is, as far as this agent may use it."""

from pathlib import Path

import pytest

from llmgw.core.node import EngineFacts
from llmgw.testing.node import agent_config
from llmgw_agent.cgroup import Cgroups
from llmgw_agent.facts import Machine, build_facts, look_at_machine, threads

GIB = 2**30
MEMINFO = f"MemTotal:       {256 * 2**20} kB\nMemFree: 1 kB\n"
CPUINFO = (
    "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t\t: fpu sse4_2 avx\n\nprocessor\t: 1\nflags\t\t: other\n"
)


def root(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


V2 = {
    "proc/self/cgroup": "0::/system.slice/llmgw.service\n",
    "sys/fs/cgroup/system.slice/memory.max": f"{8 * GIB}\n",
    "sys/fs/cgroup/system.slice/llmgw.service/memory.max": "max\n",
    "sys/fs/cgroup/system.slice/cpu.max": "max 100000\n",
    "sys/fs/cgroup/system.slice/llmgw.service/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/system.slice/llmgw.service/memory.events": "low 0\noom 2\noom_kill 2\n",
}
V1 = {
    "proc/self/cgroup": "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n0::/\n",
    "sys/fs/cgroup/memory/docker/memory.limit_in_bytes": f"{2**63 - 4096}\n",
    "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": f"{8 * GIB}\n",
    "sys/fs/cgroup/memory/docker/x/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_period_us": "100000\n",
}
# In a container the path is the host's, and what is mounted is our own group.
V1_INSIDE = {
    "proc/self/cgroup": "4:memory:/docker/x\n3:cpu:/docker/x\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
    "sys/fs/cgroup/memory/memory.oom_control": "oom_kill 2\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
}


@pytest.mark.parametrize("files", [V2, V1, V1_INSIDE], ids=["v2", "v1", "v1 inside a container"])
def test_c10_limits_of_the_group_are_the_machine(tmp_path: Path, files: dict[str, str]) -> None:
    place = root(tmp_path, {**files, "proc/meminfo": MEMINFO, "proc/cpuinfo": CPUINFO})
    groups = Cgroups(place)
    assert (groups.memory_bytes(), groups.cpus(), groups.oom_kills()) == (8 * GIB, 1.5, 2)
    seen = look_at_machine(place)
    assert (seen.memory_bytes, seen.cpus) == (8 * GIB, 1.5)
    # Of what an engine is told: whole CPUs within the limit.
    assert threads(agent_config(), seen) == 1


def test_without_limits_it_is_the_machine(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}
    seen = look_at_machine(root(tmp_path, {**files, "proc/meminfo": MEMINFO, "proc/cpuinfo": CPUINFO}))
    assert seen.memory_bytes == 256 * GIB
    assert seen.cpus is not None
    assert seen.cpus >= 1
    assert seen.cpu_model == "Some CPU @ 2 GHz"
    assert seen.cpu_flags == ("avx", "fpu", "sse4_2")


def test_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    seen = look_at_machine(tmp_path)
    assert (seen.memory_bytes, seen.cpu_model, seen.os, seen.cpu_flags) == (None, None, None, ())
    facts = build_facts(agent_config(), None, boot_id="b", engines=EngineFacts(probed=False), weights=None)
    assert (facts.memory_bytes, facts.cpus, facts.arch, facts.weights) == (None, None, None, None)
    assert threads(agent_config(), None) == 1


def machine(**changes: object) -> Machine:
    values: dict[str, object] = {"os": "Debian", "arch": "x86_64", "cpu_model": "c", "cpu_flags": ("avx2", "fpu")}
    values |= {"cpus": 32.0, "memory_bytes": 100 * 10**9}
    return Machine(**{**values, **changes})  # type: ignore[arg-type]  # a table of fields


@pytest.mark.parametrize(
    ("config", "memory_gb", "cpus"),
    [
        ({}, 100, 32.0),
        ({"share": 0.5}, 50, 16.0),
        ({"memory_gb": 20.0, "cpus": 4.0}, 20, 4.0),
        ({"memory_gb": 200.0, "cpus": 64.0}, 100, 32.0),
        ({"memory_gb": 60.0, "share": 0.5}, 50, 16.0),
    ],
)
def test_c10_caps_and_shares_only_ever_lower_it(config: dict[str, float], memory_gb: int, cpus: float) -> None:
    settings = agent_config(**config)
    facts = build_facts(settings, machine(), boot_id="b", engines=EngineFacts(probed=True), weights=())
    assert (facts.memory_bytes, facts.cpus) == (memory_gb * 10**9, cpus)
    assert threads(settings, machine()) == int(cpus)


def test_a_processor_without_avx2_is_a_warning() -> None:
    def warnings(**changes: object) -> tuple[str, ...]:
        return build_facts(
            agent_config(), machine(**changes), boot_id="b", engines=EngineFacts(probed=True), weights=()
        ).warnings

    assert warnings() == ()
    assert "no AVX2" in warnings(cpu_flags=("avx", "fpu"))[0]
    assert warnings(arch="aarch64", cpu_flags=("asimd",)) == ()
    assert warnings(cpu_flags=()) == ()
