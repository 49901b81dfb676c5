"""Python code that runs in a process of its own."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def environment(given: Mapping[str, str] | None = None, **changes: str | None) -> dict[str, str]:
    """Return this process' variables, or the given ones, with changes; None removes one."""
    found = {"PYTHONPATH": str(ROOT), **(os.environ if given is None else given), **changes}
    return {key: value for key, value in found.items() if value is not None}


def run_python(
    *arguments: object,
    code: str = "",
    check: bool = True,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    **changes: str | None,
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, or a piece of code with them; by default it must succeed."""
    command = [sys.executable, *(["-c", dedent(code)] if code else []), *map(str, arguments)]
    variables = environment(env, **changes)
    done = subprocess.run(
        command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done


@contextlib.contextmanager
def python(
    *arguments: object, code: str, env: Mapping[str, str] | None = None, **changes: str | None
) -> Iterator[Any]:
    """Run a piece of code beside the block, which can talk to it, and kill it at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", dedent(code), *map(str, arguments)],
        cwd=ROOT,
        env=environment(env, **changes),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
