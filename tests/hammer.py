"""
Interrupts runs at random moments, most of them near the end of the body, and reports the results.

An exception that hits another run, or code outside of any run, shows as "escaped".
"""

import contextlib
import linecache
import random
import signal
import sys
import threading
import time
from collections import Counter
from unittest import mock

from django_fencedlock.backends.interface import Grant
from django_fencedlock.celery import interrupts
from django_fencedlock.celery.interrupts import Abort
from django_fencedlock.core import runtime
from django_fencedlock.core.identity import new_owner
from django_fencedlock.core.runtime import clock
from django_fencedlock.exceptions import LeaseLost
from django_fencedlock.lease import Lease


def a_lease(name="x"):
    return Lease(Grant(name, new_owner().id, 60, token=1), None, since=clock())


def is_within_run():
    return interrupts._thread_id() in interrupts._innermost


def run_interruptible(lease, body):
    """Run a body without arguments and time limit."""
    return interrupts.run_interruptible(lease, body, (), {}, contextlib.nullcontext())


def enter(leases, body):
    lease, *inner = leases
    return run_interruptible(lease, (lambda: enter(inner, body)) if inner else body)


class Hammer:
    def __init__(self, runs, *, length=0.0007, pause=None, nested=False, seed=0):
        self.left = self.runs = runs
        self.length = length
        self.pause = pause
        self.nested = nested
        self.random = random.Random(seed)
        self.outcomes = Counter()
        self.wrong = []

    def work(self):
        while self.left > 0:
            self.work_through()

    def work_through(self):
        try:
            while self.left > 0:
                self.left -= 1
                self.run_once()
        except Abort:
            self.outcomes["escaped"] += 1

    def run_once(self):
        leases = [a_lease("outer"), a_lease("inner")] if self.nested else [a_lease()]
        loser = self.random.choice(leases)
        self.lose_soon(loser)
        try:
            enter(leases, self.body)
        except LeaseLost as exc:
            self.outcomes["aborted" if loser.lost else "wrong"] += 1
            if exc.owner_id != loser.owner_id:
                self.outcomes["wrong"] += 1
        else:
            self.outcomes["ended"] += 1
        # Where an abort that comes late would hit.
        self.idle(self.random.uniform(0, 0.0003))

    def body(self):
        try:
            self.idle(self.length)
        except Exception:
            self.outcomes["swallowed"] += 1

    def idle(self, seconds):
        if self.pause is not None:
            self.pause(seconds)
            return
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    def lose_soon(self, lease):
        # A third somewhere within, the others about the end of the body.
        sigma = self.length / 8
        moment = (
            self.random.uniform(0, self.length)
            if self.random.random() < 0.3
            else self.random.gauss(self.length * 0.85, sigma)
        )
        due = time.perf_counter() + max(0.0, moment)
        interrupters.put((due, lease))


@contextlib.contextmanager
def late_interrupts():
    """Delay each interrupt a bit, as if the interrupting thread had been paused."""

    def wait():
        runtime.original("time", "sleep")(random.uniform(0, 0.0002))

    def interrupt(cell):
        if cell.signal is None:
            by_exception(cell)
        else:
            wait()
            signal.pthread_kill(cell.thread, cell.signal)

    def late(function):
        def call(subject, *args):
            wait()
            function(subject, *args)

        return call

    by_exception = interrupts.Interruptible.interrupt
    with contextlib.ExitStack() as stack:
        patch = mock.patch.object
        stack.enter_context(patch(interrupts.Interruptible, "interrupt", interrupt))
        stack.enter_context(patch(interrupts, "_raise_in", late(interrupts._raise_in)))
        yield


