"""Mutations of lock names, of which lease covers a write, and of what people are told."""

from __future__ import annotations

from .mutation import Mutation

_NAMES = "tests/test_names.py"
_CALLS = "tests/test_task_names.py"
_MODELS = "tests/test_fencing_names.py"
_PATHS = "tests/test_write_paths.py"
_VERSIONED = "tests/test_versioned.py"
_REGISTRY = "tests/test_registry.py"
_SHIELD = "tests/test_shield.py"


def _path(test: str) -> str:
    return f"{_PATHS}::test_{test}"


MUTATIONS = (
    Mutation(
        "Names may be longer than their column",
        "names.py",
        "    if len(name) > MAX_LENGTH:",
        "    if len(name) > 2 * MAX_LENGTH:",
        (_NAMES,),
    ),
    Mutation(
        "A lock is named by a text that differs from process to process",
        "names.py",
        "    if not isinstance(value, _PLAIN):",
        "    if value is None:",
        (_NAMES,),
    ),
    Mutation(
        "Calls that leave a default out have another name",
        "names.py",
        "            named = {**self._defaults, **kwargs}\n",
        "            named = {**dict.fromkeys(self._defaults), **kwargs}\n",
        (_NAMES,),
    ),
    Mutation(
        "f(True) and f(1) are one call",
        "celery/canonical.py",
        "    if value is None or isinstance(value, bool):\n        return str(value)",
        "    if value is None:\n        return str(value)",
        (_CALLS,),
    ),
    Mutation(
        "f(1) and f('1') are one call",
        "celery/canonical.py",
        "    if isinstance(value, str):\n        return _quoted(value)",
        "    if isinstance(value, str):\n        return value",
        (_CALLS,),
    ),
    Mutation(
        "The order in which a dict was made tells calls apart",
        "celery/canonical.py",
        "sorted(f'{_key(key)}: {canonical(value[key])}' for key in value)",
        "(f'{_key(key)}: {canonical(value[key])}' for key in value)",
        (_CALLS,),
    ),
    Mutation(
        "One moment has a name for each time zone",
        "celery/canonical.py",
        "        moment = value if value.tzinfo is None else value.astimezone(UTC)\n",
        "        moment = value\n",
        (_CALLS,),
    ),
    Mutation(
        "A row that isn't saved yet names a lock",
        "celery/canonical.py",
        "    if row.pk is None or row._state.adding:",
        "    if row.pk is None:",
        (_CALLS,),
    ),
    Mutation(
        "Long calls that begin alike are one",
        "celery/naming.py",
        '    return f"{name[: names.MAX_LENGTH - _DIGEST - 2]}…#{digest}"',
        '    return f"{name[: names.MAX_LENGTH - _DIGEST - 2]}…#{len(digest)}"',
        (_CALLS,),
    ),
    Mutation(
        "A write goes under the lease of another lock, if it is given that",
        "models/fencing.py",
        "            if given.name != name:",
        "            if given.name is None:",
        (_path("a_lease_can_be_given"), _path("a_given_lease_is_the_one_that_counts"), _PATHS),
    ),
    Mutation(
        "A write goes under a lease that was given back",
        "models/fencing.py",
        "            if given.released or not given.is_of_this_process():",
        "            if not given.is_of_this_process():",
        (_path("a_lease_that_was_released_is_none"), _PATHS),
    ),
    Mutation(
        "A write goes under an unfenced lease",
        "models/fencing.py",
        "        if lease is not None and lease.fenced:\n",
        "        if lease is not None:\n",
        (_path("an_unfenced_lease_is_none"), _PATHS),
    ),
    Mutation(
        "A write without a lease is told of, and done",
        "models/fencing.py",
        '        if self.spec.unleased == "reject":\n            raise',
        '        if self.spec.unleased == "never":\n            raise',
        (_path("without_a_lease_nothing_is_written"), _PATHS),
    ),
    Mutation(
        "A misspelt policy lets writes without a lease pass",
        "conf.py",
        "    for problem in _unleased_problems():\n        raise SettingsError(str(problem))\n",
        "",
        (_path("a_policy_that_is_none_lets_nothing_pass"), _PATHS),
    ),
    Mutation(
        "Half of its key makes a lock a row's own",
        "models/fencing.py",
        "return all(field in exact for field in self.plan.pk)",
        "return any(field in exact for field in self.plan.pk)",
        (_path("half_the_key_does_not_make_a_lock_a_rows_own"), _PATHS),
    ),
    Mutation(
        "A key in another spelling is another lock's",
        "models/fencing.py",
        "        value = field.to_python(value)\n",
        "        pass\n",
        (_MODELS,),
    ),
    Mutation(
        "A row of a moment has a lock for each time zone",
        "models/fencing.py",
        "            value = value.astimezone(UTC)\n",
        "            pass\n",
        (_MODELS,),
    ),
    Mutation(
        "A version isn't compared",
        "models/versioned.py",
        '{quote(field.column)} = %s", [self.loaded]',
        '{quote(field.column)} <> -1 - %s", [self.loaded]',
        (_VERSIONED,),
    ),
    Mutation(
        "A version doesn't rise",
        "models/versioned.py",
        "        self.updated = (self.loaded or 0) + 1\n",
        "        self.updated = self.loaded or 0\n",
        (_VERSIONED,),
    ),
    Mutation(
        "An object whose version wasn't loaded overwrites the row",
        "models/versioned.py",
        "        if self.loaded is None and not self.keeps:\n            raise self._conflict(",
        "        if self.loaded is None and self.keeps is None:\n            raise self._conflict(",
        (_VERSIONED,),
    ),
    Mutation(
        "Rows that a cascade collects are deleted unguarded",
        "models/cascades.py",
        "    instance._guard_collected(using, origin)\n",
        "    return\n",
        (_path("what_a_plain_row_takes_along_is_guarded"), _PATHS),
    ),
    Mutation(
        "Who lost a lock is said to hold it",
        "registry.py",
        "    if holder.owner != row.owner:\n        return State.LOST\n",
        "",
        (_REGISTRY,),
    ),
    Mutation(
        "A lock whose service doesn't answer is said to be free",
        "registry.py",
        "    if row.alias not in holders:\n        return State.UNKNOWN\n    remaining",
        "    if row.alias not in holders:\n        return State.FREE\n    remaining",
        (_REGISTRY,),
    ),
    Mutation(
        "An error that was moved between processes has lost its facts",
        "exceptions.py",
        "    return kind(message, **facts)",
        "    return kind(message)",
        ("tests/test_exceptions.py",),
    ),
    Mutation(
        "The end of a block raises the loss over the body's own error",
        "locks.py",
        "    if error is None and lease.lost and lease.is_of_this_process():",
        "    if lease.lost and lease.is_of_this_process():",
        ("tests/test_contract.py::TestDatabaseOnSQLite", "tests/test_services.py"),
    ),
    Mutation(
        "A block whose lease was lost is a success",
        "locks.py",
        "    if error is None and lease.lost and lease.is_of_this_process():",
        "    if lease is None:",
        ("tests/test_contract.py::TestDatabaseOnSQLite", "tests/test_services.py"),
    ),
    Mutation(
        "What was granted to plain code that was struck is kept",
        "locks.py",
        "            self._give_back_struck(request, began)\n",
        "            pass\n",
        ("tests/test_struck.py",),
    ),
    Mutation(
        "What was granted to plain code that was struck before its block is kept",
        "locks.py",
        "            self._give_back_struck(request, started)\n",
        "            pass\n",
        ("tests/test_struck.py",),
    ),
    Mutation(
        "What plain code entered again that was struck stays entered",
        "locks.py",
        "        self._service.leave_again(request)\n",
        "",
        ("tests/test_struck.py",),
    ),
    Mutation(
        "What a coroutine was granted that was cancelled meanwhile is kept",
        "locks.py",
        "            aio.submit(aio.RELEASE, alias, _give_back, self._service, lease)\n",
        "            pass\n",
        ("tests/test_contract.py::TestDatabaseOnSQLite", "tests/test_services.py"),
    ),
    Mutation(
        "What a generator took is kept when another thread or task throws it away",
        "locks.py",
        "        if not found and kind is GeneratorExit and",
        "        if False and",
        ("tests/test_contract.py::TestDatabaseOnSQLite",),
    ),
    Mutation(
        "A soft time limit strikes while a run is at its lock",
        "celery/shield.py",
        "            _signal.signal(_LIMIT, self._note)\n",
        "            pass\n",
        (_SHIELD,),
    ),
    Mutation(
        "A soft time limit that was put off never strikes",
        "celery/shield.py",
        "            pool.soft_timeout_sighandler(*struck)\n",
        "            pass\n",
        (_SHIELD,),
    ),
    Mutation(
        "A soft time limit lets a run wait for its lock",
        "celery/shield.py",
        "        threads.start(self.cancel.cancel)\n",
        "        pass\n",
        (_SHIELD,),
    ),
    Mutation(
        "A task comes again after conflicts without an end",
        "celery/conflicts.py",
        "    if tries >= run.policy.max_conflict_retries or run.is_nested:",
        "    if run.is_nested:",
        ("tests/test_single_instance.py",),
    ),
)
