#!/usr/bin/env python3
"""Proves that tests can fail: puts one small bug at a time into a copy of the tree and demands that its test notices.

Entries are read from tests/mutants.toml and tests/mutants.d/*.toml:

    [[mutant]]
    id = "A-01"                       # the field case, or INV-3 for an invariant; several entries may share one
    file = "llmgw/core/place.py"
    old = "if free >= need:"          # occurs exactly once in the file
    new = "if True:"                  # the bug
    test = ["tests/unit/core/test_place.py::test_a01_memory_is_promised_once"]
    timeout_s = 120                   # optional
    collect_error = false             # optional: true where the bug is to break the import itself

`required = ["A-01", …]` in tests/mutants.toml names the ids that must have an entry. The work tree is never changed:
each job has its own copy, which is put first on PYTHONPATH, and it is checked that the mutated module is the one that
is imported. Each test is first run without any bug, and must pass. A run that ends by time-out proves nothing.
Hypothesis draws what it does in CI, and makes no failing example smaller: nobody will look at it.

    scripts/mutants.py [--only ID]… [--list] [--check] [--jobs N] [--root DIR]
"""

import argparse
import concurrent.futures
import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import msgspec

SOURCE_ROOTS = (".", "agent")
"""Where packages lie, most particular last."""
NOT_COPIED = (".git", ".venv", ".tools", "__pycache__", ".*_cache", ".hypothesis", "dist")
LINKED = (".venv", ".tools")
"""Seen by a copy through a link: large, and not what is mutated."""
UNMUTATED_S = 3600.0
"""How long all named tests may take without a bug. It only ends a run that hangs."""

PASSED, FAILED = 0, 1
BROKEN = (2, 4)
"""Exit codes of pytest: interrupted by errors of collection; a test that was named is not there."""


class Mutant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One bug; the fields are described above."""

    id: str
    file: str
    old: str
    new: str
    test: list[str]
    timeout_s: float = 120.0
    collect_error: bool = False


class Entries(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of entries."""

    required: list[str] = []
    mutant: list[Mutant] = []


class BadEntryError(Exception):
    """An entry that can't be used. The message names file, id and what is wrong."""


def load(root: Path) -> tuple[list[Mutant], list[str]]:
    """Every mutant, in the order of the files, and the required ids. Raises BadEntryError."""
    mutants: list[Mutant] = []
    required: list[str] = []
    files = [root / "tests" / "mutants.toml", *sorted((root / "tests" / "mutants.d").glob("*.toml"))]
    for file in files:
        if not file.exists():
            continue
        try:
            entries = msgspec.convert(tomllib.loads(file.read_text()), Entries)
        except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
            raise BadEntryError(f"{file.relative_to(root)}: {error}") from error
        mutants += entries.mutant
        required += entries.required
    return mutants, required


def problem(root: Path, mutant: Mutant) -> str | None:
    """What is wrong with an entry as the tree is now; None when it can be tried."""
    path = PurePosixPath(mutant.file)
    if path.is_absolute() or ".." in path.parts:
        return f"{mutant.file} is not inside the tree"
    if not (root / path).is_file():
        return f"{mutant.file} does not exist"
    if not mutant.test:
        return "names no test"
    if mutant.old == mutant.new:
        return "changes nothing: old and new are the same"
    count = (root / path).read_text().count(mutant.old)
    if count != 1:
        return f"old occurs {count} times in {mutant.file}, it must occur exactly once"
    for test in mutant.test:
        if not (root / test.split("::")[0]).exists():
            return f"{test.split('::')[0]} does not exist"
    return None


def module_name(file: str) -> str | None:
    """The module a file is imported as; None for what is not imported."""
    path = PurePosixPath(file)
    if path.suffix != ".py" or path.parts[0] in ("tests", "scripts", "chaos", "bench"):
        return None
    parts = path.with_suffix("").parts
    for source in SOURCE_ROOTS[1:]:
        if parts[0] == source:
            parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Copy:
    """A private copy of the tree, in which commands run."""

    def __init__(self, root: Path, directory: Path) -> None:
        self.tree = directory / root.name
        shutil.copytree(root, self.tree, ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)
        for name in LINKED:
            if (root / name).exists():
                (self.tree / name).symlink_to(root / name)
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(str(self.tree / source) for source in SOURCE_ROOTS),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HYPOTHESIS_PROFILE": "mutants",
        }

    @contextlib.contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """The bug is in the copy, and is taken out again."""
        file = self.tree / mutant.file
        text = file.read_text()
        file.write_text(text.replace(mutant.old, mutant.new))
        try:
            yield
        finally:
            file.write_text(text)

    def run(self, argv: Sequence[str], *, timeout_s: float) -> tuple[int | None, str]:
        """Exit code (None: out of time, and killed with all that it started) and what it printed."""
        with subprocess.Popen(
            argv,
            cwd=self.tree,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
                return None, output
            return process.returncode, output

    def pytest(self, tests: Sequence[str], *, timeout_s: float) -> tuple[int | None, str]:
        """Runs the named tests; as `run`."""
        argv = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *tests]
        return self.run(argv, timeout_s=timeout_s)

    def imports_itself(self, module: str) -> str | None:
        """What is imported as `module` in place of this copy's file; None when it is this copy's."""
        code = "import importlib.util, sys; spec = importlib.util.find_spec(sys.argv[1]); print(spec and spec.origin)"
        status, output = self.run([sys.executable, "-c", code, module], timeout_s=60)
        origin = output.strip().splitlines()[-1] if output.strip() else ""
        if status == 0 and Path(origin).is_relative_to(self.tree):
            return None
        return origin or f"nothing (exit code {status})"


