"""``manage.py fencedlock``: looks at locks, frees them by force, examines, mends fences."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import datetime
from itertools import chain, repeat
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.core.management.color import no_style
from django.db import DEFAULT_DB_ALIAS, Error

from ... import conf
from ...backends.base import explained
from ...core import names
from ...core.identity import Holder
from ...exceptions import FencedLockError, SettingsError
from ...findings import Level
from ...ops import doctor, registry, resync
from ...ops import registry as portraits
from ...ops.force_release import Outcome, Release
from ...ops.registry import State
from ...storage.text import escape_control, for_shell
from .. import releasing
from ..releasing import Refused
from ..tables import duration, table

#: The exit code for what couldn't be asked or done.
FAILED = 2


class Command(BaseCommand):
    help = "Looks at locks, releases them by force, examines lock services, and mends fences."
    stealth_options = ("stdin",)
    # A doctor is wanted most when the checks fail.
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        action = _adder(actions)

        listed = action("list", "the locks of the registry, and what their services say of them")
        _add_alias(listed)
        listed.add_argument(
            "--state",
            action="append",
            choices=[str(state) for state in State],
            help="only locks in this state; may be repeated",
        )

        shown = action("show", "all that is known of one lock")
        shown.add_argument("name", help="the lock's name")

        _add_release(action("release", "take one lock from its holder by force"))

        examined = action("doctor", "try each lock service, and look at what it rests on")
        _add_alias(examined)
        examined.add_argument(
            "--timeout",
            type=_seconds,
            default=doctor.LIMIT,
            metavar="SECONDS",
            help="the time for each alias and each database (default: %(default)g)",
        )

        synced = action("resync", "lift fences above the tokens of rows, after a restore")
        synced.add_argument(
            "models",
            nargs="*",
            metavar="app_label.Model",
            help="fenced models; all of them by default",
        )
        synced.add_argument("--dry-run", action="store_true", help="only tell what would be lifted")

    def handle(self, *args: Any, **options: Any) -> None:
        act: Callable[..., int] = getattr(self, f"_{options['action']}")
        try:
            code = act(**options)
        except Refused as exc:
            raise CommandError(str(exc), returncode=1) from exc
        except (SettingsError, LookupError, ValueError) as exc:
            raise CommandError(str(exc), returncode=FAILED) from exc
        except (Error, FencedLockError) as exc:
            # One of the package's own has told already what to do.
            ours = isinstance(exc, FencedLockError)
            told = str(exc) if ours else explained(exc, DEFAULT_DB_ALIAS)
            raise CommandError(f"{type(exc).__name__}: {told}", returncode=FAILED) from exc
        if code:
            sys.exit(code)

    # Actions; each returns the exit code.

    def _list(self, alias: list[str] | None, state: list[str] | None, **options: Any) -> int:
        found = registry.listing(_known(alias))
        entries = [each for each in found.entries if not state or each.state in state]
        if options["format"] == "json":
            self._json(
                {"locks": [asdict(each) for each in entries], "unanswered": found.unanswered}
            )
        elif entries:
            head = ("NAME", "STATE", "HOLDER", "ALIAS", "TOKEN", "HELD FOR", "LEFT")
            rows = [_cells(each) for each in entries]
            colours = self._colours(options)
            for line in table(head, rows, _second(colours)):
                self.stdout.write(line)
        elif not found.unanswered:
            self.stdout.write("No locks.")
        for each, why in found.unanswered.items():
            self.stderr.write(f"Alias {each!r} couldn't be asked: {why}")
        return FAILED if found.unanswered else 0

    def _show(self, name: str, **options: Any) -> int:
        found = portraits.portrait(names.validate(name))
        if options["format"] == "json":
            self._json(asdict(found))
        else:
            self._portrait(found, self._colours(options))
        if found.is_held:
            return 0
        return FAILED if found.unanswered else 1

    def _portrait(self, found: portraits.Portrait, colours: dict[str, Any]) -> None:
        rows = []
        for asked in found.services:
            where = f"alias {asked.alias!r}"
            rows.append((where, asked.error or _says(asked.holder)))
        for fence in found.fences:
            newest = (
                f"newest token {fence.token}, of owner {fence.owner or 'nobody (it was lifted)'}"
            )
            rows.append((f"database {fence.database!r}", newest))
            if fence.pinned_by:
                rows.append(("", f"the next grant waits for {fence.pinned_by}"))
        for database, why in found.away.items():
            rows.append((f"database {database!r}", f"can't be asked: {why}"))
        if not found.fences and not found.away:
            rows.append(("databases", "it was never granted as a fenced lock"))
        for entry in found.entries:
            rows += _details(entry)
        rows += _history(found.history)
        for line in table(("LOCK", found.name), rows, _second(colours)):
            self.stdout.write(line)

    def _release(
        self,
        name: str,
        alias: list[str] | None,
        owner: str | None,
        by: str,
        yes: bool,
        **options: Any,
    ) -> int:
        as_json = options["format"] == "json"
        if as_json and not yes:
            raise ValueError("--format json asks nothing: say it with --yes.")
        found, unanswered = releasing.find(names.validate(name), _known(alias) or conf.aliases())
        for each, why in unanswered.items():
            self.stderr.write(f"Alias {each!r} couldn't be asked: {why}")
        if found is None and unanswered:
            # Those that did answer say nothing of the others.
            away = " or ".join(map(repr, unanswered))
            raise CommandError(
                f"Whether somebody has lock {name!r} through alias {away} can't be told. Nothing "
                "was done.",
                returncode=FAILED,
            )
        if found is None:
            done = Release(name, "" if alias is None else alias[0], Outcome.NOT_HELD)
        else:
            if not yes and found.owner and owner in (None, found.owner):
                releasing.confirm(found, self.stdout.write, options.get("stdin"))
            done = releasing.release(found, by, owner)
        if as_json:
            self._json(releasing.plain(done))
        else:
            self.stdout.write(escape_control(str(done)))
        return 0 if done.done else 1

    def _doctor(self, alias: list[str] | None, timeout: float, **options: Any) -> int:
        aliases = _known(alias)
        worst, reports = Level.OK, []
        for report in doctor.examine(aliases, timeout):
            worst = max(worst, report.level)
            reports.append(report)
            if options["format"] == "text":
                self._report(report, options)
        if options["format"] == "json":
            self._json({"level": worst.name.lower(), "reports": [_plain(each) for each in reports]})
        else:
            self.stdout.write(_VERDICTS[worst])
        return worst.exit_code

    def _report(self, report: doctor.Report, options: dict[str, Any]) -> None:
        colours = self._colours(options)
        self.stdout.write(f"{report.about}")
        for finding in report.findings:
            word = finding.level.name.lower()
            paint = colours.get(word, str)
            self.stdout.write(f"  {paint(word)}{' ' * (8 - len(word))} {finding.what}")
            if finding.remedy:
                self.stdout.write(f"{' ' * 11}-> {finding.remedy}")

    def _resync(self, models: list[str], dry_run: bool, **options: Any) -> int:
        resynced = []
        fenced = resync.models(models)
        if not fenced and options["format"] == "text":
            self.stdout.write("There are no fenced models.")
        for model in fenced:
            for database in resync.databases_of(model):
                resynced.append(done := resync.resync(model, database, dry_run=dry_run))
                if options["format"] == "text":
                    self._tell_resynced(done, dry_run, options["verbosity"])
        if options["format"] == "json":
            self._json({"dry_run": dry_run, "models": [asdict(each) for each in resynced]})
        if any(each.error or each.locked for each in resynced):
            return FAILED
        return int(dry_run and any(each.low for each in resynced))

    def _tell_resynced(self, done: resync.Resynced, dry_run: bool, verbosity: int) -> None:
        where = f"{done.model} in {done.database!r}"
        if done.error:
            self.stderr.write(f"{where}: {done.error}")
            return
        verb = "would be lifted" if dry_run else "lifted"
        lifted = len(done.low) - len(done.locked)
        self.stdout.write(f"{where}: {done.rows} rows with a token, {lifted} fences {verb}")
        if verbosity > 1:
            for name, token in done.low.items():
                self.stdout.write(f"  {name!r} above {token}")
        if done.nameless:
            self.stdout.write(f"  {done.nameless} rows have no lock name")
        for name in done.locked:
            self.stderr.write(
                f"  The fence of {name!r} is locked by somebody's transaction, and is as it was. "
                f"See who: manage.py fencedlock show {for_shell(name)}"
            )

    # Tools

    def _json(self, value: Any) -> None:
        told = json.dumps(value, indent=2, default=_plain_value, ensure_ascii=False)
        # A terminal may show it, and obeys more than what JSON has as an escape by itself.
        self.stdout.write("\n".join(map(_escaped, told.split("\n"))))

    def _colours(self, options: dict[str, Any]) -> dict[str, Any]:
        """The paint of each word that has one."""
        on = self.stdout.isatty() or options["force_color"]
        style = self.style if on and not options["no_color"] else no_style()
        good, odd, bad = style.SUCCESS, style.WARNING, style.ERROR
        states = {"held": good, "expiring": odd, "expired": odd, "lost": bad, "unknown": bad}
        levels = {"ok": good, "note": style.NOTICE, "warning": odd, "error": bad}
        return states | levels


_VERDICTS = {
    Level.OK: "All is well.",
    Level.NOTE: "All is well.",
    Level.WARNING: "There are warnings.",
    Level.ERROR: "There are errors.",
}


def _adder(actions: Any) -> Callable[[str, str], CommandParser]:
    def add(name: str, what: str) -> CommandParser:
        parser: CommandParser = actions.add_parser(name, help=what, description=f"{what}.")
        parser.add_argument(
            "--format", choices=("text", "json"), default="text", help="for people, or for scripts"
        )
        # Also after the action, where people write them; unset they leave the main parser's be.
        for option in ("--no-color", "--force-color"):
            parser.add_argument(
                option, action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
            )
        parser.add_argument(
            *("-v", "--verbosity"),
            default=argparse.SUPPRESS,
            type=int,
            choices=range(4),
            help=argparse.SUPPRESS,
        )
        return parser

    return add


def _add_alias(parser: CommandParser) -> None:
    parser.add_argument(
        "--alias", action="append", help="only this alias of FENCEDLOCK; may be repeated"
    )


def _add_release(parser: CommandParser) -> None:
    parser.add_argument("name", help="the lock's name")
    _add_alias(parser)
    parser.add_argument(
        "--owner", help="only from this holder; a lock that has changed hands is left alone"
    )
    parser.add_argument(
        "--by",
        default=releasing.current_holder(),
        help="who does it, for the holder and the log to tell (default: %(default)s)",
    )
    parser.add_argument("--yes", action="store_true", help="don't ask")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} has to be a number of seconds above 0")
    return value


def _known(aliases: list[str] | None) -> list[str]:
    for alias in aliases or []:
        if alias not in conf.aliases():
            known = ", ".join(map(repr, conf.aliases()))
            raise LookupError(f"FENCEDLOCK has no alias {alias!r}; it has {known}.")
    return aliases or []


def _second(colours: dict[str, Any]) -> Callable[[int, str], Any]:
    """Paint the words of a table's second column."""
    return lambda column, text: colours.get(text) if column == 1 else None


