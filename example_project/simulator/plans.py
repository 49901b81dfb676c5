"""What a run is played with: the switches of the page, which are also its address."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from .backends import BACKENDS
from .scenarios import SCENARIOS

#: What each is called, and what it means for a write.
FENCINGS = {
    "serialised": ("Serialised", "a write is accepted under the newest grant alone."),
    "high_water": (
        "High water",
        "a write is accepted unless the row was written under a higher token before.",
    ),
    "off": ("Off", "a write is accepted, whatever its token."),
}
TTLS = (2, 3, 5, 10)


@dataclass(frozen=True)
class Plan:
    """A scenario, or none, and the switches."""

    scenario: str = "pause"
    backend: str = "database"
    fencing: str = "serialised"
    ttl: int = 3

    @classmethod
    def read(cls, given: Mapping[str, str]) -> Plan:
        """
        Read an address or a form. What isn't said is what suits the scenario.

        Raises `ValueError`, in words for whoever wrote the address.
        """
        key = _choice(given, "scenario", SCENARIOS, cls.scenario)
        scenario = SCENARIOS[key]
        ttl = given.get("ttl") or str(cls.ttl)
        if ttl not in map(str, TTLS):
            raise ValueError(f"ttl is {ttl!r}; it can be {', '.join(map(str, TTLS))}.")
        return cls(
            scenario=key,
            backend=_choice(given, "backend", BACKENDS, scenario.backend),
            fencing=_choice(given, "fencing", FENCINGS, scenario.fencing),
            ttl=int(ttl),
        )

    def query(self) -> dict[str, str]:
        """What an address says of it."""
        return {key: str(value) for key, value in asdict(self).items()}

    def obstacle(self) -> str:
        """Say why it can't be played; nothing, if it can."""
        backend, scenario = BACKENDS[self.backend], SCENARIOS[self.scenario]
        if missing := backend.missing():
            return missing
        if scenario.needs_network and not backend.has_network:
            return f"{backend.why_no_network} Choose another lock service."
        if scenario.needs_emptying and not backend.can_be_emptied:
            return f"This scenario has the lock service forget everything; {backend.label} doesn't."
        return ""


def _choice(given: Mapping[str, str], key: str, known: Mapping[str, object], default: str) -> str:
    value = given.get(key) or default
    if value not in known:
        raise ValueError(f"{key} is {value!r}; it can be {', '.join(known)}.")
    return value