@contextlib.contextmanager
def busy_switching():
    """Switch threads often, so that the interrupting thread also runs during a loop."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.00005)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class Interrupters:
    def __init__(self):
        self.queue = runtime.SimpleQueue()
        self.runs = False

    def put(self, task):
        if not self.runs:
            self.runs = True
            runtime.start(self._run)
        self.queue.put(task)

    def _run(self):
        sleep = runtime.original("time", "sleep")
        waiting = []
        while True:
            try:
                waiting.append(self.queue.get(timeout=0.00005 if waiting else None))
                continue
            except runtime.Empty:
                pass
            now = time.perf_counter()
            for task in [each for each in waiting if each[0] <= now]:
                waiting.remove(task)
                task[1].mark_lost("interrupted")
            sleep(0)


interrupters = Interrupters()


def hammer_threads(count, runs, **options):
    hammers = [Hammer(runs, seed=place, **options) for place in range(count)]
    workers = [threading.Thread(target=hammer.work) for hammer in hammers]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum((hammer.outcomes for hammer in hammers), Counter())


class Sweep:
    """
    Interrupts once, at one instruction after the other of what is around a body.

    Stricter than Python itself, which interrupts between some instructions only.
    """

    FILES = (interrupts.__file__,)

    def __init__(self, nested=False, outer=True, foreign=False):
        self.nested = nested
        self.outer = outer
        #: Raise something else there, and lose the lock afterwards.
        self.foreign = foreign
        self.outcomes = Counter()

    def run(self):
        place = 1
        while self.interrupt_at(place):
            place += 1
        return self.outcomes

    def interrupt_at(self, place):
        leases = [a_lease("outer"), a_lease("inner")] if self.nested else [a_lease()]
        loser = leases[0 if self.outer else -1]
        tracer = _Tracer(self.FILES, place, None if self.foreign else lambda: lose(loser))
        cells = []
        try:
            with (
                mock.patch.object(
                    interrupts, "Interruptible", noting(interrupts.Interruptible, cells)
                ),
                tracer,
            ):
                outcome = enter(leases, self.body)
        except TimeLimit:
            outcome = "time limit"
        except LeaseLost as exc:
            outcome = "aborted" if exc.owner_id == loser.owner_id else "wrong"
        except Abort:
            outcome = "escaped"
        tracer.finish()
        if is_within_run() and not self.foreign:
            outcome = "left behind"
        if any(cell.armed for cell in cells):
            outcome = "still armed"
        if not self.hits_nobody(leases):
            outcome = "late"
        interrupts._innermost.pop(interrupts._thread_id(), None)
        self.outcomes[outcome] += 1
        return tracer.interrupted

    def hits_nobody(self, leases):
        """Where an abort that comes late would hit; and the next run has nothing to do with it."""
        try:
            for lease in leases:
                thread = threading.Thread(target=lose, args=[lease])
                thread.start()
                thread.join()
            for _ in range(100):
                pass
            run_interruptible(a_lease("next"), self.body)
        except Abort:
            return False
        return True

    def body(self):
        return "ended"


def noting(make, made):
    def make_and_note():
        made.append(make())
        return made[-1]

    return make_and_note


def _waits_for_mutex(thread):
    """Whether a thread is acquiring a mutex that the interrupted thread may hold."""
    frame = sys._current_frames().get(thread.ident)
    return frame is not None and "_mutex" in linecache.getline(
        frame.f_code.co_filename, frame.f_lineno
    )


class TimeLimit(Exception):
    """The exception of an unrelated signal."""


def lose(lease):
    lease.mark_lost("interrupted")


#: Where the part of `interrupts` about connections and time limits begins.
_END = interrupts.open_blocks.__code__.co_firstlineno


class _Tracer:
    def __init__(self, files, place, interrupt):
        self.files = files
        self.left = place
        self.interrupter = interrupt and threading.Thread(target=interrupt, daemon=True)
        self.interrupted = False

    def __enter__(self):
        # Python 3.12 looks, as the trace is set, whether any frame wants it so.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self.trace)

    def __exit__(self, *error):
        sys.settrace(None)

    def trace(self, frame, event, arg):
        code = frame.f_code
        if code.co_filename not in self.files or code.co_firstlineno >= _END or self.interrupted:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                self.interrupted = True
                if self.interrupter is None:
                    raise TimeLimit
                self.interrupter.start()
                self.await_interrupt()
        return self.trace

    def await_interrupt(self):
        """Let it interrupt here, however slow the machine is; unless this thread is in its way."""
        until = time.monotonic() + 5
        while self.interrupter.is_alive() and time.monotonic() < until:
            self.interrupter.join(0.02)
            if _waits_for_mutex(self.interrupter):
                return

    def finish(self):
        if self.interrupted and self.interrupter is not None:
            self.interrupter.join(20)
            assert not self.interrupter.is_alive()
