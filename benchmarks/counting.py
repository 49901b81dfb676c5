"""What was asked of the servers: the same on every machine, busy or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.servers import Postgres, Redis

#: What a new connection says first, and what drivers ask of their own accord.
_GREETINGS = {"HELLO", "CLIENT", "AUTH", "SELECT", "PING", "INFO", "SCRIPT", "COMMAND"}
_SETTINGS = ("SET ", "SELECT set_config(")


@dataclass
class Counts:
    """What the clients sent; what scripts did is `inner`."""

    commands: int = 0
    scripts: int = 0
    inner: int = 0
    statements: int = 0
    #: Of these, the ones about held locks; history is written apart from them.
    on_held: int = 0

    @property
    def asked(self) -> int:
        return self.commands + self.statements


@contextmanager
def counted(redis: Redis, postgres: Postgres) -> Iterator[Counts]:
    """Yield counts that are filled in when the block ends."""
    counts = Counts()
    with redis.monitor() as commands, postgres.statements() as statements:
        yield counts
    sent = [command for command in commands if command.name not in _GREETINGS]
    counts.commands = sum(not command.lua for command in sent)
    counts.scripts = sum(command.name in ("EVAL", "EVALSHA") for command in sent)
    counts.inner = sum(command.lua for command in sent)
    ours = {text: n for text, n in statements.items() if not text.startswith(_SETTINGS)}
    counts.statements = sum(ours.values())
    counts.on_held = sum(n for text, n in ours.items() if "django_fencedlock_heldlock" in text)
