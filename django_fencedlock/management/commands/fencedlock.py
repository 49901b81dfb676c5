"""``manage.py fencedlock``: locks, their services and fences."""

from __future__ import annotations

import argparse
import getpass
import json
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, Error

from ... import conf
from ...backends.interface import SHARED
from ...core import names
from ...exceptions import BackendUnavailable, FencedLockError, SettingsError
from ...ops import doctor, registry, resync
from ...ops.force_release import HeldBy, Outcome, Release, consequences, force_release, held_by
from ...ops.permits import by_number, shown_ranges
from ...ops.registry import duration
from ...ops.trim import trim
from ...problems import Level
from ...storage.text import describe_error, escape_control, for_shell

#: The exit code if a service or database was unavailable, or the action failed.
FAILED = 2
_VERDICTS = ("No problems found.", "There are warnings.", "There are errors.")
#: The styles of states and levels, by the names of Django's roles.
_STYLES = {
    **dict.fromkeys(("held", "ok"), "SUCCESS"),
    **dict.fromkeys(("expiring", "expired", "warning"), "WARNING"),
    **dict.fromkeys(("lost", "unknown", "error"), "ERROR"),
    "note": "NOTICE",
}
_ALIAS: dict[str, Any] = {
    "action": "append",
    "default": [],
    "help": "only this alias of FENCEDLOCK; may be repeated",
}


