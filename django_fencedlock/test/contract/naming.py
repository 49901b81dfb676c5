"""Valid lock names, and the signals about them."""

from __future__ import annotations

import contextlib
import uuid
from typing import Any

import pytest
from django.conf import settings
from django.test import override_settings

from ... import signals
from ...exceptions import LockNotAcquired
from ..processes import AnotherThread
from .base import Contract, connected, listening

#: Names that a backend could confuse or reject. Each pair is two locks.
ODD_NAMES = {
    "capital": ("Invoice", "invoice"),
    "trailing blank": ("invoice", "invoice "),
    "leading blank": (" invoice", "invoice"),
    "accent": ("caf\u00e9", "cafe"),
    "composed": ("caf\u00e9", "cafe\u0301"),
    "eszett": ("stra\u00dfe", "strasse"),
    "other scripts": ("\u8bf7\u6c42\u4e66", "\u0441\u0447\u0451\u0442"),
    "beyond 16 bits": ("\U0001f512", "\U0001f513"),
    "braces": ("{invoice}:{0}", "{invoice}:{1}"),
    "closing brace": ("}invoice{", "{invoice}"),
    "newline": ("in\nvoice", "in\r\nvoice"),
    "per cent": ("%s", "%(name)s"),
    "quotes": ("in'voice", 'in"voice'),
    "backslash": ("in\\voice", "in\\\\voice"),
    "glob": ("invoice:*", "invoice:?"),
    "colons": ("a::b", "a:b"),
}


class NameContract(Contract):
    """Valid names, and the signals about them."""

    @pytest.mark.parametrize("kind", ODD_NAMES)
    def test_odd_names_are_locks_of_their_own(self, kind: str, thread: AnotherThread) -> None:
        prefix = uuid.uuid4().hex
        first, second = (f"{odd}{prefix}{odd}" for odd in ODD_NAMES[kind])
        with self.lock(first) as lease:
            assert not self.is_free_for(thread, first)
            assert lease.name == first
            assert self.is_next(lease.token)
            assert self.is_free_for(thread, second)
            assert self.recorded(first) == (lease.token, lease.owner_id)

    @pytest.mark.parametrize("character", ["x", "\u00e9", "\U0001f512"])
    def test_names_of_200_characters_may_differ_in_the_last(
        self, character: str, thread: AnotherThread
    ) -> None:
        name = uuid.uuid4().hex.ljust(199, character)
        with self.lock(f"{name}a") as lease:
            assert self.is_next(lease.token)
            assert not self.is_free_for(thread, f"{name}a")
            assert self.is_free_for(thread, f"{name}b")

    def test_a_name_that_is_live_at_another_service_is_refused_naming_both(
        self, name: str, thread: AnotherThread
    ) -> None:
        elsewhere = {"FENCE_DATABASE": self.database}
        both = {**getattr(settings, "FENCEDLOCK", {}), "elsewhere": elsewhere}
        with override_settings(FENCEDLOCK=both):
            for held, asked in ((self.alias, "elsewhere"), ("elsewhere", self.alias)):
                lease = thread.call(self.take, name, backend=held)
                with pytest.raises(LockNotAcquired) as caught:
                    self.lock(name, backend=asked).acquire(blocking=False)
                assert repr(held) in str(caught.value)
                assert repr(asked) in str(caught.value)
                thread.call(lease.release)
                # The registry row may be deleted after the lock was released.
                self.service.keeper.clear()
                self.take(name, backend=asked).release()
                self.service.keeper.clear()

    # Signals

    def test_signals_are_sent_in_order(self, name: str, thread: AnotherThread) -> None:
        heard: list[str] = []
        with contextlib.ExitStack() as stack:
            for kind in ("lock_acquired", "lock_not_acquired", "lock_released"):
                stack.enter_context(listening(getattr(signals, kind), name, kind, heard))
            with self.lock(name):
                assert not self.is_free_for(thread, name)
        assert heard == ["lock_acquired", "lock_not_acquired", "lock_released"]

    def test_a_receiver_that_raises_breaks_nothing(self, name: str) -> None:
        def receive(**kwargs: Any) -> None:
            raise ZeroDivisionError

        with contextlib.ExitStack() as stack:
            for signal in (signals.lock_acquired, signals.lock_released):
                stack.enter_context(connected(signal, receive))
            with self.lock(name) as lease:
                assert lease.verify()
        assert self.is_free(name)
