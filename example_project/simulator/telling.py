"""The state of a simulation for the page, as JSON."""

from __future__ import annotations

from typing import Any

from .house import Room
from .mirror import Seen
from .readings import latest
from .simulation import ACTIONS, Simulation


def tell(room: Room, after: int = 0) -> dict[str, Any]:
    """Return the current state, and the events after one."""
    simulation, player = room.simulation, room.player
    mirror, log = simulation.mirror, simulation.log
    with log.changed:
        return {
            "run": room.number,
            "version": log.version,
            "now": round(log.now(), 3),
            "live": mirror.is_live() or bool(player.doing),
            "closed": simulation.closed,
            "plan": simulation.plan.query(),
            "obstacle": simulation.plan.obstacle(),
            "trouble": player.trouble,
            "reading": latest(log.after(0)),
            "events": log.after(after),
            "clients": _clients(simulation),
            "why_no_cut": "" if simulation.can_cut() else simulation.backend.why_no_network,
            "score": {
                "value": mirror.value,
                "lost": mirror.lost_updates,
                "highest": mirror.highest,
                "accepted": mirror.accepted,
                "rejected": mirror.rejected,
            },
            "script": {
                "done": player.done,
                "doing": player.doing,
                "finished": player.finished,
                "steps": [step.caption for step in player.steps],
            },
        }


def _clients(simulation: Simulation) -> list[dict[str, Any]]:
    pids = simulation.pids()
    seen = simulation.mirror.clients.values()
    return [_client(each, simulation, pids.get(each.name)) for each in seen]


def _client(client: Seen, simulation: Simulation, pid: int | None) -> dict[str, Any]:
    return {
        "name": client.name,
        "pid": pid,
        "words": _words(client),
        "value": client.value,
        "holds": client.state == "holding",
        "believes": client.believes,
        "paused": client.paused,
        "cut": client.cut,
        "why_not": {action: simulation.why_not(client.name, action) for action in ACTIONS},
    }


def _words(client: Seen) -> str:
    words = {
        "off": "has ended" if client.ended else "not started",
        "starting": "starts",
        "idle": "has no lock",
        "asking": "requests the lock",
        "waiting": "waits for the lock",
        "holding": f"has the lock, token {client.token}",
    }[client.state]
    if client.state == "holding" and client.lost:
        words = f"has lost the lock, token {client.token}"
    elif client.state == "holding" and client.ran_out:
        words = f"its lease has expired, token {client.token}"
    if client.paused:
        words += "; paused before a write" if client.about_to_write else "; paused"
    return words + ("; cut off" if client.cut else "")
