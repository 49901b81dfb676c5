"""Other holders for tests: a thread, and a process with its own Django."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import django
from django.conf import settings
from django.db import connections

from ..storage.background_writer import writer

T = TypeVar("T")

#: Seconds after which a test is considered hung.
TIMEOUT = 60.0


def wait_until(condition: Callable[[], object], what: str, timeout: float = TIMEOUT) -> None:
    """Check `condition` every few milliseconds until it holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"Waited {timeout:g} s for {what}."
        time.sleep(0.005)


class _Another:
    """Calls functions one after the other, all as the same holder."""

    _executor: Executor

    def start(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
        return self._executor.submit(function, *args, **kwargs)

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return self.start(function, *args, **kwargs).result(TIMEOUT)


class AnotherThread(_Another):
    """A thread that calls functions."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="another")

    def close(self) -> None:
        self._executor.submit(connections.close_all)
        self._executor.shutdown()


@contextlib.contextmanager
def another_thread() -> Iterator[AnotherThread]:
    with contextlib.closing(AnotherThread()) as thread:
        yield thread


@dataclass(frozen=True)
class Surroundings:
    """The settings for the same databases and lock services."""

    settings_module: str
    databases: Mapping[str, Mapping[str, Any]]
    overridden: Mapping[str, Any]

    @classmethod
    def here(cls) -> Surroundings:
        """Return those of this process, with the names of its test databases."""
        keys = [key for key in ("CACHES", "FENCEDLOCK", "USE_TZ") if hasattr(settings, key)]
        return cls(
            settings_module=os.environ["DJANGO_SETTINGS_MODULE"],
            databases={alias: connections[alias].settings_dict for alias in connections},
            overridden={key: getattr(settings, key) for key in keys},
        )

    def settle(self) -> None:
        """Set up Django like this in a new process."""
        os.environ["DJANGO_SETTINGS_MODULE"] = self.settings_module
        for key, value in self.overridden.items():
            setattr(settings, key, value)
        django.setup()
        for alias, entry in self.databases.items():
            connections.settings[alias] = dict(entry)
            with contextlib.suppress(AttributeError):
                # Import-time code may have created it; it isn't open yet.
                del connections[alias]
        # The background writer can't recognise a test run in a spawned process.
        writer.disable()


class AnotherProcess(_Another):
    """A process that calls functions, which must be importable in it."""

    def __init__(self, surroundings: Surroundings) -> None:
        self.surroundings = surroundings
        # Spawned, not forked: it must not inherit any state.
        spawn = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(1, spawn, initializer=surroundings.settle)
        self.pid = self.call(os.getpid)
        self.healthy = True

    def pause(self) -> None:
        """Stop the process, as suspending its machine would."""
        self.healthy = False
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process without any cleanup."""
        self.healthy = False
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        if not self.healthy:
            with contextlib.suppress(ProcessLookupError):
                self.kill()
        self._executor.shutdown(cancel_futures=True)


class Processes:
    """A pool of processes. Healthy ones are reused, because they start slowly."""

    def __init__(self) -> None:
        self._idle: list[AnotherProcess] = []

    @contextlib.contextmanager
    def borrow(self) -> Iterator[AnotherProcess]:
        here = Surroundings.here()
        known = [process for process in self._idle if process.surroundings == here]
        process = known[0] if known else AnotherProcess(here)
        self._idle = [each for each in self._idle if each is not process]
        try:
            yield process
        except BaseException:
            process.healthy = False
            raise
        finally:
            if process.healthy:
                self._idle.append(process)
            else:
                process.close()

    def close(self) -> None:
        for process in self._idle:
            process.close()