def _cells(entry: registry.ListedLock) -> tuple[str, ...]:
    return (
        entry.name,
        entry.state,
        f"{entry.holder} (now {entry.taken_by})" if entry.taken_by else entry.holder,
        entry.alias,
        _token(entry),
        duration(entry.held_for),
        duration(max(0.0, entry.remaining)),
    )


def _says(holder: Holder | None) -> str:
    if holder is None:
        return "nobody has it"
    session = f", server session {holder.session_pid}" if holder.session_pid else ""
    return f"held by {holder}{session}"


def _details(entry: registry.ListedLock) -> list[tuple[str, str]]:
    left = max(0.0, entry.remaining)
    return [
        ("registry", f"{entry.holder} through alias {entry.alias!r} ({entry.backend})"),
        ("state", entry.state),
        ("token", _token(entry)),
        ("owner", entry.owner),
        ("acquired", f"{entry.acquired_at:%Y-%m-%d %H:%M:%S %Z}, {duration(entry.held_for)} ago"),
        ("renewed", f"{entry.renewed_at:%Y-%m-%d %H:%M:%S %Z}"),
        ("expires", f"{entry.expires_at:%Y-%m-%d %H:%M:%S %Z}, {duration(left)} left"),
        *([("waiting", str(entry.waiting))] if entry.waiting else []),
    ]


def _history(found: list[portraits.Happened]) -> Iterator[tuple[str, str]]:
    for head, each in zip(chain(["history"], repeat("")), found, strict=False):
        often = f" {each.times} times" if each.times > 1 else ""
        token = "" if each.token is None else f", token {each.token}"
        note = f": {each.note}" if each.note else ""
        yield head, f"{each.at:%Y-%m-%d %H:%M:%S} {each.kind}{often}{token}, {each.holder}{note}"


def _token(entry: registry.ListedLock) -> str:
    if not entry.fenced:
        return "unfenced"
    # A newer grant has its fence.
    return "superseded" if entry.token is None else str(entry.token)


def _plain(report: doctor.Report) -> dict[str, Any]:
    return {
        "about": report.about,
        "level": report.level.name.lower(),
        "findings": [
            {"level": each.level.name.lower(), "what": each.what, "remedy": each.remedy}
            for each in report.findings
        ],
    }


def _escaped(line: str) -> str:
    """A line of JSON, with what can't be seen as an escape."""
    if line.isascii() and line.isprintable():
        return line
    return "".join(
        each if escape_control(each) == each else json.dumps(each)[1:-1] for each in line
    )


def _plain_value(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
