"""The settings: defaults, validation, and one clear message for each mistake."""

from __future__ import annotations

import contextlib
import difflib
import enum
import math
import signal
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, cached_property
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import connections
from django.utils.module_loading import import_string

from .core import names
from .exceptions import SettingsError
from .problems import Problem as Problem
from .storage.text import without_secrets

DEFAULT_ALIAS, MAX_ALIAS = "default", 100
_KINDS = {"zookeeper": "ZooKeeper", "dynamodb": "DynamoDB"}
BACKENDS = {
    kind: f"django_fencedlock.backends.{kind}.{_KINDS.get(kind, kind.title())}Backend"
    for kind in (
        *("database", "postgres", "mysql", "redis"),
        *("redlock", "etcd", "zookeeper", "consul", "dynamodb"),
    )
}
DEFAULTS: Mapping[str, Any] = {
    "BACKEND": BACKENDS["database"],
    "LOCATION": "",
    "TTL": 30,
    "BLOCKING_TIMEOUT": 10,
    "KEY_PREFIX": "",
    "FENCE_DATABASE": "default",
    "OPTIONS": {},
}
#: Seconds for one request to a lock service; the option "TIMEOUT" of an alias overrides it.
TIMEOUT = 5.0
_TIMEOUTS = (
    "Use TTL for the expiry, BLOCKING_TIMEOUT for how long to wait for a lock, or "
    "OPTIONS['TIMEOUT'] for the limit of a request."
)
WITHOUT_LOCK = ("reject", "warn", "allow")
VENDORS = ("postgresql", "sqlite", "mysql")


class Unset(enum.Enum):
    """The default of an argument for which None means something else."""

    UNSET = "the setting applies"


UNSET = Unset.UNSET


@dataclass(frozen=True)
class AliasConfig:
    """One alias of ``FENCEDLOCK``, complete and valid."""

    alias: str
    backend: str
    # A URL may contain a password, and error reports show local variables.
    #: A list in the settings is joined by commas.
    location: str = field(repr=False)
    ttl: float
    #: Infinite for no limit.
    blocking_timeout: float
    key_prefix: str
    fence_database: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def where(self, key: str = "") -> str:
        return _where(self.alias, key)

    @property
    def locations(self) -> list[str]:
        """LOCATION as a list, for services that have several addresses."""
        return [each.strip() for each in self.location.split(",") if each.strip()]

    @cached_property
    def timeout(self) -> float:
        """Seconds for one request, in backends that have the option."""
        return seconds(self.options.get("TIMEOUT", TIMEOUT), f"{self.where('OPTIONS')}['TIMEOUT']")


def patience(value: object, what: str = "blocking_timeout") -> float:
    """Return how long to wait for a lock, in seconds; None is no limit."""
    return math.inf if value is None else seconds(value, what, zero=True, endless=True)


