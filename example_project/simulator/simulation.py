"""One simulation: real processes, commands to them, and their state."""

from __future__ import annotations

import functools
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from ..processes import ProcessFailed
from .backends import BACKENDS, World
from .log import Log
from .mirror import Mirror, Seen
from .plans import Plan
from .processes import Puppet
from .proxy import Proxy

#: Seconds for a process to start, and for the referee to create the tables.
PATIENCE = 30
#: Seconds between two requests to the service while the run is active.
LOOK_EACH = 0.25
#: The longest pause with a time limit, in seconds.
LONGEST_PAUSE = 60


class Refused(Exception):
    """The command is impossible now; the message is for the user."""


class Simulation:
    """
    A run with its world and its processes.

    The condition of the log guards the mirror and the tables of processes; slow work is done
    without it.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.backend = BACKENDS[plan.backend]
        self.log = Log()
        self.mirror = Mirror(self.backend.ends_sessions, self.backend.ends_with_process)
        self.closed = False
        self._why_closed = "The simulation has ended."
        self._world: World | None = None
        self._referee: Puppet | None = None
        self._prepared = False
        self._run = ""
        self._clients: dict[str, Puppet] = {}
        self._proxies: dict[str, Proxy] = {}
        self._wakings: dict[str, float] = {}
        self._opening = threading.Lock()
        self._looking = False
        self._looked_at = 0.0
        self._emptied = 0
        self._stop = threading.Event()

    # Starting and ending

    def open(self) -> None:
        """Start to create the world, unless it exists: tables, and a counter at 0."""
        with self._opening:
            if self._referee is not None:
                return
            self._refuse_if_closed()
            if not hasattr(signal, "SIGSTOP"):
                raise Refused("This system has no SIGSTOP, so processes can't be paused.")
            name = f"simulator_{secrets.token_hex(6)}"
            directory = Path(tempfile.mkdtemp(prefix="fencedlock-simulator-"))
            try:
                server = self.backend.start()
            except (ProcessFailed, OSError, subprocess.SubprocessError) as exc:
                directory.rmdir()
                raise Refused(f"{self.backend.label} couldn't be started: {exc}") from exc
            self._world = World(name, directory, server)
            settings = self.backend.settings(self._world)
            self._run = name
            self._referee = Puppet("referee", [str(directory)], settings, self._hear_referee)
            self._referee.tell("prepare")
            self._referee.tell("count", run=self._run, fencing=self.plan.fencing)
            threading.Thread(target=self._tick, name="simulator-clock", daemon=True).start()

    def close(self) -> None:
        """End every process, and clean up."""
        with self.log.changed:
            self.closed = True
            self.log.touch()
        self._stop.set()
        with self._opening:
            for client in list(self._clients.values()):
                client.kill()
            for proxy in self._proxies.values():
                proxy.close()
            if self._referee is not None:
                self._referee.dismiss()
            if self._world is not None:
                # The referee may have ended before its cleanup.
                shutil.rmtree(self._world.directory, ignore_errors=True)

    # Commands

    def begin(self, name: str) -> None:
        """Start a client's process, unless it runs."""
        self.open()
        with self.log.changed:
            self._refuse_if_closed()
            if self.mirror.clients[name].state == "off":
                self.log.add(self.mirror.starting(name, time.monotonic()))
                hear = functools.partial(self._hear, name)
                self._clients[name] = Puppet("client", [name], self._settings(name), hear)

    def start(self, name: str) -> None:
        """Start a client's process, unless it runs, and wait until it is ready."""
        # The tables are created at the same time.
        self.begin(name)
        prepared = self.log.wait_for(lambda: self._prepared or self.closed, PATIENCE)
        self._refuse_if_closed()
        if not prepared:
            raise Refused(f"The tables weren't created within {PATIENCE} s; the server may hang.")
        started = self.log.wait_for(
            lambda: self.closed or self.mirror.clients[name].state != "starting", PATIENCE
        )
        if not started or self.mirror.clients[name].state == "off":
            raise Refused(f"{name} couldn't be started.")

    def acquire(self, name: str) -> None:
        self.start(name)
        facts = {"run": self._run, "ttl": self.plan.ttl, "fencing": self.plan.fencing}
        self._command(name, "acquire", **facts)

    def write(self, name: str) -> None:
        self._command(name, "write")

    def release(self, name: str) -> None:
        self._command(name, "release")

    def pause(self, name: str, seconds: float | None = None) -> None:
        """Pause a client's process, for some seconds or until it is woken."""
        with self.log.changed:
            self._require(name, "pause")
            self._clients[name].pause()
            now = time.monotonic()
            if seconds is not None:
                self._wakings[name] = now + min(seconds, LONGEST_PAUSE)
            self.log.add(self.mirror.paused(name, now))

    def wake(self, name: str) -> None:
        with self.log.changed:
            self._require(name, "wake")
            self._wakings.pop(name, None)
            self.log.add(self.mirror.woke(name, time.monotonic()))
            self._clients[name].wake()

    def cut(self, name: str) -> None:
        """Cut the network between a client and the lock service."""
        self.start(name)
        with self.log.changed:
            self._require(name, "cut")
            self._proxies[name].cut()
            self.log.add(self.mirror.cut(name, time.monotonic()))

    def mend(self, name: str) -> None:
        with self.log.changed:
            self._require(name, "mend")
            self._proxies[name].mend()
            self.log.add(self.mirror.mended(name, time.monotonic()))

    def kill(self, name: str) -> None:
        with self.log.changed:
            self._require(name, "kill")
            self._clients[name].kill()
        self.log.wait_for(lambda: self.mirror.clients[name].state == "off", 5)

    def empty(self, name: str = "") -> None:
        """Delete all data of the lock service."""
        self.open()
        if not self.backend.can_be_emptied:
            raise Refused(f"{self.backend.label} can't be emptied.")
        emptied = self._emptied
        assert self._referee is not None
        self._referee.tell("empty")
        self.log.wait_for(lambda: self._emptied > emptied or self.closed, 5)

    def pids(self) -> dict[str, int]:
        """Return the process ids of the running clients."""
        with self.log.changed:
            return {name: each.pid for name, each in self._clients.items() if each.running}

    def why_not(self, name: str, action: str) -> str:
        """Return why a command is impossible now; empty if it is possible."""
        with self.log.changed:
            return _why_not(self.mirror.clients[name], action, self)

    # Inside

    def _command(self, name: str, action: str, **facts: Any) -> None:
        with self.log.changed:
            self._require(name, action)
            client = self.mirror.clients[name]
            client.busy = True
            if action == "acquire":
                client.state = "asking"
            client.about_to_write = action == "write" and client.paused
            self._clients[name].tell(action, **facts)
            self.log.touch()

    def _refuse_if_closed(self) -> None:
        if self.closed:
            raise Refused(self._why_closed)

    def _require(self, name: str, action: str) -> None:
        if why := self.why_not(name, action):
            raise Refused(why)

    def _settings(self, name: str) -> dict[str, Any]:
        assert self._world is not None
        address = self.backend.address(self._world.server)
        if address is None:
            return self.backend.settings(self._world)
        if name in self._proxies:
            self._proxies.pop(name).close()
        proxy = self._proxies[name] = Proxy(*address)
        return self.backend.settings(self._world, (proxy.host, proxy.port))

    def can_cut(self) -> bool:
        """Whether there is a network between the clients and the service."""
        if self._world is None:
            return self.backend.has_network
        return self.backend.address(self._world.server) is not None

    def _hear(self, name: str, told: dict[str, Any] | None) -> None:
        with self.log.changed:
            if self.closed:
                return
            if told is None:
                self._wakings.pop(name, None)
                self.log.add(self.mirror.ended(name, time.monotonic()))
            else:
                self.log.add(self.mirror.hear(name, told))

    def _hear_referee(self, told: dict[str, Any] | None) -> None:
        with self.log.changed:
            if told is None:
                if not self._prepared and not self.closed:
                    self._why_closed = "The tables couldn't be created. See the server's console."
                self.closed = True
            elif told["event"] == "counting":
                self._prepared = True
            elif told["event"] == "looked":
                self._looking = False
                self.log.add(self.mirror.looked(told))
            elif told["event"] == "emptied":
                self._emptied += 1
                self.log.add(self.mirror.emptied(told["at"]))
            self.log.touch()

    def _tick(self) -> None:
        """Wake clients whose pause has ended, and poll the service."""
        while not self._stop.wait(0.05):
            now = time.monotonic()
            with self.log.changed:
                for name in [name for name, at in self._wakings.items() if at <= now]:
                    self.wake(name)
                self._look_if_due(now)

    def _look_if_due(self, now: float) -> None:
        mirror = self.mirror
        in_play = mirror.service is not None or mirror.overdue(now)
        due = self._looked_at + (0.0 if mirror.overdue(now) else LOOK_EACH)
        if in_play and not self._looking and now >= due and self._referee is not None:
            self._looking, self._looked_at = True, now
            self._referee.tell("look", run=self._run, fencing=self.plan.fencing)


def _why_not(client: Seen, action: str, simulation: Simulation) -> str:
    who = client.name
    if action == "acquire":
        if client.paused:
            return f"{who} is paused."
        if client.state in ("off", "idle") or (client.state == "holding" and not client.busy):
            return ""
        return f"{who} is busy."
    if action == "cut":
        if not simulation.can_cut():
            return simulation.backend.why_no_network
        return f"{who} is already cut off." if client.cut else ""
    if action == "mend":
        return "" if client.cut else f"{who} isn't cut off."
    if client.state in ("off", "starting"):
        return f"{who} isn't running."
    if action == "pause":
        return f"{who} is already paused." if client.paused else ""
    if action == "wake":
        return "" if client.paused else f"{who} isn't paused."
    if action == "kill":
        return ""
    if client.state != "holding":
        return f"{who} has no lock."
    if client.busy:
        return f"{who} is busy."
    if action == "release" and client.paused:
        return f"{who} is paused."
    return ""


#: The commands to a client.
ACTIONS = ("acquire", "write", "release", "pause", "wake", "cut", "mend", "kill")
