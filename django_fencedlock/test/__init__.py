"""
Helpers for tests of code that uses locks, and the contract.

Pytest finds the fixtures by itself. The contract is in `django_fencedlock.test.contract`.
"""

from .aids import (
    assert_locked,
    assert_not_locked,
    disable_locking,
    eager_tasks,
    expire_lease,
    hold_lock,
    lose_lease,
)
from .audit import assert_all_writes_fenced

__all__ = [
    "assert_all_writes_fenced",
    "assert_locked",
    "assert_not_locked",
    "disable_locking",
    "eager_tasks",
    "expire_lease",
    "hold_lock",
    "lose_lease",
]
