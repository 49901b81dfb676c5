"""The example project: its own tests on each kind of server, its demonstration, its settings."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Postgres, Redis
from tests.servers.process import wait_until

ROOT = Path(__file__).resolve().parent.parent

needs_pauses = pytest.mark.skipif(
    not hasattr(signal, "SIGSTOP"), reason="processes can't be paused here"
)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return the environment for a process of the example."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith("EXAMPLE_")}
    ours.pop("DJANGO_SETTINGS_MODULE", None)
    # A short path for everything temporary, since sockets are among it.
    return {**ours, "EXAMPLE_DATA": str(tmp_path / "data"), "PYTHONUNBUFFERED": "1"}


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "example_project", *arguments]


def _manage(environment: dict[str, str], *arguments: str) -> str:
    """Run a command of Django's; return all that it said."""
    done = subprocess.run(
        _command("manage", *arguments),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


# The project


def test_its_checks_are_silent_and_its_migrations_complete(environment: dict[str, str]) -> None:
    assert "no issues" in _manage(environment, "check", "--database", "default")
    assert "No changes" in _manage(environment, "makemigrations", "--check", "--dry-run")


def test_its_tests_pass(environment: dict[str, str]) -> None:
    assert "\nOK\n" in _manage(environment, "test", "example_project")


def test_its_tests_pass_on_postgres_and_its_sessions(
    environment: dict[str, str], postgres: Postgres
) -> None:
    environment |= {
        "EXAMPLE_DATABASE_URL": postgres.url_of(postgres.create_database()),
        "EXAMPLE_LOCKS": "postgres",
    }
    assert "\nOK\n" in _manage(environment, "test", "example_project")
    assert "no issues" in _manage(environment, "check", "--database", "default")


def test_its_tests_pass_with_locks_on_redis(
    environment: dict[str, str], redis_server: Redis
) -> None:
    environment["EXAMPLE_LOCKS"] = f"{redis_server.url.rpartition('/')[0]}/7"
    assert "\nOK\n" in _manage(environment, "test", "example_project")


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("EXAMPLE_DATABASE_URL", "oracle://host/x", "EXAMPLE_DATABASE_URL begins with 'oracle'"),
        ("EXAMPLE_LOCKS", "zookeeper", "EXAMPLE_LOCKS is 'zookeeper'; use 'database'"),
    ],
)
def test_a_variable_that_cannot_be_followed_is_told(
    environment: dict[str, str], variable: str, value: str, told: str
) -> None:
    done = subprocess.run(
        _command("manage", "check"),
        cwd=ROOT,
        env={**environment, variable: value},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert told in done.stderr


# The demonstration


class Demo:
    """A demonstration under way, in a session of its own."""

    def __init__(self, environment: dict[str, str], *options: str) -> None:
        self.process = subprocess.Popen(
            _command("demo", *options),
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.said = ""

    def hear(self, words: str) -> str:
        """Wait until it says something; return the line."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            if words in line:
                return line
        raise AssertionError(f"It never said {words!r}:\n{self.said}")

    def end(self) -> int:
        """Wait for its end, and return its exit code."""
        self.said += self.process.communicate(timeout=60)[0]
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def demo_environment(environment: dict[str, str], tmp_path_factory: Any) -> Iterator[Any]:
    """Return the environment; fails if processes or files of a demonstration are left behind."""
    temporary = tmp_path_factory.mktemp("d")
    environment["TMPDIR"] = str(temporary)
    yield environment
    wait_until(lambda: not _processes_with(str(temporary)), "the demo's processes to be gone", 10)


@needs_pauses
def test_the_demo_ends_as_told(demo_environment: dict[str, str], closing: Any) -> None:
    demo = closing(Demo(demo_environment, "--keep", demo_environment["EXAMPLE_DATA"]))
    assert demo.end() == 0, demo.said
    plain, fenced = demo.said.split("2. FENCING ON")
    assert "The balance is 150.00, its ledger adds up to 120.00.\n   WRONG" in plain
    assert "StaleFence" not in plain
    assert "is REFUSED. StaleFence" in fenced
    assert "The balance is 120.00, its ledger adds up to 120.00.\n   RIGHT" in fenced
    # Which tokens there were, in which order.
    assert [re.findall(r"has the lock, with token (\d)", part) for part in (plain, fenced)] == [
        ["1", "2"],
        ["1", "2", "3"],
    ]
    assert "--serve" in demo.said
    assert _alike(_excerpt()) <= _alike(demo.said)
    assert max(map(len, demo.said.splitlines())) <= 80
    assert _processes_with(demo_environment["TMPDIR"]) == []
    assert list(Path(demo_environment["TMPDIR"]).iterdir()) == []
    assert _manage(demo_environment, "check", "--database", "default")


@needs_pauses
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_demo_leaves_nothing_behind_when_it_is_ended(
    demo_environment: dict[str, str], closing: Any, number: int
) -> None:
    demo = closing(Demo(demo_environment))
    paused = int(re.findall(r"SIGSTOP to process (\d+)", demo.hear("SIGSTOP"))[0])
    assert paused in _processes_with(demo_environment["TMPDIR"])
    demo.process.send_signal(number)
    assert demo.end() == 128 + number, demo.said
    assert "Traceback" not in demo.said
    assert _processes_with(demo_environment["TMPDIR"]) == []
    assert list(Path(demo_environment["TMPDIR"]).iterdir()) == []


@needs_pauses
def test_the_demo_leaves_no_process_behind_when_it_is_killed(
    demo_environment: dict[str, str], closing: Any
) -> None:
    demo = closing(Demo(demo_environment))
    demo.hear("SIGSTOP")
    demo.process.kill()
    # The fixture waits until all are gone.


@needs_pauses
def test_the_demo_on_servers_that_it_starts(demo_environment: dict[str, str], closing: Any) -> None:
    demo_environment.pop("TMPDIR")
    demo = closing(Demo(demo_environment, "--redis", "--postgres"))
    demo.hear("RedisBackend")
    assert demo.end() == 0, demo.said
    assert "PostgreSQL" in demo.said
    assert "As told" in demo.said


def _excerpt() -> str:
    """Return what the README shows of the demonstration."""
    return (ROOT / "README.md").read_text().split("```text\n", 1)[1].split("```", 1)[0]


def _alike(text: str) -> set[str]:
    """Return what is told, without what differs from run to run."""
    text = re.sub(r"\d+\.\d\d s|process \d+", "", text)
    return {line.strip() for line in text.splitlines()}


def _processes_with(text: str) -> list[int]:
    """Return the processes that have this in their environment, but zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environ = (path / "environ").read_bytes()
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if text.encode() in environ and state != "Z":
            found.append(int(path.name))
    return found
