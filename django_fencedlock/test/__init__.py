"""
Helpers for tests of code that uses locks, and the contract.

With pytest: ``pytest_plugins = ["django_fencedlock.test.fixtures"]``. The contract is in
`django_fencedlock.test.contract`.
"""

from typing import TYPE_CHECKING, Any

from .aids import (
    assert_locked,
    assert_not_locked,
    disable_locking,
    eager_tasks,
    expire_lease,
    hold_lock,
    lose_lease,
)

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    if name != "assert_all_writes_fenced":
        raise AttributeError(name)
    # It imports models, which requires that Django is ready.
    from .audit import assert_all_writes_fenced

    return assert_all_writes_fenced
