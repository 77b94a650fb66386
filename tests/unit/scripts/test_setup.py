"""scripts/setup --check-engine: whether an engine wheel can run here, told before it dies of SIGILL."""

import os
import platform
import subprocess
from pathlib import Path

import pytest

SETUP = Path(__file__).resolve().parents[3] / "scripts" / "setup"
FLAGS = "fpu sse4_2 avx f16c avx2 fma"


def check(tmp_path: Path, flags: str) -> subprocess.CompletedProcess[str]:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: {flags}\n")
    return subprocess.run(
        [str(SETUP), "--check-engine"],
        env=os.environ | {"LLMGW_CPUINFO": str(cpuinfo)},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the wheels are for x86_64 alone")
def test_a_processor_with_all_of_it(tmp_path: Path) -> None:
    done = check(tmp_path, FLAGS)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the wheels are for x86_64 alone")
@pytest.mark.parametrize("missing", ["avx2", "fma"])
def test_what_is_missing_is_named(tmp_path: Path, missing: str) -> None:
    done = check(tmp_path, " ".join(flag for flag in FLAGS.split() if flag != missing))
    assert done.returncode == 1
    assert f"this processor lacks {missing}. Name a llama-server built for it in agent.yaml" in done.stderr


def test_an_unknown_option_is_refused() -> None:
    done = subprocess.run([str(SETUP), "--fast"], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 1
    assert "usage" in done.stderr
