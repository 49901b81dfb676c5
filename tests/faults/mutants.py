"""
Break the package in one place after the other, and see that the tests notice each time.

    python -m tests.faults.mutants                the whole of it; an hour or two
    python -m tests.faults.mutants --list
    python -m tests.faults.mutants --only 12 40-45
    python -m tests.faults.mutants --jobs 2
    python -m tests.faults.mutants --table        write down in docs/mutants.md what came of it

A mutant lives in a copy of the tree in a temporary directory, and its tests are run there until
the first one fails. That test is then run without the mutation, where it has to pass: one that
fails anyway has caught nothing. What nobody caught is a hole in the tests. The test that noticed
it the last time, by docs/mutants.md, goes first.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import mutants_page
from .mutants_page import Row
from .mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "django_fencedlock"
#: Seconds for one mutant. What hangs a test ends it by the test's own limit long before.
LONGEST = 1500
#: Seconds for one test of a mutant: it may hang where the package doesn't.
LONGEST_TEST = 60
#: What the tests need.
_COPIED = (PACKAGE, "tests", "example_project", "migrations", "docs", "README.md", "CHANGELOG.md")
_COPIED += ("CONTRIBUTING.md", "setup.cfg", "pyproject.toml", "MANIFEST.in", "tox.ini", ".ci")

CAUGHT, SURVIVED, DOUBTFUL = "caught", "SURVIVED", "DOUBTFUL"


@dataclass
class Verdict:
    """What became of a mutant."""

    number: int
    mutation: Mutation
    verdict: str
    by: str
    seconds: float
    output: str = ""

    def line(self) -> str:
        where = f"{self.mutation.file}: {self.mutation.what}"
        return f"{self.number:3}  {self.verdict:8}  {self.seconds:5.0f} s  {where}  <-  {self.by}"


def fault_of(mutation: Mutation, root: Path = ROOT) -> str | None:
    """Say why a mutation can't be made; None if it can."""
    text = (root / PACKAGE / mutation.file).read_text()
    found = text.count(mutation.old)
    if found != 1:
        return f"its old text is found {found} times in {mutation.file}, and has to be once"
    if mutation.old == mutation.new:
        return "its new text is the old one"
    try:
        compile(text.replace(mutation.old, mutation.new), mutation.file, "exec")
    except SyntaxError as exc:
        return f"{mutation.file} isn't Python with its new text: {exc}"
    return None


@contextlib.contextmanager
def _copied_tree() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fencedlock-mutant-") as directory:
        copy = Path(directory)
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
                shutil.copytree(source, copy / name, ignore=ignored)
            else:
                shutil.copy(source, copy / name)
        yield copy


def _pytest(tree: Path, tests: Iterable[str], seconds: float) -> tuple[int | None, str]:
    """Run tests in a tree until one fails; the exit code, None if time ran out, and the output."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=line", "--no-header"]
    command += ["-n0", "-p", "no:randomly", "-p", "no:cacheprovider"]
    command += ["-o", f"timeout={LONGEST_TEST}"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    # What one mutant does to a server is its own affair.
    for name in [name for name in environment if name.startswith("FENCEDLOCK_TEST_")]:
        del environment[name]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, *tests],
            cwd=tree,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
        finally:
            # A test that its own limit ended takes the whole of pytest along, but not its servers.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return code, output.read()


_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)
_HUNG = re.compile(r"^\+{10,} Timeout \+{10,}$", re.MULTILINE)


def judge(number: int, mutation: Mutation, known: str = "") -> Verdict:
    """Make one mutant, and run its tests; the one that is `known` to notice it goes first."""
    began = time.monotonic()

    def verdict(word: str, by: str, output: str = "") -> Verdict:
        return Verdict(number, mutation, word, by, time.monotonic() - began, output)

    if fault := fault_of(mutation):
        return verdict(DOUBTFUL, fault)
    with _copied_tree() as tree:
        path = tree / PACKAGE / mutation.file
        original = path.read_text()
        path.write_text(original.replace(mutation.old, mutation.new))
        code, output, failed = _first_failure(tree, mutation, known)
        if code == 0:
            return verdict(SURVIVED, " ".join(mutation.tests), output)
        if not failed:
            hung = " (hung)" if _HUNG.search(output) else ""
            return verdict(DOUBTFUL, f"no test failed: pytest ended with {code}{hung}", output)
        path.write_text(original)
        code, without = _pytest(tree, [failed], LONGEST)
        if code != 0:
            return verdict(DOUBTFUL, f"{failed} fails without the mutation, too", without)
        return verdict(CAUGHT, failed)


def _first_failure(tree: Path, mutation: Mutation, known: str) -> tuple[int | None, str, str]:
    """Pytest's exit code, its output, and the test that failed; empty if none did."""
    code, output = None, ""
    for tests in ([known] if known else [], mutation.tests):
        if tests:
            code, output = _pytest(tree, tests, LONGEST)
            if code == 1 and (failed := _FAILED.search(output)):
                return code, output, failed[1]
    return code, output, ""


def _chosen(words: Sequence[str]) -> list[int]:
    if not words:
        return list(range(1, len(MUTATIONS) + 1))
    found: list[int] = []
    for word in words:
        first, _, last = word.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.mutants")
    parser.add_argument("--only", nargs="+", default=[], metavar="N", help="numbers, or 12-15")
    parser.add_argument("--jobs", type=int, default=1, help="mutants that are tried at once")
    parser.add_argument("--list", action="store_true", help="only tell the mutations")
    parser.add_argument("--show", action="store_true", help="show pytest's output if not caught")
    parser.add_argument("--table", action="store_true", help="write it down in docs/mutants.md")
    given = parser.parse_args(arguments)
    numbers = _chosen(given.only)
    if given.list:
        for number in numbers:
            mutation = MUTATIONS[number - 1]
            print(f"{number:3}  {mutation.file}: {mutation.what}")
        return 0
    verdicts: list[Verdict] = []
    rows = mutants_page.known()
    with ThreadPoolExecutor(given.jobs) as pool:
        for done in pool.map(lambda number: _judge_again(number, rows), numbers):
            verdicts.append(done)
            print(done.line(), flush=True)
            if given.table:
                # Each time, so that nothing is lost if the rest is broken off.
                _note(done, rows)
            if given.show and done.verdict != CAUGHT:
                print(done.output[-4000:], flush=True)
    left = [each for each in verdicts if each.verdict != CAUGHT]
    print(f"{len(verdicts) - len(left)} of {len(verdicts)} mutants were caught")
    for each in left:
        print(f"not caught: {each.line()}")
    return 1 if left else 0


def _judge_again(number: int, rows: Mapping[str, Row]) -> Verdict:
    mutation = MUTATIONS[number - 1]
    row = rows.get(mutation.what)
    return judge(number, mutation, row.test if row and row.is_caught else "")


def _note(done: Verdict, rows: dict[str, Row]) -> None:
    by = done.by if done.verdict == CAUGHT else mutants_page.NOBODY
    rows[done.mutation.what] = Row(by, mutants_page.today())
    mutants_page.write(rows)


if __name__ == "__main__":
    sys.exit(main())
