"""Plays a scenario, all through or by steps, each when the one before has had its effect."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from .scenarios import SCENARIOS, Step
from .simulation import Refused, Simulation

#: Seconds between two steps, for reading.
PACE = 1.2
#: Seconds that a step may take beyond the ttl.
PATIENCE = 15


class Player:
    """The script of one simulation, and how far it is played."""

    def __init__(self, simulation: Simulation, pace: float = PACE) -> None:
        self.simulation = simulation
        self.steps = SCENARIOS[simulation.plan.scenario].steps
        #: How many steps are done.
        self.done = 0
        #: ``""``, ``step`` or ``play``.
        self.doing = ""
        self.trouble = ""
        self._pace = pace
        self._hold = threading.Event()

    @property
    def finished(self) -> bool:
        return self.done >= len(self.steps)

    def step(self) -> None:
        """Do the next step, without waiting for it."""
        self._begin("step")

    def play(self) -> None:
        """Do all the steps that are left, without waiting for them."""
        self._begin("play")

    def stop(self) -> None:
        """Do no further step."""
        self._hold.set()

    def _begin(self, doing: str) -> None:
        with self.simulation.log.changed:
            if self.doing:
                raise Refused("The scenario is being played.")
            if self.finished:
                raise Refused("The scenario is over. Start anew to play it again.")
            self.doing, self.trouble = doing, ""
            self._hold.clear()
            self.simulation.log.touch()
        threading.Thread(target=self._run, name="simulator-player", daemon=True).start()

    def _run(self) -> None:
        try:
            self._do_step()
            while self.doing == "play" and not self.finished and not self._hold.wait(self._pace):
                if self.simulation.closed:
                    break
                self._do_step()
        except Refused as exc:
            self.trouble = str(exc)
        except Exception as exc:
            self.trouble = f"The step failed: {exc}"
            raise
        finally:
            self.doing = ""
            self.simulation.log.touch()

    def _do_step(self) -> None:
        if self.done == 0:
            # So that no later step waits for a process to start.
            for name in sorted({step.who for step in self.steps} - {"?"}):
                self.simulation.begin(name)
        perform(self.simulation, self.steps[self.done])
        with self.simulation.log.changed:
            self.done += 1
            if self.finished:
                self.simulation.log.add(self.simulation.mirror.verdict(time.monotonic()))
            self.simulation.log.touch()


def perform(simulation: Simulation, step: Step) -> None:
    """Do a step, and wait for its effect."""
    does, who = step.does, step.who
    if does in ("acquire", "queue", "write", "release"):
        who = _holder(simulation) if who == "?" else who
        {
            "acquire": simulation.acquire,
            "queue": simulation.acquire,
            "write": simulation.write,
            "release": simulation.release,
        }[does](who)
        client = simulation.mirror.clients
        if does == "queue":
            _await(simulation, step, lambda: client[who].state in ("waiting", "holding"))
            # It is said just before it stands in line.
            time.sleep(0.1)
        else:
            _await(simulation, step, lambda: not client[who].busy)
    elif does == "pause":
        simulation.pause(who)
    elif does == "wake":
        # First, so that it is the very next thing that it does: before it can notice anything.
        simulation.write(who)
        simulation.wake(who)
        _await(simulation, step, lambda: not simulation.mirror.clients[who].busy)
    elif does in ("cut", "mend", "kill", "empty"):
        {
            "cut": simulation.cut,
            "mend": simulation.mend,
            "kill": simulation.kill,
            "empty": simulation.empty,
        }[does](who)
    else:
        _await(simulation, step, _WAITS[does](simulation, who))


def _await(simulation: Simulation, step: Step, condition: Callable[[], bool]) -> None:
    seconds = simulation.plan.ttl + PATIENCE
    if not simulation.log.wait_for(lambda: condition() or simulation.closed, seconds):
        raise Refused(f"This step had no effect within {seconds} s: {step.caption}.")


def _ran_out(simulation: Simulation, who: str) -> Callable[[], bool]:
    def has() -> bool:
        client = simulation.mirror.clients[who]
        return client.ran_out or client.lost

    return has


def _gets(simulation: Simulation, who: str) -> Callable[[], bool]:
    def has() -> bool:
        clients = simulation.mirror.clients
        wanted = clients.values() if who == "?" else [clients[who]]
        return any(each.believes and not each.busy for each in wanted)

    return has


def _kept(simulation: Simulation, who: str) -> Callable[[], bool]:
    return lambda: not simulation.mirror.clients[who].ran_out


_WAITS = {"run_out": _ran_out, "gets": _gets, "kept": _kept}


def _holder(simulation: Simulation) -> str:
    with simulation.log.changed:
        believers = simulation.mirror.believers()
        if not believers:
            raise Refused("Nobody has the lock.")
        return believers[0].name