def seconds(value: object, what: str, *, zero: bool = False, endless: bool = False) -> float:
    """Return a duration in seconds, given as a number or a timedelta."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        none = ", or None for no limit" if endless else ""
        what = f"{what} is {value!r}; it has to be a number of seconds or a timedelta{none}."
        raise TypeError(what)
    low = value < 0 if zero else value <= 0
    if low or math.isnan(value) or (math.isinf(value) and not endless):
        allowed = "zero or more" if zero else "more than zero"
        finite = ", or None for no limit" if endless else " and finite"
        raise ValueError(f"{what} is {value!r}; it has to be {allowed}{finite}.")
    return float(value)


def without_lock() -> str:
    """Return what happens to a write to a fenced model without a lease."""
    # An unknown value would let such a write pass.
    return str(_valid("FENCEDLOCK_WITHOUT_LOCK"))


@cache
def history() -> int:
    """Return how many events of each kind the history keeps per lock; 0 switches it off."""
    value, problem = _other("FENCEDLOCK_HISTORY")
    # A wrong value must not fail a lock; a check reports it.
    return 0 if problem else int(value)


@cache
def abort_signal() -> int:
    """Return the signal that interrupts a body in the main thread."""
    return int(_valid("FENCEDLOCK_ABORT_SIGNAL"))


# Signals that neither the system nor Celery uses. macOS has no real-time signals. SIGUSR2 isn't the
# default where there are: some projects and Celery set-ups use it.
_SIGNALS = [int(getattr(signal, "SIGUSR2", 0))]
_SIGNAL = _SIGNALS[0]
if hasattr(signal, "SIGRTMIN"):
    _SIGNALS += range(signal.SIGRTMIN, signal.SIGRTMAX + 1)
    _SIGNAL = signal.SIGRTMIN + 5

#: The settings beside FENCEDLOCK: the default, the valid values, and the problem of others.
_OTHERS: Mapping[str, tuple[Any, Container[Any], Problem]] = {
    "FENCEDLOCK_WITHOUT_LOCK": (
        "reject",
        WITHOUT_LOCK,
        Problem("E012", "", "Set it to 'reject', 'warn' or 'allow'."),
    ),
    "FENCEDLOCK_ABORT_SIGNAL": (
        _SIGNAL,
        _SIGNALS,
        Problem("E015", "", "Use signal.SIGUSR2, or one from signal.SIGRTMIN to signal.SIGRTMAX."),
    ),
    "FENCEDLOCK_HISTORY": (
        20,
        range(1001),
        Problem("E016", "", "Set it to an int from 0, which switches it off, to 1000."),
    ),
}
SETTINGS = ("FENCEDLOCK", *_OTHERS)


def _other(name: str) -> tuple[Any, Problem | None]:
    """Return the value of a setting, and its problem if it is invalid."""
    default, allowed, problem = _OTHERS[name]
    value = getattr(settings, name, default)
    if value in allowed and not isinstance(value, bool):
        return value, None
    return value, replace(problem, message=f"{name} is {value!r}.")


def _valid(name: str) -> Any:
    value, problem = _other(name)
    if problem:
        raise SettingsError(str(problem))
    return value


def aliases() -> list[str]:
    """Return the configured aliases; ``default`` alone without settings."""
    found = _settings()
    return list(found) if isinstance(found, Mapping) else [DEFAULT_ALIAS]


def lacks(alias: str) -> bool:
    """Return whether an alias is missing. False for unreadable settings: E001 reports those."""
    return alias not in aliases() and not any(shape_problems())


@cache
def config(alias: str = DEFAULT_ALIAS) -> AliasConfig:
    """Return one alias. Raise `SettingsError` with its first error."""
    for problem in shape_problems():
        raise SettingsError(str(problem))
    found = _settings()
    if alias not in found:
        has = names.shown(map(repr, found))
        raise SettingsError(f"FENCEDLOCK has no alias {alias!r}; it has {has}.")
    for problem in alias_problems(alias, found[alias]):
        if problem.is_error:
            raise SettingsError(str(problem))
    return _read(alias, found[alias])


def problems() -> Iterator[Problem]:
    """Yield all problems of the settings, without asking a server."""
    broken = list(shape_problems())
    yield from broken
    for alias, given in {} if broken else _settings().items():
        yield from alias_problems(alias, given)
    for name in dir(settings):
        bare = name.replace("_", "")
        is_near = "FENCEDLOCK" in bare or difflib.get_close_matches(bare, ["FENCEDLOCK"], 1, 0.9)
        if is_near and name not in SETTINGS:
            yield Problem("W003", f"Nothing reads the setting {name}.", unknown(name, SETTINGS))
    yield from filter(None, (_other(name)[1] for name in _OTHERS))


def shape_problems() -> Iterator[Problem]:
    """Yield the problems that make the settings unreadable."""
    found = _settings()
    if not isinstance(found, Mapping) or not DEFAULTS.keys().isdisjoint(found):
        bare = " and ".join(key for key in DEFAULTS if key in found) or "the settings of an alias"
        hint = f'Wrap {bare} in {{"default": {{...}}}}.'
        yield Problem("E001", "FENCEDLOCK must be a dict of aliases, like CACHES.", hint)
        return
    for alias, given in found.items():
        if not isinstance(given, Mapping):
            hint = 'Make it a dict, such as {"BACKEND": ..., "TTL": 30}.'
            yield Problem("E001", f"{_where(alias)} is {shown(given)}.", hint)
    if DEFAULT_ALIAS not in found:
        what = f"FENCEDLOCK has no alias 'default'; it has {names.shown(map(repr, found))}."
        yield Problem("E001", what, "Add it: a lock without backend= uses it.")


def alias_problems(alias: str, given: Mapping[str, Any]) -> Iterator[Problem]:
    if given.get("BLOCKING_TIMEOUT", 0) in (None, math.inf):
        what = f"{_where(alias, 'BLOCKING_TIMEOUT')} is {given['BLOCKING_TIMEOUT']}: a lock "
        what += "without blocking_timeout= waits for ever, in web requests too."
        hint = "Set seconds here, and blocking_timeout=None where a wait may have no limit."
        yield Problem("W010", what, hint)
    broken = list(_value_problems(alias, given))
    yield from broken
    if broken:
        return
    try:
        backend = backend_class(given.get("BACKEND", DEFAULTS["BACKEND"]))
    except ImproperlyConfigured as exc:
        yield Problem("E005", f"{_where(alias, 'BACKEND')}: {exc}")
    except (ImportError, TypeError) as exc:
        path = given["BACKEND"]
        paths = {**BACKENDS, **{each.lower(): each for each in BACKENDS.values()}}
        near = difflib.get_close_matches(path.lower(), paths, 1, 0.5)
        guesses = [f"Did you mean {paths[each]!r}?" for each in near if paths[each] != path]
        why = "" if guesses else f": {without_secrets(str(exc))}"
        what = f"{_where(alias, 'BACKEND')} is {shown(path)}, which can't be used{why}."
        hint = f"Use a dotted path, such as {DEFAULTS['BACKEND']!r}."
        yield Problem("E004", what, *(guesses or [hint]))
    else:
        yield from backend.problems(_read(alias, given))


def location_problems(config: AliasConfig) -> Iterator[Problem]:
    """Yield a problem if LOCATION is set for a backend that uses FENCE_DATABASE only."""
    if config.location:
        what = f"{config.where('LOCATION')} is {shown(config.location)}"
        hint = "Leave it out; FENCE_DATABASE names the database."
        if config.location.startswith(("redis", "unix:")):
            hint = f"Add 'BACKEND': {BACKENDS['redis']!r}."
        yield Problem("E007", f"{what}, which this backend can't use.", hint)


def shown(value: object) -> str:
    return without_secrets(repr(value))


def backend_class(path: str) -> Any:
    found = import_string(path)
    if not isinstance(found, type) or not hasattr(found, "supports_waiting"):
        raise TypeError(f"{path} isn't a lock backend")
    return found


def sharing_backends() -> list[str]:
    """Return the backends of this package that have shared locks, and whose driver is there."""
    found = []
    for kind, path in BACKENDS.items():
        with contextlib.suppress(ImportError, ImproperlyConfigured):
            if backend_class(path).supports_shared:
                found.append(kind)
    return found


def unknown(key: str, known: Any) -> str:
    """Return a hint with the known keys, and the most similar one."""
    as_known = {each.upper(): each for each in known}
    near = difflib.get_close_matches(key.upper(), as_known, n=1)
    guess = f"Did you mean {as_known[near[0]]!r}? " if near else ""
    if guess and len(as_known) > names.SHOWN:
        return guess.strip()
    return f"{guess}Known keys: {names.shown(sorted(known))}."


def _value_problems(alias: str, given: Mapping[str, Any]) -> Iterator[Problem]:
    if (length := len(str(alias))) > MAX_ALIAS:
        what = f"The alias {alias!r} has {length} characters."
        yield Problem("E002", what, f"Use at most {MAX_ALIAS}: the tables have no room for more.")
    for key in set(given).difference(DEFAULTS):
        what = f"{_where(alias)} has an unknown key {key!r}."
        yield Problem("E002", what, _TIMEOUTS if key == "TIMEOUT" else unknown(str(key), DEFAULTS))
    whole = {**DEFAULTS, **given}
    for key, default in DEFAULTS.items():
        value, kind = whole[key], type(default)
        if kind is int:
            try:
                (patience if key == "BLOCKING_TIMEOUT" else seconds)(value, _where(alias, key))
            except (TypeError, ValueError) as exc:
                yield Problem("E003", str(exc))
        elif not isinstance(value, kind) and not (key == "LOCATION" and _are_texts(value)):
            hint = f"Make it a {kind.__name__}{' or a list of them' * (key == 'LOCATION')}."
            yield Problem("E002", f"{_where(alias, key)} is {shown(value)}.", hint)
    if not isinstance(database := whole["FENCE_DATABASE"], str):
        return
    what = f"{_where(alias, 'FENCE_DATABASE')} is {database!r}"
    if database not in settings.DATABASES:
        hint = f"Use one of {names.shown(map(repr, settings.DATABASES))}."
        yield Problem("E006", f"{what}, which DATABASES doesn't have.", hint)
    elif (vendor := connections[database].vendor) not in VENDORS:
        hint = f"Fences can be kept on {', '.join(VENDORS)} (which includes MariaDB)."
        yield Problem("E006", f"{what}, a database of vendor {vendor!r}.", hint)


def _are_texts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)


def _read(alias: str, given: Mapping[str, Any]) -> AliasConfig:
    whole = {**DEFAULTS, **given}
    if not isinstance(whole["LOCATION"], str):
        whole["LOCATION"] = ",".join(whole["LOCATION"])
    whole["TTL"] = seconds(whole["TTL"], "TTL")
    whole["BLOCKING_TIMEOUT"] = patience(whole["BLOCKING_TIMEOUT"])
    return AliasConfig(alias, **{key.lower(): value for key, value in whole.items()})


def _settings() -> Mapping[str, Mapping[str, Any]]:
    found: Any = getattr(settings, "FENCEDLOCK", None)
    return {DEFAULT_ALIAS: {}} if found in (None, {}) else found


def _where(alias: str, key: str = "") -> str:
    return f"FENCEDLOCK[{alias!r}]" + (f"[{key!r}]" if key else "")


def _forget(*, setting: str, **kwargs: Any) -> None:
    if setting in (*SETTINGS, "DATABASES", "CACHES"):
        for each in (config, history, abort_signal):
            each.cache_clear()


setting_changed.connect(_forget, dispatch_uid="django_fencedlock.conf")
