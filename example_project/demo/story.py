"""The scene: pause one of the worker's two processes, and print their events."""

import os
import secrets
import shutil
import signal
import textwrap
import time
from decimal import Decimal

from django.conf import settings
from django.db import connection

from ..processes import Process
from . import DemoFailed
from .models import PlainAccount
from .stage import Stage, Told
from .tasks import book

TTL = settings.FENCEDLOCK["demo"]["TTL"]
OPENING, DEPOSIT, WITHDRAWAL = Decimal(100), Decimal(50), Decimal(-30)
RIGHT = OPENING + DEPOSIT + WITHDRAWAL
#: Seconds without an event after which the demonstration fails.
PATIENCE = 30

INTRODUCTION = (
    "Two tasks book on one account, under the account's lock, in two processes.\n"
    f"A adds {DEPOSIT:g} to the balance of {OPENING:g}, B subtracts {-WITHDRAWAL:g}: "
    f"the correct result is {RIGHT:g}.\n"
    f"The lease lasts {TTL:g} s. It is renewed while its process runs.\n"
)

WORDS = {
    "begins": "tries to acquire the lock. It is held {holder}, so B waits",
    "acquired": "acquires the lock with token {token}",
    "took over": "acquires the lock with token {token}: A's lease has expired",
    "again": "runs the rejected task again",
    "read": "reads the balance: {balance}",
    "asks": "calls another service before it writes, and waits for the answer",
    "wrote": "WRITES the balance {balance} with token {token}",
    "refused": "is REJECTED. StaleFence: {message}",
    "fails": "gets LeaseLost, but it has already written",
    "ends": "is done, and releases the lock",
    "log": "logs: {message}",
}


class Scene:
    """
    One run, on a new account.

    Args:
        stage: Receives the events of the worker's processes.
        worker: The worker.
        queue: The worker's queue.
        fenced: Whether the account is a FencedModel.
    """

    def __init__(self, stage: Stage, worker: Process, queue: str, *, fenced: bool) -> None:
        self._stage = stage
        self._worker = worker
        self._queue = queue
        self._fenced = fenced
        self._names: dict[int, str] = {}
        self.tokens: list[int] = []
        self.endings: list[str] = []

    def play(self) -> None:
        """Run it. Raise `DemoFailed` if the result is unexpected."""
        kind = "fenced" if self._fenced else "plain"
        # With the plain model, so that task A gets the first token.
        account = PlainAccount.objects.create(number=f"{kind}-{secrets.token_hex(2)}")
        account.post(OPENING, "opening balance")
        # The worker has its own connections.
        connection.close()
        self._began = time.monotonic()
        self._act(account.pk)
        account.refresh_from_db()
        self._judge(account.balance, account.total())
        connection.close()

    def _act(self, account: int) -> None:
        self._book(account, DEPOSIT, "a deposit", ask=True)
        question = self._follow(until="asks")
        a = question.pid
        os.kill(a, signal.SIGSTOP)
        try:
            self._say(a, f"is PAUSED: SIGSTOP to process {a}. Its lease isn't renewed")
            self._book(account, WITHDRAWAL, "a withdrawal")
            self._follow(until="ends")
            # The answer is there when the process continues, as after any long pause.
            question.answer()
            self._say(a, "CONTINUES: SIGCONT. It gets its answer, unaware of the pause")
        finally:
            os.kill(a, signal.SIGCONT)
        self._follow(until="ends" if self._fenced else "fails")

    def _book(self, account: int, amount: Decimal, reference: str, *, ask: bool = False) -> None:
        arguments = (account, str(amount), reference, self._fenced, ask)
        book.apply_async(arguments, queue=self._queue)

    def _follow(self, until: str) -> Told:
        """Print the events of the processes, up to one."""
        while True:
            told = self._hear()
            if told.event == "fails" and until != "fails":
                raise DemoFailed("{error} in the task: {message}".format(**told.facts))
            if words := self._words(told):
                self._say(told.pid, words.format(**told.facts))
            if told.event == until:
                return told

    def _hear(self) -> Told:
        while told := self._stage.hear(PATIENCE):
            # Ignore what the worker's main process logs.
            if told.event != "log" or told.pid in self._names:
                return told
        self._worker.check()
        raise DemoFailed(f"No event for {PATIENCE} s.{self._worker.tail()}")

    def _words(self, told: Told) -> str | None:
        """Record an event, and return its description."""
        if told.event == "begins":
            if told.pid not in self._names:
                self._names[told.pid] = "AB"[len(self._names)]
            if told.facts["again"]:
                return WORDS["again"]
            return WORDS["begins"] if told.facts["holder"] else None
        if told.event == "acquired":
            self.tokens.append(told.facts["token"])
            return WORDS["took over" if len(self.tokens) == 2 else "acquired"]
        if told.event in ("refused", "fails"):
            self.endings.append(told.event)
        return WORDS[told.event]

    def _judge(self, balance: Decimal, total: Decimal) -> None:
        # Tokens rise. Some lock services count all their requests, others each lock's grants.
        rises = self.tokens == sorted(set(self.tokens))
        found = (len(self.tokens), rises, self.endings, balance, total)
        if self._fenced:
            expected = (3, True, ["refused"], RIGHT, RIGHT)
            verdict = "RIGHT: the stale write was rejected, and its task was retried."
        else:
            expected = (2, True, ["fails"], OPENING + DEPOSIT, RIGHT)
            a, b = [*self.tokens, 0, 0][:2]
            verdict = f"WRONG: A, with token {a}, has overwritten what B wrote with token {b}."
        if found != expected:
            raise DemoFailed(f"expected {expected}, found {found} with the tokens {self.tokens}.")
        print(f"\n   The balance is {balance:.2f}, its ledger adds up to {total:.2f}.")
        print(f"   {verdict}\n")

    def _say(self, pid: int, what: str) -> None:
        seconds = time.monotonic() - self._began
        line = f"  {seconds:5.2f} s  {self._names[pid]}  {what}"
        width = shutil.get_terminal_size((80, 0)).columns
        print(textwrap.fill(line, width, subsequent_indent=" " * 14), flush=True)
