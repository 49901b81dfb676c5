"""Plays a scenario. Each step starts after the effect of the previous one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from .scenarios import SCENARIOS, Step
from .simulation import Refused, Simulation

#: Seconds between two steps, for reading.
PACE = 1.2
#: Seconds for a step in addition to the ttl.
PATIENCE = 15


class Player:
    """The steps of one simulation, and the position in them."""

    def __init__(self, simulation: Simulation, pace: float = PACE) -> None:
        self.simulation = simulation
        self.steps = SCENARIOS[simulation.plan.scenario].steps
        #: The number of finished steps.
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
        """Start the next step."""
        self._begin("step")

    def play(self) -> None:
        """Start all remaining steps."""
        self._begin("play")

    def stop(self) -> None:
        """Start no further step."""
        self._hold.set()

    def _begin(self, doing: str) -> None:
        with self.simulation.log.changed:
            if self.doing:
                raise Refused("The scenario is already playing.")
            if self.finished:
                raise Refused("The scenario has ended. Restart to play it again.")
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
            # Start all processes first, so that no later step waits for one.
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
    has_happened = _STEPS[step.does](simulation, step.who)
    if has_happened is None:
        return
    seconds = simulation.plan.ttl + PATIENCE
    if not simulation.log.wait_for(lambda: has_happened() or simulation.closed, seconds):
        raise Refused(f"This step had no effect within {seconds} s: {step.caption}.")
    if step.does == "acquire" and not simulation.mirror.clients[step.who].believes:
        raise Refused(f"{step.who} didn't acquire the lock, so the scenario can't continue.")


def _acquire(simulation: Simulation, who: str) -> Callable[[], bool]:
    simulation.acquire(who)
    return _done(simulation, who)


def _queue(simulation: Simulation, who: str) -> None:
    simulation.acquire(who)
    client = simulation.mirror.clients
    simulation.log.wait_for(lambda: client[who].state in ("waiting", "holding"), PATIENCE)
    # The client reports it just before it enters the queue.
    time.sleep(0.1)


def _write(simulation: Simulation, who: str) -> Callable[[], bool]:
    who = _holder(simulation) if who == "?" else who
    simulation.write(who)
    return _done(simulation, who)


def _release(simulation: Simulation, who: str) -> Callable[[], bool]:
    who = _holder(simulation) if who == "?" else who
    simulation.release(who)
    return _done(simulation, who)


def _wake(simulation: Simulation, who: str) -> Callable[[], bool]:
    # Send the command first: the client writes before it can notice the loss.
    simulation.write(who)
    simulation.wake(who)
    return _done(simulation, who)


def _run_out(simulation: Simulation, who: str) -> Callable[[], bool]:
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


def _done(simulation: Simulation, who: str) -> Callable[[], bool]:
    return lambda: not simulation.mirror.clients[who].busy


def _holder(simulation: Simulation) -> str:
    with simulation.log.changed:
        believers = simulation.mirror.believers()
        if not believers:
            raise Refused("No client holds the lock.")
        return believers[0].name


#: The function of each step; it returns a condition to wait for, or None.
_STEPS: dict[str, Callable[[Simulation, str], Callable[[], bool] | None]] = {
    "acquire": _acquire,
    "queue": _queue,
    "write": _write,
    "release": _release,
    "wake": _wake,
    "pause": Simulation.pause,
    "cut": Simulation.cut,
    "mend": Simulation.mend,
    "kill": Simulation.kill,
    "empty": Simulation.empty,
    "run_out": _run_out,
    "gets": _gets,
    "kept": _kept,
}
