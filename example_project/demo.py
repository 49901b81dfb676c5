"""
The demonstration: a lock's holder is paused past its lease, and writes when it wakes.

Told twice with real processes: once nobody looks at the token, once the write is checked.
"""

import contextlib
import shutil
import signal
import sys
import textwrap
import time
from typing import Any

import django
from django.core.management import call_command
from django.db import connection

from .stage import DemoFailed, Worker

TTL = 2.0
OPENING, DEPOSIT, WITHDRAWAL = 100, 50, -30
RIGHT = OPENING + DEPOSIT + WITHDRAWAL

INTRODUCTION = f"""\
Two processes change one account, each under the same lock. The lease of the lock lasts
{TTL:g} s unless it is renewed, which happens by itself as long as the process runs.
The balance is {OPENING}. A adds {DEPOSIT}, B takes {-WITHDRAWAL} out: {RIGHT} is right in the end.
"""

WORDS = {
    "waits": "waits for the lock; it is held by {holder}, with token {token}",
    "acquired": "has the lock, with token {token}",
    "read": "reads the balance: {balance}",
    "asks": "is about to write, and waits for an answer from elsewhere",
    "woke": "has its answer and goes on to write; it can't know how long it stood still",
    "wrote": "writes the balance {balance}, with token {token}",
    "released": "gives the lock back",
    "refused": "is refused, StaleFence: {message}",
    "lost": "learns only when it leaves the lock that it had lost it: LeaseLost",
    "log": "logs: {message}",
}


def demo() -> int:
    """Tell the story; returns the exit code of the process."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # So that the workers are ended first.
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    django.setup()
    call_command("migrate", verbosity=0)
    print(INTRODUCTION)
    try:
        Scene("1. Nobody looks at the token", checked=False).play()
        Scene("2. The transaction that writes checks the token", checked=True).play()
    except DemoFailed as exc:
        print(f"\nThe demo failed: {exc}", file=sys.stderr)
        return 1
    print("As told: the lock alone let a stale write through, the token kept it out.")
    return 0


class Scene:
    """One telling, with an account and two workers of its own."""

    def __init__(self, title: str, *, checked: bool) -> None:
        # The models can be imported only now that Django is set up.
        from .accounts.models import Account

        self.title = title
        self.checked = checked
        self.account = Account.objects.create(balance=OPENING)
        # The workers have connections of their own.
        connection.close()
        self.tokens: dict[str, list[int]] = {"A": [], "B": []}
        self.endings: list[str] = []

    def play(self) -> None:
        print(f"{self.title}\n")
        self.began = time.monotonic()
        with contextlib.ExitStack() as stack:
            a = stack.enter_context(contextlib.closing(self._worker("A", DEPOSIT, "--ask")))
            self._follow(a, until="asks")
            a.pause()
            self._tell("A", f"stands still (SIGSTOP to process {a.pid})")
            b = stack.enter_context(contextlib.closing(self._worker("B", WITHDRAWAL)))
            self._follow(b)
            a.answer()
            self._tell("A", "is woken (SIGCONT)")
            a.wake()
            self._follow(a)
        self._judge()

    def _worker(self, name: str, amount: int, *options: str) -> Worker:
        given: list[object] = ["--account", self.account.pk, "--amount", amount, "--ttl", TTL]
        worker = Worker(name, *given, *options, *(["--checked"] if self.checked else []))
        self._tell(name, f"starts, as process {worker.pid}")
        return worker

    def _follow(self, worker: Worker, until: str | None = None) -> None:
        """Tell what a worker says, up to an event or to its end."""
        while said := worker.hear():
            event = said["event"]
            self._note(worker.name, event, said)
            self._tell(worker.name, WORDS[event].format(**said))
            if event == until:
                return
        if until:
            raise DemoFailed(f"{worker.name} ended before it came to {until!r}.")

    def _note(self, name: str, event: str, said: dict[str, Any]) -> None:
        if event == "acquired":
            self.tokens[name].append(said["token"])
        if event in ("refused", "lost"):
            self.endings.append(event)

    def _judge(self) -> None:
        self.account.refresh_from_db()
        connection.close()
        balance = self.account.balance
        if self.checked:
            expected = ({"A": [1, 3], "B": [2]}, ["refused"], RIGHT)
            verdict = "right: the stale write was refused, and A did its work anew"
        else:
            expected = ({"A": [1], "B": [2]}, ["lost"], OPENING + DEPOSIT)
            verdict = "wrong: A has overwritten what B wrote under the newer token"
        found = (self.tokens, self.endings, balance)
        if found != expected:
            raise DemoFailed(f"expected {expected}, found {found}.")
        print(f"\n   The balance is {balance}: {verdict}.\n")

    def _tell(self, who: str, what: str) -> None:
        seconds = time.monotonic() - self.began
        width = shutil.get_terminal_size((100, 0)).columns
        line = f"   {seconds:5.2f} s  {who}  {what}"
        print(textwrap.fill(line, width, subsequent_indent=" " * 15), flush=True)
