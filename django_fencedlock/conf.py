"""The settings: their defaults, what is allowed in them, and one error message for each slip."""

from __future__ import annotations

import difflib
import math
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any, cast

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import connections
from django.utils.module_loading import import_string

from .exceptions import SettingsError
from .problems import Problem as Problem
from .storage.text import without_secrets

DEFAULT_ALIAS = "default"
DEFAULTS: Mapping[str, Any] = {
    "BACKEND": "django_fencedlock.backends.database.DatabaseBackend",
    "LOCATION": "",
    "TTL": 30,
    "BLOCKING_TIMEOUT": 10,
    "KEY_PREFIX": "",
    "FENCE_DATABASE": "default",
    "OPTIONS": {},
}
#: Seconds within which a lock service answers one request, unless OPTIONS says another "TIMEOUT".
TIMEOUT = 5.0
HISTORY, MOST_HISTORY = 20, 1000
WITHOUT_LOCK = ("reject", "warn", "allow")
SETTINGS = (
    "FENCEDLOCK",
    "FENCEDLOCK_ABORT_SIGNAL",
    "FENCEDLOCK_HISTORY",
    "FENCEDLOCK_WITHOUT_LOCK",
)
VENDORS = ("postgresql", "sqlite", "mysql")


@dataclass(frozen=True)
class AliasConfig:
    """One alias of ``FENCEDLOCK``, complete and valid."""

    alias: str
    backend: str
    # A URL may have a password, and reports of errors show the variables of every frame.
    location: str = field(repr=False)
    ttl: float
    blocking_timeout: float
    key_prefix: str
    fence_database: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def where(self, key: str = "") -> str:
        """Name the place in the settings, for messages."""
        return _where(self.alias, key)

    @property
    def timeout(self) -> float:
        """Seconds within which one request is answered, by those backends that have the option."""
        return seconds(self.options.get("TIMEOUT", TIMEOUT), f"{self.where('OPTIONS')}['TIMEOUT']")


def seconds(value: object, what: str, *, zero: bool = False, endless: bool = False) -> float:
    """Read a duration given in seconds or as a timedelta."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} is {value!r}; it has to be a number of seconds or a timedelta.")
    low = value < 0 if zero else value <= 0
    if low or math.isnan(value) or (math.isinf(value) and not endless):
        allowed = "zero or more" if zero else "more than zero"
        finite = "" if endless else " and finite"
        raise ValueError(f"{what} is {value!r}; it has to be {allowed}{finite}.")
    return float(value)


def without_lock() -> str:
    """What is done with a write to a fenced model outside of a lease."""
    # Anything else would let such a write pass: whoever asks compares with one of the three.
    for problem in _without_lock_problems():
        raise SettingsError(str(problem))
    return cast(str, _without_lock())


def _without_lock() -> Any:
    return getattr(settings, "FENCEDLOCK_WITHOUT_LOCK", "reject")


def _without_lock_problems() -> Iterator[Problem]:
    if _without_lock() not in WITHOUT_LOCK:
        yield Problem(
            "E012",
            f"FENCEDLOCK_WITHOUT_LOCK is {_without_lock()!r}.",
            f"Set it to one of {', '.join(map(repr, WITHOUT_LOCK))}.",
        )


@cache
def history() -> int:
    """How many events of each kind the history keeps of a lock; 0 if it isn't written at all."""
    # What is wrong with it must not get into the way of a lock: a check tells.
    return cast(int, _history()) if _is_count(_history()) else 0


def _history() -> Any:
    return getattr(settings, "FENCEDLOCK_HISTORY", HISTORY)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_HISTORY


@cache
def abort_signal() -> int:
    """The signal by which a body in the main thread is interrupted when its lock is lost."""
    for problem in _abort_signal_problems():
        raise SettingsError(str(problem))
    return int(_abort_signal())


def aliases() -> list[str]:
    """The aliases that the settings name; ``default`` alone if they name none."""
    found = getattr(settings, "FENCEDLOCK", None)
    return list(found) if isinstance(found, Mapping) and found else [DEFAULT_ALIAS]


def lacks(alias: str) -> bool:
    """Whether an alias is missing, as far as the settings can be read; if not, E001 tells of it."""
    return alias not in aliases() and not any(shape_problems())


