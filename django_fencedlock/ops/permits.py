"""The permits of a lock name: which are held, which are free."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from django.db.models import QuerySet

from ..core.grants import holder_of
from ..core.identity import describe_place
from ..core.manager import service
from ..core.names import MAX_LENGTH, MAX_PERMITS, permit_name, read_permit
from ..exceptions import BackendUnavailable, SettingsError
from ..storage.tables import Fence, HeldLock


@dataclass
class Permits:
    """The permits of a lock name through one alias."""

    name: str
    alias: str
    #: The largest limit of the grants in the registry.
    limit: int
    #: The holders by the permit's name, in the order of the numbers.
    held: dict[str, str]
    #: The numbers of the others.
    free: list[int]


def by_number(name: str) -> tuple[str, int]:
    """Sort key of a lock name: permit 10 comes after permit 2."""
    return read_permit(name) or (name, 0)


def permits_of(database: str, name: str, silent: dict[str, str]) -> list[Permits]:
    """
    Return the permits of a lock name by alias, as the lock services see them.

    Aliases in `silent` aren't asked; those that are unavailable now are added to it. Their permits
    are as the registry has them.
    """
    by_alias: dict[str, list[HeldLock]] = defaultdict(list)
    for row in permit_rows(name, HeldLock.objects.using(database).all()):
        by_alias[row.alias].append(row)
    return [_permits(name, alias, rows, silent) for alias, rows in sorted(by_alias.items())]


def permit_rows(name: str, rows: QuerySet[HeldLock]) -> list[HeldLock]:
    """Return those of `rows` that are permits of a lock, in the order of their numbers."""
    found = rows.filter(name__in=_names(name), permits__gt=0)
    return sorted(found, key=lambda row: by_number(row.name))


def _permits(name: str, alias: str, rows: list[HeldLock], silent: dict[str, str]) -> Permits:
    limit = max(row.permits or 0 for row in rows)
    held = {row.name: _holder(row) for row in rows}
    if alias not in silent:
        try:
            found = service(alias).grants.look_up(_names(name)[:limit])
            # The database backend reads the rows of other aliases, too.
            mine = {each: by for each, by in found.items() if by.alias in ("", alias)}
            held = {each: str(holder_of(by, alias)) for each, by in mine.items()}
        except (BackendUnavailable, SettingsError) as exc:
            silent[alias] = str(exc)
    free = [by_number(each)[1] for each in _names(name)[:limit] if each not in held]
    return Permits(
        name, alias, limit, {each: held[each] for each in sorted(held, key=by_number)}, free
    )


def _holder(row: HeldLock) -> str:
    return describe_place(row.host, row.pid, row.thread, row.task_name, row.task_id)


def granted_numbers(database: str, name: str) -> list[int]:
    """Return the numbers of the permits that were ever granted as fenced locks."""
    fences = Fence.objects.using(database).filter(name__in=_names(name))
    return sorted(by_number(each)[1] for each in fences.values_list("name", flat=True))


def _names(name: str) -> list[str]:
    """Return the names of all permits that a lock may have."""
    if read_permit(name) or len(permit_name(name, MAX_PERMITS)) > MAX_LENGTH:
        return []
    return [permit_name(name, number) for number in range(1, MAX_PERMITS + 1)]


def shown_ranges(numbers: list[int]) -> str:
    """Return sorted numbers for people: ``1, 3-5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
