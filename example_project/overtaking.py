"""For the tests: somebody is paused past his lease, and overtaken."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from django_fencedlock import current_lease
from django_fencedlock.test import lose_lease


@contextlib.contextmanager
def overtaken(where: Any, function: str, name: str, meanwhile: Callable[[], Any]) -> Iterator[None]:
    """
    Have whoever first comes from a function that reads be paused there, and lose lock `name`.

    Args:
        where: The module or class that has the function.
        function: Its name.
        name: The lock's.
        meanwhile: What somebody else does under the lock.
    """
    read = getattr(where, function)
    calls: list[Any] = []

    def paused(*args: Any, **kwargs: Any) -> Any:
        found = read(*args, **kwargs)
        calls.append(args)
        if len(calls) == 1:
            lose_lease(current_lease(name))
            meanwhile()
        return found

    with mock.patch.object(where, function, paused):
        yield