class Command(BaseCommand):
    help = "List, show and force-release locks, examine lock services, and repair fences."
    stealth_options = ("stdin",)
    # The doctor must run when checks fail.
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        action = _action(actions, "list", "list the held locks and their states")
        states = [str(state) for state in registry.State]
        what = "only locks in this state; may be repeated"
        action.add_argument("--alias", **_ALIAS)
        action.add_argument("--state", action="append", choices=states, help=what)

        action = _action(actions, "show", "show everything about one lock")
        action.add_argument("name", help="the lock name")

        action = _action(actions, "release", "release one lock by force")
        action.add_argument("name", help="the lock name")
        action.add_argument("--alias", **_ALIAS)
        action.add_argument("--owner", help="only if this owner id still holds the lock")
        what = "the author to record (default: %(default)s)"
        action.add_argument("--by", default=current_user(), help=what)
        action.add_argument("--yes", action="store_true", help="don't ask for confirmation")

        action = _action(actions, "trim", "raise the fences of the permits above a lower limit")
        action.add_argument("name", help="the lock name, without the permit")
        action.add_argument("limit", type=int, help="the limit that lock() has now")
        action.add_argument("--alias", **_ALIAS)
        what = "the author to record (default: %(default)s)"
        action.add_argument("--by", default=current_user(), help=what)

        action = _action(actions, "doctor", "test each lock service and its databases")
        action.add_argument("--alias", **_ALIAS)
        what = "seconds for each alias (default: %(default)g)"
        action.add_argument("--timeout", type=float, default=doctor.LIMIT, help=what)

        action = _action(actions, "resync", "raise fences above the tokens of rows after a restore")
        what = "fenced models (default: all)"
        action.add_argument("models", nargs="*", metavar="app_label.Model", help=what)
        action.add_argument("--dry-run", action="store_true", help="only report the low fences")

    def handle(self, *args: Any, **options: Any) -> None:
        run: Callable[..., int] = getattr(self, f"_{options['action']}")
        self.as_json = options["format"] == "json"
        try:
            for alias in options.get("alias", ()):
                conf.config(alias)  # Raises an error for an unknown one.
            code = run(**options)
        except (SettingsError, LookupError, ValueError) as exc:
            raise CommandError(str(exc), returncode=FAILED) from exc
        except (FencedLockError, Error) as exc:
            why = describe_error(exc, DEFAULT_DB_ALIAS) if isinstance(exc, Error) else exc
            raise CommandError(f"{type(exc).__name__}: {why}", returncode=FAILED) from exc
        if code:
            sys.exit(code)

    # Actions; each returns the exit code.

    def _list(self, alias: list[str], state: list[str] | None, **options: Any) -> int:
        found = registry.listing(alias)
        entries = [each for each in found.entries if not state or each.state in state]
        lines = [] if found.unanswered else ["No locks."]
        if entries:
            head = ("NAME", "STATE", "KIND", "HOLDER", "ALIAS", "TOKEN", "HELD FOR", "LEFT")
            rows = [head, *map(_cells, entries)]
            if not any(row[2] for row in rows[1:]):
                # Most projects have exclusive locks alone.
                rows = [row[:2] + row[3:] for row in rows]
            lines = table(rows[0], rows[1:], self._paint)
        locks = [asdict(each) for each in entries]
        self._put({"locks": locks, "unanswered": found.unanswered}, lines)
        for each, why in found.unanswered.items():
            self.stderr.write(f"Alias {each!r} is unavailable: {why}")
        return FAILED if found.unanswered else 0

    def _show(self, name: str, **options: Any) -> int:
        found = registry.portrait(names.validate_any(name))
        lines = table(("LOCK", found.name), list(_details(found)), self._paint)
        if found.only_permits:
            lines = [f"There is no lock {escape_control(repr(name))}, but it has permits.", *lines]
        self._put(asdict(found), lines)
        if found.is_held or any(each.held for each in found.permits):
            return 0
        return FAILED if found.unanswered else 1

    def _release(
        self, name: str, alias: list[str], owner: str | None, by: str, yes: bool, **options: Any
    ) -> int:
        if self.as_json and not yes:
            raise ValueError("--format json can't ask for confirmation. Pass --yes to confirm.")
        try:
            asked = [held_by(names.validate_any(name), each) for each in alias or conf.aliases()]
        except BackendUnavailable as exc:
            raise LookupError(
                f"{exc} Nothing was released. Name the lock's alias with --alias if it is another."
            ) from exc
        holders = [each for each in asked if each]
        if len(holders) > 1:
            through = ", ".join(f"{each.holder} ({each.alias!r})" for each in holders)
            raise LookupError(
                f"Lock {name!r} is held through several aliases: {through}. Name one with --alias."
            )
        done = Release(name, "".join(alias[:1]), Outcome.NOT_HELD)
        for held in holders:
            shown = held if owner is None else held.only([owner])
            if not yes and shown and shown.owner_id:
                self._confirm(shown, len(held.holders), options.get("stdin") or sys.stdin)
            # Only the holders that were shown, or the one named by --owner, lose the lock.
            owners = owner or [each.owner_id for each in held.holders]
            done = force_release(name, by=by, backend=held.alias, owner_id=owners)
        told = str(done)
        if not any(asked):
            known = registry.portrait(name).permits
            mine = [each for each in known if not alias or each.alias in alias]
            if permits := [permit for each in mine for permit in each.held]:
                told = _instead(name, permits)
        self._put({**asdict(done), "done": done.done, "message": told}, [escape_control(told)])
        return 0 if done.done else 1

    def _confirm(self, found: HeldBy, readers: int, stdin: Any) -> None:
        where = f"alias {found.alias!r}, {found.backend}"
        expired = " Its lease has expired." if found.expired else ""
        who = [
            f"Lock {found.name!r} ({where}) is held by {found.holder}.{expired}",
            f"Its owner id is {found.owner_id}.",
        ]
        if found.holder.shared:
            lost = len(found.holders)
            which = "all of them" if lost == readers else f"{lost} of them"
            count = "one reader" if readers == 1 else f"{readers} readers"
            who = [f"Lock {found.name!r} ({where}) is held by {count}.{expired}"]
            who += [f"This takes it from {which}:"] * (readers > 1)
            who += [f"  {each}, owner id {each.owner_id}" for each in found.holders]
        for line in (
            *who,
            *consequences(found.fenced, found.holder.session_pid, shared=found.holder.shared),
        ):
            self.stdout.write(escape_control(line))
        if not stdin.isatty():
            raise CommandError("Not a terminal; nothing was released. Pass --yes to confirm.")
        self.stdout.write("Release it by force? [y/N]")
        if stdin.readline().strip().lower() not in ("y", "yes"):
            raise CommandError("Nothing was released.")

    def _trim(self, name: str, limit: int, alias: list[str], by: str, **options: Any) -> int:
        done = trim(name, limit, by=by, aliases=alias)
        count = len(done.raised)
        lines = [f"Lock {name!r}: {count} of the permits above {limit} had a fence to raise."]
        for held in done.held:
            command = f"manage.py fencedlock release {for_shell(held.name)}"
            lines.append(f"{held.name!r} is held by {held.holder}. To release it: {command}")
        for permit, blocker in done.locked.items():
            lines.append(f"The fence of {permit!r} was not raised: {blocker} locks it.")
        self._put({**asdict(done), "done": done.is_done}, list(map(escape_control, lines)))
        return 0 if done.is_done else 1

    def _doctor(self, alias: list[str], timeout: float, **options: Any) -> int:
        limit = conf.seconds(timeout, "--timeout")
        worst, reports = Level.OK, []
        for report in doctor.examine(alias, limit):
            worst = max(worst, report.level)
            reports.append(_plain(report))
            if not self.as_json:
                self._write_report(reports[-1])
        code = max(0, worst - Level.NOTE)
        self._put({"level": worst.name.lower(), "reports": reports}, [_VERDICTS[code]])
        return code

    def _write_report(self, report: dict[str, Any]) -> None:
        self.stdout.write(report["about"])
        for each in report["problems"]:
            level = each["level"]
            self.stdout.write(f"  {self._paint(level)}{' ' * (8 - len(level))} {each['message']}")
            if each["hint"]:
                self.stdout.write(f"{' ' * 11}-> {each['hint']}")

    def _resync(self, models: list[str], dry_run: bool, **options: Any) -> int:
        results = []
        for model in resync.models(models):
            results.append(result := resync.resync(model, dry_run=dry_run))
            if not self.as_json:
                self._write_resynced(result, dry_run, options["verbosity"])
        nothing = [] if results else ["There are no fenced models."]
        self._put({"dry_run": dry_run, "models": [asdict(each) for each in results]}, nothing)
        if any(each.locked for each in results):
            return FAILED
        return int(dry_run and any(each.low for each in results))

    def _write_resynced(self, result: resync.Resynced, dry_run: bool, verbosity: int) -> None:
        where, count = f"{result.model} in {result.database!r}", len(result.low)
        fences = f"{count - len(result.locked)} fences {'would be ' * dry_run}raised"
        self.stdout.write(f"{where}: {result.rows} rows with a token, {fences}")
        if verbosity > 1:
            for name, token in result.low.items():
                self.stdout.write(f"  {name!r} above {token}")
        if result.nameless:
            self.stdout.write(f"  {result.nameless} rows have no lock name")
        for name in result.locked:
            self.stderr.write(
                f"  The fence of {name!r} was not raised: an open transaction locks it. To see "
                f"whose: manage.py fencedlock show {for_shell(name)}"
            )

    # Output

    def _put(self, value: Any, lines: Sequence[str]) -> None:
        """Write a value as JSON, or the lines that say the same."""
        if self.as_json:
            # ASCII, and no DEL: a terminal would obey the control characters of a lock name.
            lines = [json.dumps(value, indent=2, default=_json_value).replace("\x7f", "\\u007f")]
        for line in lines:
            self.stdout.write(line)

    def _paint(self, word: str) -> str:
        """Colour a word for a state or level, on a terminal."""
        return str(getattr(self.style, _STYLES[word])(word)) if word in _STYLES else word