@cache
def config(alias: str = DEFAULT_ALIAS) -> AliasConfig:
    """Read one alias; raises `SettingsError` with the first thing that is wrong with it."""
    for problem in shape_problems():
        raise SettingsError(str(problem))
    found = _settings()
    if alias not in found:
        raise SettingsError(
            f"FENCEDLOCK has no alias {alias!r}; it has {', '.join(map(repr, found))}."
        )
    for problem in alias_problems(alias, found[alias]):
        if problem.is_error:
            raise SettingsError(str(problem))
    return _read(alias, found[alias])


def problems() -> Iterator[Problem]:
    """All that is wrong with the settings, as far as it shows without asking a server."""
    broken = list(shape_problems())
    yield from broken
    if not broken:
        for alias, given in _settings().items():
            yield from alias_problems(alias, given)
    yield from _stray_problems()
    yield from _without_lock_problems()
    yield from _abort_signal_problems()
    if not _is_count(_history()):
        yield Problem(
            "E016",
            f"FENCEDLOCK_HISTORY is {_history()!r}.",
            f"Set it to an int from 0, which switches it off, to {MOST_HISTORY}.",
        )


def _stray_problems() -> Iterator[Problem]:
    for name in dir(settings):
        if name.startswith("FENCEDLOCK") and name not in SETTINGS:
            yield Problem("W003", f"Nothing reads the setting {name}.", unknown(name, SETTINGS))


def _abort_signal() -> Any:
    # Celery has a use for SIGUSR2 in some set-ups, and users have; macOS has no real-time signals.
    default = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else _own_signals()[-1]
    return getattr(settings, "FENCEDLOCK_ABORT_SIGNAL", default)


def _own_signals() -> list[int]:
    """The signals that neither the system nor Celery sends: those of the application."""
    found = [int(signal.SIGUSR2)] if hasattr(signal, "SIGUSR2") else [0]
    if hasattr(signal, "SIGRTMIN"):
        found += range(signal.SIGRTMIN, signal.SIGRTMAX + 1)
    return found


def _abort_signal_problems() -> Iterator[Problem]:
    if _abort_signal() not in _own_signals():
        yield Problem(
            "E015",
            f"FENCEDLOCK_ABORT_SIGNAL is {_abort_signal()!r}.",
            "Make it signal.SIGUSR2, or one from signal.SIGRTMIN to signal.SIGRTMAX: Celery and "
            "the system have a use for the others.",
        )


def shape_problems() -> Iterator[Problem]:
    """What keeps the settings from being read at all."""
    found = getattr(settings, "FENCEDLOCK", None)
    if found is None:
        return
    if not isinstance(found, Mapping):
        yield Problem(
            "E001",
            f"FENCEDLOCK is a {type(found).__name__}.",
            'Make it a dict of aliases, as CACHES is: {"default": {"BACKEND": ...}}.',
        )
        return
    if found and set(found) <= set(DEFAULTS):
        yield Problem(
            "E001",
            f"FENCEDLOCK has {', '.join(found)}, which an alias has.",
            'Write {"default": {...}} around it: it is a dict of aliases, as CACHES is.',
        )
        return
    for alias, given in found.items():
        if not isinstance(given, Mapping):
            yield Problem(
                "E001",
                f"FENCEDLOCK[{alias!r}] is {shown(given)}.",
                f"Make it a dict with some of the keys {', '.join(DEFAULTS)}.",
            )
    if found and DEFAULT_ALIAS not in found:
        yield Problem(
            "E001",
            f"FENCEDLOCK has no alias 'default'; it has {', '.join(map(repr, found))}.",
            "Add one; it is what a lock uses that names no backend.",
        )


def alias_problems(alias: str, given: Mapping[str, Any]) -> Iterator[Problem]:
    """What is wrong with one alias."""
    broken = [*_key_problems(alias, given), *_value_problems(alias, given)]
    yield from broken
    if broken:
        return
    try:
        backend = backend_class(_whole(given)["BACKEND"])
    except ImproperlyConfigured as exc:
        yield Problem("E005", f"{_where(alias, 'BACKEND')}: {exc}")
    except (ImportError, TypeError) as exc:
        yield Problem(
            "E004",
            f"{_where(alias, 'BACKEND')} is {shown(given['BACKEND'])}, which can't be used: "
            f"{without_secrets(str(exc))}.",
            "Give the dotted path of a backend, such as "
            "'django_fencedlock.backends.redis.RedisBackend'.",
        )
    else:
        yield from backend.problems(_read(alias, given))


