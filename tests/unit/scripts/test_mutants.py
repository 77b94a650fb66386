"""scripts/mutants.py on a toy tree: a noticed bug passes, a survivor fails, and nothing else counts as noticed."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "mutants.py"

MODULE = """\
def double(number):
    return number * 2


def unused(number):
    return number + 1
"""
TESTS = """\
import time

from toy.arithmetic import double


def test_double():
    assert double(3) == 6


def test_double_of_zero():
    assert double(0) == 0


def test_hangs_unless_right():
    while double(1) != 2:
        time.sleep(0.01)


def test_wrong_from_the_start():
    assert double(2) == 5
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    root = tmp_path / "toy-tree"
    (root / "toy").mkdir(parents=True)
    (root / "tests" / "mutants.d").mkdir(parents=True)
    (root / "toy" / "__init__.py").touch()
    (root / "toy" / "arithmetic.py").write_text(MODULE)
    (root / "tests" / "test_toy.py").write_text(TESTS)
    (root / "tests" / "mutants.toml").write_text("required = []\n")
    return root


def entry(
    toy: Path,
    *,
    name: str = "T-1",
    file: str = "toy/arithmetic.py",
    old: str = "number * 2",
    new: str = "number * 3",
    test: str = "test_double",
    more: str = "",
) -> None:
    with (toy / "tests" / "mutants.d" / "toy.toml").open("a") as out:
        out.write(f'[[mutant]]\nid = "{name}"\nfile = "{file}"\nold = "{old}"\nnew = "{new}"\n')
        out.write(f'test = ["tests/test_toy.py::{test}"]\n{more}\n')


def run(toy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(SCRIPT), "--root", str(toy), *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)


def test_a_noticed_bug(toy: Path) -> None:
    entry(toy)
    done = run(toy)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "T-1      toy/arithmetic.py: noticed" in done.stdout
    assert done.stdout.endswith("1 of 1 bugs noticed, 0 required ids without one\n")


def test_the_tree_itself_is_not_touched(toy: Path) -> None:
    entry(toy)
    before = {path: path.stat().st_mtime_ns for path in toy.rglob("*")}
    assert run(toy).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in toy.rglob("*")} == before


def test_a_survivor(toy: Path) -> None:
    entry(toy, test="test_double_of_zero")
    done = run(toy)
    assert done.returncode == 1
    assert "SURVIVED" in done.stdout


def test_one_survivor_of_several(toy: Path) -> None:
    entry(toy)
    entry(toy, name="T-2", old="number + 1", new="number + 2")
    entry(toy, name="T-3", new="number * 4")
    done = run(toy)
    assert done.returncode == 1
    assert done.stdout.count(": noticed") == 2
    assert "T-2      toy/arithmetic.py: SURVIVED" in done.stdout


def test_a_bug_that_breaks_the_import_is_not_noticed_by_the_test(toy: Path) -> None:
    entry(toy, old="def double", new="def dubble")
    done = run(toy)
    assert done.returncode == 1
    assert "proves nothing: pytest's exit code is" in done.stdout


def test_unless_it_is_meant_to(toy: Path) -> None:
    entry(toy, old="def double", new="def dubble", more="collect_error = true")
    assert run(toy).returncode == 0


def test_out_of_time_proves_nothing(toy: Path) -> None:
    entry(toy, test="test_hangs_unless_right", more="timeout_s = 2")
    done = run(toy)
    assert done.returncode == 1
    assert "out of time after 2 s" in done.stdout


def test_a_test_that_fails_anyway_proves_nothing(toy: Path) -> None:
    entry(toy, test="test_wrong_from_the_start")
    done = run(toy)
    assert done.returncode == 1
    assert "the tests must pass without a bug first" in done.stdout


def test_a_module_imported_from_elsewhere_is_found_out(toy: Path, tmp_path: Path) -> None:
    """As an editable install would do it, that comes before the copy on the path."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "arithmetic.py").write_text(MODULE)
    (toy / "toy" / "__init__.py").write_text(f"__path__ = [{str(elsewhere)!r}]\n")
    entry(toy)
    done = run(toy)
    assert done.returncode == 1
    assert f"not tried: toy.arithmetic is imported from {elsewhere}" in done.stdout


def test_a_required_id_without_an_entry(toy: Path) -> None:
    (toy / "tests" / "mutants.toml").write_text('required = ["T-1", "T-9"]\n')
    entry(toy)
    done = run(toy)
    assert done.returncode == 1
    assert "without a mutant: T-9" in done.stdout
    assert run(toy, "--only", "T-1").returncode == 0


def test_no_entry_at_all_is_no_success(toy: Path) -> None:
    assert run(toy).returncode == 1


def test_only_and_list(toy: Path) -> None:
    entry(toy)
    entry(toy, name="T-2", test="test_double_of_zero")
    done = run(toy, "--only", "T-1")
    assert done.returncode == 0
    assert "T-2" not in done.stdout
    listed = run(toy, "--list")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["T-1", "T-2"]
    assert run(toy, "--only", "T-3").returncode == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"old": "number"}, "old occurs 4 times"),
        ({"old": "absent"}, "old occurs 0 times"),
        ({"new": "number * 2"}, "changes nothing"),
        ({"file": "toy/none.py"}, "toy/none.py does not exist"),
        ({"file": "../toy.py"}, "is not inside the tree"),
        ({"more": "colect_error = true"}, "colect_error"),
        ({"more": "old = 1"}, "mutants.d/toy.toml"),
    ],
)
def test_a_bad_entry(toy: Path, change: dict[str, str], message: str) -> None:
    entry(toy, **change)
    for done in (run(toy), run(toy, "--check")):
        assert done.returncode == 2
        assert message in done.stderr