def _action(actions: Any, name: str, what: str) -> CommandParser:
    parser: CommandParser = actions.add_parser(name, help=what, description=f"{what}.")
    what = "the output format"
    parser.add_argument("--format", choices=("text", "json"), default="text", help=what)
    # Django's options, also after the action. SUPPRESS keeps the value of the main parser.
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for option in ("--no-color", "--force-color"):
        parser.add_argument(option, action="store_true", **hidden)
    parser.add_argument("-v", "--verbosity", type=int, choices=range(4), **hidden)
    return parser


def current_user() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # In a container, the user id may have no name.
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def _cells(entry: registry.ListedLock) -> tuple[str, ...]:
    times = duration(entry.held_for), duration(max(0.0, entry.remaining))
    about = entry.name, entry.state, entry.of_kind, entry.holder, entry.alias, _token(entry)
    return *about, *times


def _token(entry: registry.ListedLock) -> str:
    if not entry.fenced:
        return "unfenced"
    # None after a newer grant or a forced release.
    return "superseded" if entry.token is None else str(entry.token)


def _details(found: registry.Portrait) -> Iterator[tuple[str, str]]:
    yield from _permit_details(found)
    for asked in found.services:
        says = "not held" if asked.holder is None else f"held by {asked.holder}"
        if asked.holder is not None and asked.holder.shared:
            says = f"shared by {1 + len(asked.others)}: {asked.holder}"
        if asked.holder is not None and asked.holder.session_pid:
            says += f", server session {asked.holder.session_pid}"
        yield f"alias {asked.alias!r}", asked.error or says
        for reader in asked.others:
            yield "", str(reader)
    for fence in found.fences:
        owner = f"of owner {fence.owner}" if fence.owner else "without an owner: it was raised"
        owner = "of readers" if fence.owner == SHARED else owner
        yield f"database {fence.database!r}", f"newest token {fence.token}, {owner}"
        if fence.pinned_by:
            yield "", f"the next grant waits for {fence.pinned_by}"
    for database, why in found.away.items():
        yield f"database {database!r}", f"unavailable: {why}"
    if not found.fences and not found.away and not found.only_permits:
        yield "databases", "never granted as a fenced lock"
    for entry in found.entries:
        yield "registry", f"{entry.holder} through alias {entry.alias!r} ({entry.backend})"
        yield "state", entry.state
        if entry.of_kind:
            yield "kind", entry.of_kind
        yield "token", _token(entry)
        yield "owner", entry.owner
        yield "acquired", f"{_time(entry.acquired_at)}, {duration(entry.held_for)} ago"
        yield "renewed", _time(entry.renewed_at)
        left = duration(max(0.0, entry.remaining))
        yield "expires", f"{_time(entry.expires_at)}, {left} left"
        if entry.waiting:
            yield "waiting", str(entry.waiting)
    for each in found.history:
        times = f" {each['times']} times" if each["times"] > 1 else ""
        token = "" if each["token"] is None else f", token {each['token']}"
        note = f": {each['note']}" if each["note"] else ""
        what = f"{_time(each['at'])} {each['kind']}{times}{token}, {each['holder']}{note}"
        yield "history" if each is found.history[0] else "", what


