"""The options of a run, which are also the page's address."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from .backends import BACKENDS
from .scenarios import SCENARIOS

#: The label of each mode, and what it means for a write.
FENCINGS = {
    "serialised": ("Serialised", "a write is accepted only with the token of the newest grant."),
    "high_water": (
        "High water",
        "a write is accepted unless the row was written with a higher token before.",
    ),
    "off": ("Off", "every write is accepted."),
}
TTLS = (2, 3, 5, 10)


@dataclass(frozen=True)
class Plan:
    """A scenario and its options."""

    scenario: str = "pause"
    backend: str = "database"
    fencing: str = "serialised"
    ttl: int = 3

    @classmethod
    def read(cls, given: Mapping[str, str]) -> Plan:
        """
        Read an address or a form. The scenario has the defaults.

        Raise `ValueError` with a message for the user.
        """
        key = _choice(given, "scenario", SCENARIOS, cls.scenario)
        scenario = SCENARIOS[key]
        ttl = given.get("ttl") or str(cls.ttl)
        if ttl not in map(str, TTLS):
            raise ValueError(f"ttl is {ttl!r}; choose from {', '.join(map(str, TTLS))}.")
        return cls(
            scenario=key,
            backend=_choice(given, "backend", BACKENDS, scenario.backend),
            fencing=_choice(given, "fencing", FENCINGS, scenario.fencing),
            ttl=int(ttl),
        )

    def query(self) -> dict[str, str]:
        """Return the parameters of the address."""
        return {key: str(value) for key, value in asdict(self).items()}

    def obstacle(self) -> str:
        """Return why it can't run; empty if it can."""
        backend, scenario = BACKENDS[self.backend], SCENARIOS[self.scenario]
        if missing := backend.missing():
            return missing
        if scenario.needs_network and not backend.has_network:
            return f"{backend.why_no_network} Choose another lock service."
        if scenario.needs_renewal and backend.ends_sessions:
            return (
                "In this scenario an expired lease is renewed; "
                f"{backend.ends_sessions} has ended its session by then."
            )
        if scenario.needs_emptying and not backend.can_be_emptied:
            return f"In this scenario the lock service loses its data; {backend.label} can't."
        return ""


def _choice(given: Mapping[str, str], key: str, known: Mapping[str, object], default: str) -> str:
    value = given.get(key) or default
    if value not in known:
        raise ValueError(f"{key} is {value!r}; choose from {', '.join(known)}.")
    return value
