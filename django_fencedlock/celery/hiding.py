"""Arguments that nobody is to read: a lock's name has a digest of them, and a message says ***."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from celery.utils.saferepr import saferepr
from django.utils.crypto import salted_hmac

from ..storage.text import HIDDEN
from .canonical import canonical

_SALT = "django_fencedlock.sensitive"
#: Characters that tell one value from all others.
_DIGEST = 32


def check(sensitive: Iterable[str], signature: inspect.Signature, where: str) -> None:
    """Refuse to hide what isn't there: a slip would show it."""
    known = signature.parameters
    for each in sensitive:
        if each not in known:
            raise TypeError(
                f"@single_instance(sensitive={each!r}): {where}() has no such parameter; it has "
                f"{', '.join(known) or 'none'}."
            )


def hidden(arguments: Mapping[str, Any], sensitive: Collection[str]) -> dict[str, Any]:
    """The arguments of a call for its lock's name, with digests of those that are sensitive."""
    return {
        key: _digest(key, value) if key in sensitive else value for key, value in arguments.items()
    }


def _digest(key: str, value: Any) -> str:
    try:
        text = canonical(value)
    except TypeError:
        text = ""
    if not text:
        # Not from the error, which shows the value.
        raise TypeError(
            f"A lock name can't be made of {key!r}, a {type(value).__name__}: its text "
            "isn't the same everywhere. Pass a plain value."
        )
    # With the key of the project: whoever reads names could try all numbers of a card else.
    return f"#{salted_hmac(_SALT, text, algorithm='sha256').hexdigest()[:_DIGEST]}"


def hide_in_message(
    headers: dict[str, Any],
    body: Any,
    parameters: Sequence[inspect.Parameter],
    sensitive: Collection[str],
) -> None:
    """Have what Celery tells of a message, in logs and events, not tell them either."""
    if not (isinstance(body, tuple) and len(body) == 3):
        return
    args, kwargs, _ = body
    names = [each.name for each in parameters if each.kind in _BY_PLACE]
    rest = {each.kind: each.name for each in parameters}
    names += [rest.get(inspect.Parameter.VAR_POSITIONAL, "")] * len(args)
    others = rest.get(inspect.Parameter.VAR_KEYWORD, "")
    known = {each.name for each in parameters}
    shown = [_shown(name, each, sensitive) for name, each in zip(names, args, strict=False)]
    headers["argsrepr"] = saferepr(tuple(shown))
    headers["kwargsrepr"] = saferepr(
        {
            key: _shown(key if key in known else others, value, sensitive)
            for key, value in kwargs.items()
        }
    )


_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _shown(name: str, value: Any, sensitive: Collection[str]) -> Any:
    return HIDDEN if name in sensitive else value