def _permit_details(found: registry.Portrait) -> Iterator[tuple[str, str]]:
    for each in found.permits:
        yield "permits", f"{len(each.held)} of {each.limit} used, alias {each.alias!r}"
        for name, holder in each.held.items():
            yield f"  permit {by_number(name)[1]}", f"held by {holder}"
        if each.free:
            yield "  free", shown_ranges(each.free)
    if found.granted_permits and not found.permits:
        yield "permits", f"not held; granted so far: {shown_ranges(found.granted_permits)}"


def _instead(name: str, permits: list[str]) -> str:
    """Say what to release instead of a lock of which permits alone are held."""
    return (
        f"Lock {name!r} itself isn't held, but permits of it are: "
        f"{names.shown(map(repr, permits))}. Name the one to release: "
        f"manage.py fencedlock release {for_shell(permits[0])}"
    )


def _json_value(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _time(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S %Z}"


def _plain(report: doctor.Report) -> dict[str, Any]:
    problems = [
        {
            "level": each.level.name.lower(),
            # Only system checks have an id with a number.
            "message": f"{each.id}: {each.message}" if len(each.id) > 1 else each.message,
            "hint": each.hint,
        }
        for each in report.problems
    ]
    return {"about": report.about, "level": report.level.name.lower(), "problems": problems}


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], paint: Callable[[str], str] = str
) -> list[str]:
    """Align columns, and colour the words of the second one."""
    # A lock name may hold control characters: none may move the cursor or colour the terminal.
    lines = [[escape_control(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        for column, (cell, width) in enumerate(zip(line, widths, strict=True)):
            line[column] = (paint(cell) if column == 1 else cell) + " " * (width - len(cell))
    return ["  ".join(line).rstrip() for line in lines]
