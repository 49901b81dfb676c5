"""Mutations of which rows a fenced write is about, and whose lease it goes under."""

# ruff: noqa: E501 - quoted code is as long as it is
from __future__ import annotations

from .mutation import Mutation

_PATHS = "tests/test_write_paths.py"
_VERSIONED = "tests/test_versioned.py"
_TRIGGER = "tests/test_operations.py"


def _paths(*names: str) -> tuple[str, ...]:
    return tuple(f"{_PATHS}::test_{name}" for name in names)


MUTATIONS = (
    Mutation(
        "A row is added without its fence though its lock is held",
        "models/writes.py",
        "if fencing.is_of_own_pk and given is None and name not in held_names():",
        "if fencing.is_of_own_pk and given is None:",
        _paths("a_copy_of_a_row_is_a_new_row", "what_is_new_does_not_take_the_place_of_a_row"),
    ),
    Mutation(
        "A row under a lock that others share is added without its lease",
        "models/writes.py",
        "if fencing.is_of_own_pk and given is None and name not in held_names():",
        "if given is None and name not in held_names():",
        _paths("a_row_is_not_added_without_the_lease_of_its_lock"),
    ),
    Mutation(
        "A row is given to another lock under a stale lease of that",
        "models/writes.py",
        "    for each in (write, write.moving_to):\n",
        "    for each in (write,):\n",
        _paths("giving_rows_to_another_lock_needs_both_leases"),
    ),
    Mutation(
        "A row is given to another lock under a stale lease of its own",
        "models/writes.py",
        "    for each in (write, write.moving_to):\n",
        "    for each in (write.moving_to or write,):\n",
        _paths("giving_rows_to_another_lock_needs_both_leases"),
    ),
    Mutation(
        "A row is given to another lock without its lease",
        "models/querysets.py",
        "        if not changed:\n            return write\n",
        "        if changed or not changed:\n            return write\n",
        _paths("giving_rows_to_another_lock_needs_both_leases"),
    ),
    Mutation(
        "A row that is given to another lock keeps the token of its former one",
        "models/writes.py",
        "        return Value(0 if target.grant is None else target.token)\n",
        '        return F("fence") if write.grant is None else Value(write.token)\n',
        _paths("a_row_that_was_moved_is_written_under_its_new_lock"),
    ),
    Mutation(
        "Rows are deleted that came between claim and delete",
        "models/querysets.py",
        "            rows = rows.filter(fence=fence_of_claimed(writes))\n",
        "",
        _paths("rows_that_come_between_claim_and_delete_are_left"),
    ),
    Mutation(
        "Rows are written that came while their names were learnt",
        "models/querysets.py",
        'if not leases_of(writes) and (writes or self._fencing.spec.unleased != "reject"):',
        "if not leases_of(writes):",
        _paths("rows_that_come_while_names_are_learnt_are_not_written"),
    ),
    Mutation(
        "A row that is gone is no reason for bulk_update() to fail",
        "models/querysets.py",
        "                if found < len({obj.pk for obj in batch}):\n",
        "                if found < 0:\n",
        _paths("such_a_write_of_a_loaded_object_raises"),
    ),
    Mutation(
        "To overwrite a conflicting row is to add one: free",
        "models/adding.py",
        '                self._fencing.lease_for(obj.fencing.name_to_write(), None, "Overwriting")\n',
        "                pass\n",
        _paths("overwriting_is_not_adding"),
    ),
    Mutation(
        "A conflicting row of any lock is overwritten",
        "models/adding.py",
        "        if not tells_the_lock(self._fencing, unique_fields):\n",
        "        if unique_fields is self:\n",
        _paths("conflicting_rows_are_overwritten_only_where_the_conflict_tells_their_lock"),
    ),
    Mutation(
        "Under a high-water mark conflicting rows of a newer token are overwritten",
        "models/adding.py",
        "        if not self._fencing.spec.serialised:\n            raise ImproperlyConfigured",
        "        if self._fencing is None:\n            raise ImproperlyConfigured",
        _paths("high_water_cannot_overwrite_conflicting_rows"),
    ),
    Mutation(
        "bulk_create() checks the lease of its first lock alone",
        "models/adding.py",
        "if write.grant is not None and write.grant.owner not in checked:",
        "if write.grant is not None and not checked:",
        _paths("rows_of_several_locks_need_every_lease", "a_lease_can_be_given"),
    ),
    Mutation(
        "update() may set the fence",
        "models/querysets.py",
        '        self._refuse_own_columns(values, "update")\n',
        "",
        _paths("what_django_refuses_is_left_to_django"),
    ),
    Mutation(
        "bulk_update() writes over versions that it didn't load",
        "models/querysets.py",
        "branches.append(When(pk=obj.pk, version=loaded, then=Value(loaded + 1)))",
        "branches.append(When(pk=obj.pk, then=Value(loaded + 1)))",
        (f"{_VERSIONED}::test_bulk_update_compares_each_version",),
    ),
    Mutation(
        "A collected row is the one whose delete() collected it",
        "models/guarded.py",
        "return isinstance(instance, table) and instance._key_in(table) == row.pk",
        "return isinstance(instance, table)",
        _paths("another_row_of_its_model_that_a_delete_collects_is_guarded"),
    ),
    Mutation(
        "A collected row needs no check, in whatever transaction",
        "models/fenced.py",
        "return self.write.is_pinned and self.before in fences and self.write.token in fences",
        "return self.before in fences and self.write.token in fences",
        _paths("a_row_with_dependents_is_deleted_under_its_lease_alone"),
    ),
    Mutation(
        "A collected row of a newer token needs no check in a transaction of its lease",
        "models/fenced.py",
        "return self.write.is_pinned and self.before in fences and self.write.token in fences",
        "return self.write.is_pinned and self.write.token in fences",
        (
            "tests/test_never_lowered.py",
            *_paths("in_a_transaction_of_its_lease_a_collected_row_costs_none"),
        ),
    ),
    Mutation(
        "A fixture overwrites a row without its fence though its lock is held",
        "models/fenced.py",
        "if doing is Doing.LOADING and given is None and name not in held_names():",
        "if doing is Doing.LOADING and given is None:",
        _paths("a_fixture_under_a_lease_is_a_write_like_any_other"),
    ),
    Mutation(
        "A new row takes the place of another of its key",
        "models/guarded.py",
        "        if step.inserts_only:\n            return []\n",
        "",
        _paths("what_is_new_does_not_take_the_place_of_a_row"),
    ),
    Mutation(
        "Nobody hears that a new row took the place of another",
        "models/guarded.py",
        "            for guard in step.guards:\n                guard.overwrote()\n",
        "            pass\n",
        _paths("a_warning_is_logged_when_something_new_takes_the_place_of_a_row"),
    ),
    Mutation(
        "An object that was never loaded is saved over a row as one that is added",
        "models/guarded.py",
        "adding = bool(self._state.adding or is_copy) and not forced",
        "adding = bool(self._state.adding or is_copy)",
        _paths(
            "without_a_lease_nothing_is_written", "what_is_new_does_not_take_the_place_of_a_row"
        ),
    ),
    Mutation(
        "A row with dependents is deleted whatever became of its claim",
        "models/guarded.py",
        "        if values and not self._row(table, using, writing)._update(values):\n",
        "        if values and self._row(table, using, writing)._update(values) is None:\n",
        _paths("a_row_with_dependents_is_deleted_under_its_lease_alone"),
    ),
    Mutation(
        "Trigger: raw SQL lowers a version",
        "operations.py",
        "    ELSIF (after ->> TG_ARGV[1])::bigint < version\n        OR (after",
        "    ELSIF (after",
        (f"{_TRIGGER}::TestWhatIsRefused",),
    ),
    Mutation(
        "Trigger: an UPDATE that changes nothing has to raise the version",
        "operations.py",
        "(after ->> TG_ARGV[1])::bigint = version AND after - stamps <> before - stamps",
        "(after ->> TG_ARGV[1])::bigint = version",
        (f"{_TRIGGER}::TestWhatIsRefused",),
    ),
    Mutation(
        "Trigger: to raise the fence alone is a change that has to raise the version",
        "operations.py",
        "    stamps text[] := TG_ARGV[:1];",
        "    stamps text[] := TG_ARGV[1:1];",
        (f"{_TRIGGER}::TestWhatIsRefused",),
    ),
)
