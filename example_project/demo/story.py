"""The story itself: what is done to the worker's two processes, and what is heard of them."""

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
#: Seconds that nobody may say anything before the demonstration gives up.
PATIENCE = 25

INTRODUCTION = (
    "Two tasks book on one account, under the account's lock, each in a process of\n"
    f"its own. A adds {DEPOSIT:g} to the balance of {OPENING:g}, B takes {-WITHDRAWAL:g} off: "
    f"{RIGHT:g} is right.\n"
    f"The lock is a lease of {TTL:g} s. It is renewed as long as its process runs.\n"
)

WORDS = {
    "begins": "wants the lock too. It is held, under token {holder}, so B waits",
    "acquired": "has the lock, with token {token}",
    "took over": "has the lock, with token {token}: A's lease has run out",
    "again": "takes up the refused task, which has come back as a new message",
    "read": "reads the balance: {balance}",
    "asks": "asks another service before it writes, and waits for the answer",
    "wrote": "WRITES the balance {balance}, under token {token}",
    "refused": "is REFUSED. StaleFence: {message}",
    "fails": "hears of it at last: LeaseLost. It has written already",
    "ends": "is done, and gives the lock back",
    "log": "logs: {message}",
}


class Scene:
    """
    One telling, on an account of its own.

    Args:
        stage: Where the worker's processes are heard.
        worker: The worker.
        queue: Where it takes its tasks from.
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
        """Tell it; raises DemoFailed if it goes otherwise."""
        kind = "fenced" if self._fenced else "plain"
        # By the plain model, so that the story has the first token.
        account = PlainAccount.objects.create(number=f"{kind}-{secrets.token_hex(2)}")
        account.post(OPENING, "opening balance")
        # The worker has connections of its own.
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
            self._say(a, f"is PAUSED: SIGSTOP to process {a}. Nobody renews its lease now")
            self._book(account, WITHDRAWAL, "a withdrawal")
            self._follow(until="ends")
            # The answer is there when it wakes, as after any long pause.
            question.answer()
            self._say(a, "is WOKEN: SIGCONT. It has its answer, and knows of no pause")
        finally:
            os.kill(a, signal.SIGCONT)
        self._follow(until="ends" if self._fenced else "fails")

    def _book(self, account: int, amount: Decimal, reference: str, *, ask: bool = False) -> None:
        arguments = (account, str(amount), reference, self._fenced, ask)
        book.apply_async(arguments, queue=self._queue)

    def _follow(self, until: str) -> Told:
        """Tell what the processes tell, up to an event."""
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
            # The worker's main process may log as well, and has no part in this.
            if told.event != "log" or told.pid in self._names:
                return told
        self._worker.check()
        raise DemoFailed(f"Nothing was heard for {PATIENCE} s.{self._worker.tail()}")

    def _words(self, told: Told) -> str | None:
        """Note what is told, and return the words for it."""
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
        found = (self.tokens, self.endings, balance, total)
        if self._fenced:
            expected = ([1, 2, 3], ["refused"], RIGHT, RIGHT)
            verdict = "RIGHT: the stale write was refused, and its task done anew."
        else:
            expected = ([1, 2], ["fails"], OPENING + DEPOSIT, RIGHT)
            verdict = "WRONG: A, under token 1, has overwritten what B wrote under 2."
        if found != expected:
            raise DemoFailed(f"expected {expected}, found {found}.")
        print(f"\n   The balance is {balance:.2f}, its ledger adds up to {total:.2f}.")
        print(f"   {verdict}\n")

    def _say(self, pid: int, what: str) -> None:
        seconds = time.monotonic() - self._began
        line = f"  {seconds:5.2f} s  {self._names[pid]}  {what}"
        width = shutil.get_terminal_size((80, 0)).columns
        print(textwrap.fill(line, width, subsequent_indent=" " * 14), flush=True)