def verdict(copy: Copy, mutant: Mutant) -> tuple[bool, str, str]:
    """Whether the bug was noticed, in a word why (not), and the output for a person to look at."""
    with copy.mutated(mutant):
        module = module_name(mutant.file)
        # A bug that breaks the import of a parent package can't be looked up, and need not be.
        if module is not None and not mutant.collect_error:
            other = copy.imports_itself(module)
            if other is not None:
                return False, f"not tried: {module} is imported from {other}", ""
        status, output = copy.pytest(mutant.test, timeout_s=mutant.timeout_s)
    if status == FAILED or (mutant.collect_error and status in BROKEN):
        return True, "noticed", output
    if status is None:
        return False, f"out of time after {mutant.timeout_s:.0f} s: the test needs a dead-line", output
    if status == PASSED:
        return False, "SURVIVED: its test passes", output
    return False, f"proves nothing: pytest's exit code is {status}", output


def unmutated(copy: Copy, mutants: Sequence[Mutant]) -> bool:
    """Runs every named test without any bug, and says whether all pass."""
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.test))
    began = time.monotonic()
    status, output = copy.pytest(tests, timeout_s=UNMUTATED_S)
    if status == PASSED:
        print(f"ok    {time.monotonic() - began:6.1f} s  without a bug: {len(tests)} tests pass", flush=True)
        return True
    print(output)
    print(f"FAIL  the tests must pass without a bug first (exit code {status})", flush=True)
    return False


def try_all(root: Path, mutants: Sequence[Mutant], *, jobs: int) -> int:
    """Tries each, prints a line each, and returns how many were not noticed."""
    unnoticed = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        first = Copy(root, Path(directory) / "0")
        copies.put(first)
        if not unmutated(first, mutants):
            return len(mutants)
        for job in range(1, min(jobs, len(mutants))):
            copies.put(Copy(root, Path(directory) / str(job)))

        def try_one(mutant: Mutant) -> tuple[Mutant, bool, str, str, float]:
            copy = copies.get()
            began = time.monotonic()
            try:
                noticed, why, output = verdict(copy, mutant)
            finally:
                copies.put(copy)
            return mutant, noticed, why, output, time.monotonic() - began

        with concurrent.futures.ThreadPoolExecutor(max_workers=jobs) as pool:
            for done in concurrent.futures.as_completed([pool.submit(try_one, mutant) for mutant in mutants]):
                mutant, noticed, why, output, took_s = done.result()
                print(
                    f"{'ok  ' if noticed else 'FAIL'}  {took_s:6.1f} s  {mutant.id:8} {mutant.file}: {why}", flush=True
                )
                if not noticed:
                    unnoticed += 1
                    print("\n".join("      | " + line for line in output.splitlines()[-15:]), flush=True)
    return unnoticed


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Put one small bug at a time into a copy of the tree; each must make its test fail."
    )
    parser.add_argument("--only", metavar="ID", action="append", default=[], help="this id alone; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the entries and run nothing")
    parser.add_argument("--check", action="store_true", help="check the entries and run nothing")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once (default 2)")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="the tree")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exit code 0: every bug was noticed; 1: one was not, or an id is missing; 2: a bad entry."""
    args = arguments(argv)
    root: Path = args.root.resolve()
    try:
        mutants, required = load(root)
    except BadEntryError as error:
        print(error, file=sys.stderr)
        return 2
    known = {mutant.id for mutant in mutants}
    if args.only:
        unknown = [name for name in args.only if name not in known]
        if unknown:
            print(f"no mutant is called {', '.join(unknown)} (--list prints them)", file=sys.stderr)
            return 2
        mutants = [mutant for mutant in mutants if mutant.id in args.only]
    if args.list:
        for mutant in mutants:
            print(f"{mutant.id:8} {mutant.file}  {' '.join(mutant.test)}")
        return 0
    problems = [f"{mutant.id}: {why}" for mutant in mutants if (why := problem(root, mutant)) is not None]
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 2
    missing = [] if args.only else [name for name in required if name not in known]
    if missing:
        print(f"FAIL  without a mutant: {', '.join(missing)}", flush=True)
    if args.check:
        print(f"{len(mutants)} mutants can be tried")
        return 1 if missing else 0
    unnoticed = try_all(root, mutants, jobs=max(1, args.jobs)) if mutants else 0
    print(f"{len(mutants) - unnoticed} of {len(mutants)} bugs noticed, {len(missing)} required ids without one")
    return 1 if unnoticed or missing or not mutants else 0


if __name__ == "__main__":
    sys.exit(main())
