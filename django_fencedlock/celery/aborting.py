"""`on_lost="abort"`: a body whose lock is lost is thrown out of what it is doing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from celery.exceptions import SoftTimeLimitExceeded
from django.db import Error

from ..core.manager import give_back_left_over
from ..core.runtime import clock
from ..lease import Lease
from .strikes import Abort, new_cell
from .struck import close_struck, open_blocks

T = TypeVar("T")


def run(lease: Lease, body: Callable[[], T]) -> T:
    """
    Run `body`, and interrupt it when `lease` is lost: then `LeaseLost` is raised.

    It is a courtesy. A call of C, a bare ``except:`` or a callback of a driver may hold it up or
    swallow it; whoever must not write under a lost lock has its token checked.
    """
    cell = new_cell()
    began, blocks = clock(), open_blocks()
    try:
        cell.open()
        lease.interrupt_by(cell.lost)
        # What strikes between two of these lines is caught by the next block outwards. The first
        # disarms; so does the last, since a time limit may have kept the first from it.
        try:
            try:
                cell.arm()
                return _call(body, began, blocks)
            finally:
                cell.disarm()
        except Abort as abort:
            if cell.is_lost:
                lease.explain()
                raise lease.loss() from abort
            # It was meant for a run that called this one.
            raise
        except Error as exc:
            if cell.struck and _came_of(exc, (Abort,)):
                lease.explain()
                raise lease.loss() from exc
            raise
    finally:
        cell.close()
        lease.interrupt_no_more_by(cell.lost)
        if cell.struck:
            mend(began, blocks)
        cell.pass_on()


def call(body: Callable[[], T]) -> T:
    """Run a body that nobody aborts; but a time limit, or the worker's end, may strike it."""
    return _call(body, clock(), open_blocks())


def _call(body: Callable[[], T], began: float, blocks: Mapping[str, int]) -> T:
    try:
        return body()
    except BaseException as exc:
        if not isinstance(exc, Exception) or _came_of(exc, (Abort, SoftTimeLimitExceeded)):
            mend(began, blocks)
        raise


def mend(began: float, blocks: Mapping[str, int]) -> None:
    """
    Mend what a thing thrown into a body may have broken.

    Args:
        began: The local clock before the body.
        blocks: What `open_blocks()` said before the body.
    """
    close_struck(blocks)
    give_back_left_over(began)


def _came_of(exc: BaseException | None, kinds: tuple[type[BaseException], ...]) -> bool:
    """Whether this is it, or took its place: a struck connection can't even roll back."""
    while exc is not None and not isinstance(exc, kinds):
        exc = exc.__context__
    return exc is not None