def location_problems(config: AliasConfig) -> Iterator[Problem]:
    """What is wrong with the LOCATION of a backend that FENCE_DATABASE says all to."""
    if config.location:
        yield Problem(
            "E007",
            f"{config.where('LOCATION')} is {shown(config.location)}, which this backend can't "
            "use.",
            "Leave it out; FENCE_DATABASE names the database.",
        )


def timeout_problems(config: AliasConfig) -> Iterator[Problem]:
    """What is wrong with the option "TIMEOUT" of an alias."""
    try:
        config.timeout  # noqa: B018
    except (TypeError, ValueError) as exc:
        yield Problem("E003", str(exc))


def shown(value: object) -> str:
    """A setting for a message, less the passwords of URLs."""
    return without_secrets(repr(value))


def backend_class(path: str) -> Any:
    """Import the backend at a dotted path."""
    found = import_string(path)
    if not isinstance(found, type) or not hasattr(found, "supports_waiting"):
        raise TypeError(f"{path} is no lock backend")
    return found


def unknown(key: str, known: Any) -> str:
    """Say which keys there are, the likely one first."""
    as_known = {each.upper(): each for each in known}
    near = difflib.get_close_matches(key.upper(), as_known, n=1)
    guess = f"Did you mean {as_known[near[0]]!r}? " if near else ""
    return f"{guess}Known are {', '.join(sorted(known)) or 'none'}."


def _key_problems(alias: str, given: Mapping[str, Any]) -> Iterator[Problem]:
    for key in given:
        if key not in DEFAULTS:
            yield Problem(
                "E002", f"{_where(alias)} has an unknown key {key!r}.", unknown(str(key), DEFAULTS)
            )


def _value_problems(alias: str, given: Mapping[str, Any]) -> Iterator[Problem]:
    whole = _whole(given)
    for key, options in (("TTL", {}), ("BLOCKING_TIMEOUT", {"zero": True})):
        try:
            seconds(whole[key], _where(alias, key), **options)
        except (TypeError, ValueError) as exc:
            yield Problem("E003", str(exc))
    for key in ("BACKEND", "LOCATION", "KEY_PREFIX", "FENCE_DATABASE"):
        if not isinstance(whole[key], str):
            yield Problem("E002", f"{_where(alias, key)} is {shown(whole[key])}.", "Make it a str.")
    if not isinstance(whole["OPTIONS"], Mapping):
        yield Problem(
            "E008", f"{_where(alias, 'OPTIONS')} is {shown(whole['OPTIONS'])}.", "Make it a dict."
        )
    yield from _database_problems(alias, whole["FENCE_DATABASE"])


def _database_problems(alias: str, database: str) -> Iterator[Problem]:
    where = _where(alias, "FENCE_DATABASE")
    if database not in settings.DATABASES:
        yield Problem(
            "E006",
            f"{where} is {database!r}, which DATABASES doesn't have.",
            f"Use one of {', '.join(map(repr, settings.DATABASES))}.",
        )
    elif (vendor := connections[database].vendor) not in VENDORS:
        yield Problem(
            "E006",
            f"{where} is {database!r}, a database of vendor {vendor!r}.",
            f"Fences can be kept on {', '.join(VENDORS)} (which includes MariaDB).",
        )


def _read(alias: str, given: Mapping[str, Any]) -> AliasConfig:
    whole = _whole(given)
    return AliasConfig(
        alias=alias,
        backend=whole["BACKEND"],
        location=whole["LOCATION"],
        ttl=seconds(whole["TTL"], "TTL"),
        blocking_timeout=seconds(whole["BLOCKING_TIMEOUT"], "BLOCKING_TIMEOUT", zero=True),
        key_prefix=whole["KEY_PREFIX"],
        fence_database=whole["FENCE_DATABASE"],
        options=dict(whole["OPTIONS"]),
    )


def _settings() -> Mapping[str, Mapping[str, Any]]:
    return getattr(settings, "FENCEDLOCK", None) or {DEFAULT_ALIAS: {}}


def _whole(given: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**DEFAULTS, **given}


def _where(alias: str, key: str = "") -> str:
    return f"FENCEDLOCK[{alias!r}]" + (f"[{key!r}]" if key else "")


def _forget(*, setting: str, **kwargs: Any) -> None:
    if setting in ("FENCEDLOCK", "DATABASES", "CACHES"):
        config.cache_clear()
    elif setting == "FENCEDLOCK_ABORT_SIGNAL":
        abort_signal.cache_clear()
    elif setting == "FENCEDLOCK_HISTORY":
        history.cache_clear()


setting_changed.connect(_forget, dispatch_uid="django_fencedlock.conf")
