"""For tests: pause code until its lease is lost to another holder."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from django_fencedlock import current_lease
from django_fencedlock.test import lose_lease


@contextlib.contextmanager
def overtaken(where: Any, function: str, name: str, meanwhile: Callable[[], Any]) -> Iterator[None]:
    """
    Pause the first caller of a function after its return, and let it lose lock `name`.

    Args:
        where: The module or class of the function.
        function: The function's name.
        name: The lock name.
        meanwhile: Called as the other holder.
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
