"""The running simulations: one per browser, a few at once, closed when unused."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

from django.conf import settings

from .plans import Plan
from .player import PACE, Player
from .simulation import Refused, Simulation

#: The maximum number of simulations. Each has up to five processes.
MOST = 3
#: Seconds without a request after which a simulation is closed.
IDLE = 25.0


class Room:
    """A simulation and its player."""

    def __init__(self, number: int, plan: Plan) -> None:
        self.number = number
        self.simulation = Simulation(plan)
        self.player = Player(self.simulation, pace=getattr(settings, "SIMULATOR_PACE", PACE))
        self.seen_at = 0.0

    def close(self) -> None:
        self.player.stop()
        self.simulation.close()


class House:
    """All rooms, by the browser's key."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, idle: float = IDLE) -> None:
        self._clock = clock
        self._idle = idle
        self._lock = threading.Lock()
        self._rooms: dict[str, Room] = {}
        self._numbers = 0
        self._watched = False

    def room(self, key: str) -> Room | None:
        """Return the room of a browser, and keep it open."""
        with self._lock:
            room = self._rooms.get(key)
            if room is not None:
                room.seen_at = self._clock()
            return room

    def begin(self, key: str, plan: Plan) -> Room:
        """Start a new run. Its processes start when they are needed."""
        with self._lock:
            before = self._rooms.pop(key, None)
            if before is None and len(self._rooms) >= MOST:
                raise Refused(
                    f"{MOST} simulations are already running, which is the limit. One ends "
                    f"{self._idle:g} s after its page is closed; try again then."
                )
            self._numbers += 1
            room = self._rooms[key] = Room(self._numbers, plan)
            room.seen_at = self._clock()
            if not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, name="simulator-house", daemon=True).start()
        if before is not None:
            threading.Thread(target=before.close, name="simulator-end", daemon=True).start()
        return room

    def end(self, key: str, number: int) -> None:
        """Close a run, unless another one has begun since."""
        with self._lock:
            room = self._rooms.get(key)
            if room is None or room.number != number:
                return
            del self._rooms[key]
        room.close()

    def sweep(self) -> None:
        """Close all unused rooms."""
        with self._lock:
            limit = self._clock() - self._idle
            gone = [key for key, room in self._rooms.items() if room.seen_at < limit]
            rooms = [self._rooms.pop(key) for key in gone]
        for room in rooms:
            room.close()

    def close(self) -> None:
        """Close all rooms."""
        with self._lock:
            rooms = list(self._rooms.values())
            self._rooms.clear()
        for room in rooms:
            room.close()

    def _watch(self) -> None:
        while True:
            time.sleep(1)
            self.sweep()


house = House()
atexit.register(house.close)
