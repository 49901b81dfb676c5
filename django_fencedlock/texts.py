"""Texts that come from elsewhere, made fit to be shown and kept: nothing hidden, nothing secret."""

from __future__ import annotations

import re
import shlex
import unicodedata

#: What stands for a secret, and for a blank that couldn't be seen.
HIDDEN, BLANK = "***", "\N{OPEN BOX}"

_SECRET_OPTION = re.compile(
    r"([?&][^=&]*(?:pass|secret|token|key)[^=&]*=)[^&]*?(?=&|['\"\]})]*$)",
    re.IGNORECASE | re.DOTALL,
)


def visible(text: str) -> str:
    """Write what can't be seen, or does something to a terminal or a log, as an escape."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        each
        if unicodedata.category(each)[0] != "C" and each not in "\u2028\u2029"
        else _escape(each)
        for each in text
    )


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def telling(text: str) -> str:
    """Write a name so that a page tells it from others: none hides a blank of it."""
    return re.sub(r"^ | (?= )| $", BLANK, visible(text))


def in_ascii(text: str) -> str:
    """Write whatever isn't plain ASCII as an escape."""
    return visible(text).encode("ascii", "backslashreplace").decode()


def for_shell(text: str) -> str:
    """Write a text as one word of a command that may be copied into a shell."""
    return visible(shlex.quote(text))


def without_secrets(text: str) -> str:
    """Hide passwords of the URLs in a text; the user's name stays, if a colon tells it apart."""
    return _SECRET_OPTION.sub(rf"\1{HIDDEN}", _without_credentials(text))


def _without_credentials(text: str) -> str:
    # Up to the last "@": passwords that weren't quoted have what else would end them.
    start, end = text.find("://"), text.rfind("@")
    if not 0 <= start < end:
        return text
    user, colon, _ = text[start + 3 : end].partition(":")
    return f"{text[: start + 3]}{user if colon else ''}{colon}{HIDDEN}{text[end:]}"
