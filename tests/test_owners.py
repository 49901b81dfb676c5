"""Who holds a lock: which code may acquire it again."""

import asyncio
import contextvars
import inspect
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import asgiref
import greenlet
import pytest
from asgiref.sync import SyncToAsync, async_to_sync, sync_to_async

from django_fencedlock.core.identity import current_holder


def test_a_thread_that_got_the_number_of_one_that_ended_is_another():
    seen = []

    def look():
        seen.append((threading.get_ident(), current_holder()))

    for _ in range(50):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        numbers = [number for number, _ in seen]
        if len(set(numbers)) < len(numbers):
            break
    else:
        raise AssertionError("the system gave no number out twice")
    assert len({who for _, who in seen}) == len(seen)


def test_a_copied_context_is_the_thread_that_runs_it():
    mine, context = current_holder(), contextvars.copy_context()
    assert context.run(current_holder) is mine
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(context.run, current_holder).result() is not mine


def test_another_context_of_a_thread_or_greenlet_is_the_same_holder():
    def look():
        return contextvars.Context().run(current_holder), current_holder()

    inner, outer = greenlet.greenlet(look).switch()
    assert inner is outer
    assert contextvars.Context().run(current_holder) is current_holder() is not inner


def test_a_thread_ends_although_its_context_lives():
    with ThreadPoolExecutor(1) as thread:
        holder = thread.submit(current_holder).result()
        context = thread.submit(contextvars.copy_context).result()
        assert not holder.has_ended()
    assert context.run(current_holder) is not holder
    assert holder.has_ended()


def test_calls_within_a_call_leave_it_as_it_was():
    def outer():
        mine = current_holder()
        inner = async_to_sync(sync_to_async(current_holder))()
        return mine is current_holder() and mine is not inner and inner.has_ended()

    assert asyncio.run(sync_to_async(outer)())
    assert outer()


@pytest.mark.slow
def test_the_holder_is_found_at_once_among_5000_tasks():
    def measure():
        began = time.perf_counter()
        for _ in range(100):
            current_holder()
        return time.perf_counter() - began

    async def main():
        tasks = [asyncio.create_task(asyncio.sleep(60)) for _ in range(5000)]
        await asyncio.sleep(0)
        fastest = min([await sync_to_async(measure)() for _ in range(5)])
        for task in tasks:
            task.cancel()
        # It took 4 s when each look went through all tasks.
        assert fastest < 2

    asyncio.run(main())


def test_asgiref_runs_calls_through_the_method_that_is_wrapped():
    """Seen in asgiref 3.8.1 to 3.13.0. Its `thread_handler()` has no documentation."""
    assert asgiref.__version__ >= "3"
    assert "self.thread_handler" in inspect.getsource(SyncToAsync.__call__)
    assert SyncToAsync.thread_handler.__wrapped__
