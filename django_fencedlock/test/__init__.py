"""
For your tests: aids for code that takes locks, and the contract for backends of your own.

With pytest: ``pytest_plugins = ["django_fencedlock.test.fixtures"]``. The contract is in
`django_fencedlock.test.contract`.
"""

from .aids import assert_locked, assert_not_locked, expire, hold_lock, locks_off, lose

__all__ = [
    "assert_locked",
    "assert_not_locked",
    "expire",
    "hold_lock",
    "locks_off",
    "lose",
]
