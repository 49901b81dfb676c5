"""Set up and run the demonstration."""

import contextlib
import os
import secrets
import signal
import sys
import tempfile
import time
from pathlib import Path

import django
from django.core.exceptions import ImproperlyConfigured
from django.db import Error
from kombu.exceptions import OperationalError

from django_fencedlock import lock
from django_fencedlock.exceptions import FencedLockError

from .. import celery_app, environment, servers
from ..processes import Process, ProcessFailed
from . import DemoFailed

MADE = """\
Done in {seconds:.1f} s: a database ({database}), locks ({locks}),
messages ({broker}), and a Celery worker with two processes (prefork).
"""
FAILURES = (
    DemoFailed,
    Error,
    FencedLockError,
    ImproperlyConfigured,
    OperationalError,
    ProcessFailed,
)
DONE = "Result: the lock alone let a stale write through. The fence rejected it."
NEXT = """
Where to go next
  {python} -m example_project demo --serve
      runs it again, then serves the admin and the simulator
  {python} -m example_project demo --redis --postgres
      the same with servers: one of them or both
  example_project/README.md
      the accounts, invoices and sales of this example, to copy
  README.md, docs/guides/fenced-models.md, docs/guides/celery.md
      what the package guarantees, and what it doesn't
"""


def run(*, redis: bool, postgres: bool, keep: str | None, serve: bool, port: int) -> int:
    """Set up, run and clean up the demonstration. Return the exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # End the started programs first. Under nohup, ignore the signal.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        with contextlib.ExitStack() as stack:
            prepare(stack, redis=redis, postgres=postgres, keep=keep)
            play(stack, serve=serve, port=port)
    except FAILURES as exc:
        print(f"\nThe demo failed: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def prepare(stack: contextlib.ExitStack, *, redis: bool, postgres: bool, keep: str | None) -> None:
    """Set the environment variables for a directory and servers. Existing ones take precedence."""
    variables = os.environ
    if keep is None:
        keep = stack.enter_context(_temporary())
    # The worker has another working directory.
    variables["EXAMPLE_DATA"] = str(Path(keep).resolve())
    start_redis = redis and not variables.get("EXAMPLE_LOCKS")
    start_postgres = postgres and not variables.get("EXAMPLE_DATABASE_URL")
    wants = servers.redis_wants(program=start_redis) if redis else []
    wants += servers.postgres_wants(program=start_postgres) if postgres else []
    if wants:
        # Report all missing packages at once.
        how = servers.how_to_get(wants)
        raise DemoFailed(f"Drivers or servers are missing. {how}")
    # They end with this process. The simulator uses the same servers.
    if start_postgres:
        variables["EXAMPLE_DATABASE_URL"] = servers.postgres()
    if start_redis:
        variables["EXAMPLE_LOCKS"] = servers.redis()
        variables.setdefault("EXAMPLE_BROKER_URL", variables["EXAMPLE_LOCKS"])
    if postgres:
        variables.setdefault("EXAMPLE_LOCKS", "postgres")


def play(stack: contextlib.ExitStack, *, serve: bool, port: int) -> None:
    """Create the tables, start the worker, and run the scene twice."""
    print("Setting up a database and a Celery worker ...", flush=True)
    began = time.monotonic()
    django.setup()
    # These imports need Django to be set up.
    from django.conf import settings
    from django.core.management import call_command

    from .serving import serve as serve_site
    from .stage import Stage
    from .story import INTRODUCTION, Scene

    call_command("migrate", verbosity=0)
    _ask_servers()
    queue = f"demo-{secrets.token_hex(4)}"
    # After the worker has ended: on your broker, its queue would remain.
    stack.callback(_remove, queue)
    stage = stack.enter_context(contextlib.closing(Stage()))
    temporary = stack.enter_context(_temporary())
    log = settings.DATA / "worker.log"
    worker = stack.enter_context(contextlib.closing(_worker(log, queue, temporary)))
    worker.wait_until(lambda: (told := stage.hear(0.1)) and told.event == "ready")
    print(_made(time.monotonic() - began))
    print(INTRODUCTION)
    print("1. FENCING OFF. A plain model: no write checks the token\n")
    Scene(stage, worker, queue, fenced=False).play()
    print("2. FENCING ON. A FencedModel: each write checks the token\n")
    Scene(stage, worker, queue, fenced=True).play()
    print(DONE)
    if serve:
        # Ctrl-C is the normal end.
        with contextlib.suppress(KeyboardInterrupt):
            serve_site(port)
    else:
        python = os.path.relpath(sys.executable)
        print(NEXT.format(python=python))


def _ask_servers() -> None:
    """Raise if a server is unavailable: a worker would retry forever."""
    lock("example", backend="demo").holder()
    with celery_app.connection_for_write() as broker:
        broker.ensure_connection(max_retries=1)


def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fencedlock-demo-", ignore_cleanup_errors=True)


def _worker(log: Path, queue: str, temporary: str) -> Process:
    command = [sys.executable, "-m", "celery", "-A", "example_project", "worker", "-l", "INFO"]
    # A queue of its own, to separate it from other workers, and the project's queue.
    command += ["-P", "prefork", "-c", "2", "-Q", f"{queue},example", "-n", f"{queue}@%h"]
    # Searching for other workers takes a second.
    command += ["--without-mingle", "--without-gossip", "--without-heartbeat"]
    # A clean shutdown takes five seconds, and never ends with a paused process.
    stop, cwd = signal.SIGKILL, environment.HERE.parent
    # A killed worker leaves temporary files behind.
    variables = {**os.environ, "TMPDIR": temporary}
    return Process(command, log, stop=stop, cwd=cwd, environment=variables)


def _remove(queue: str) -> None:
    broker = celery_app.connection_for_write()
    errors = (OperationalError, *broker.connection_errors, *broker.channel_errors)
    with broker, contextlib.suppress(*errors):
        broker.default_channel.queue_delete(queue)
        broker.default_channel.exchange_delete(queue)


def _made(seconds: float) -> str:
    from django.conf import settings
    from django.db import connection

    return MADE.format(
        seconds=seconds,
        database=connection.display_name,
        locks=settings.FENCEDLOCK["default"]["BACKEND"].rpartition(".")[2],
        broker=settings.CELERY_BROKER_URL.partition(":")[0].partition("+")[0],
    )
