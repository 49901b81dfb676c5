"""Mutations of fenced writes: models, querysets, new rows, refusals."""

from __future__ import annotations

from .mutation import Mutation

_PATHS = "tests/test_write_paths.py"

MUTATIONS = (
    Mutation(
        "A write isn't made on the condition that its grant is the newest",
        "models/writes.py",
        "if grant is None or not self.fencing.spec.serialised or is_pinned(connection, grant):",
        "if grant is not None or connection is None:",
        (_PATHS, "tests/test_isolation.py"),
    ),
    Mutation(
        "A save goes over a row of a newer token",
        "models/writes.py",
        'parts = [f"{fence} <= %s"]',
        'parts = [f"{fence} <> -%s"]',
        (_PATHS,),
    ),
    Mutation(
        "A save goes over what was written since the object was read",
        "models/writes.py",
        "return tuple(sorted(accepted)) or (REFUSED,)",
        "return None",
        (_PATHS,),
    ),
    Mutation(
        "A save lowers a fence that is above its token",
        "models/writes.py",
        "accepted = {loaded} if loaded <= write.token else set()",
        "accepted = {loaded}",
        ("tests/test_never_lowered.py", _PATHS),
    ),
    Mutation(
        "A save writes a row that was given to another lock",
        "models/writes.py",
        "        if field.attname in write.columns:\n            column, value",
        "        if False:\n            column, value",
        (_PATHS,),
    ),
    Mutation(
        "An update of many rows goes over rows of newer tokens",
        "models/writes.py",
        "condition &= Q(fence__lte=write.token) if write.fences is None else write.fences",
        "condition &= Q(fence__gte=0) if write.fences is None else write.fences",
        (_PATHS,),
    ),
    Mutation(
        "Rows that no lease is for get fence 0 in an update of many, and are written",
        "models/writes.py",
        "return Case(*branches, default=Value(REFUSED), output_field",
        "return Case(*branches, default=Value(0), output_field",
        (_PATHS,),
    ),
    Mutation(
        "A new row is inserted under a stale lease",
        "models/writes.py",
        "    return _by_rows([When(Pin(grant), then=Value(write.token))])",
        "    return write.token",
        (_PATHS,),
    ),
    Mutation(
        "The fence of another database passes for the rows' own",
        "models/writes.py",
        "if lease is not None and fencing.spec.serialised and lease.database != using:",
        "if False:",
        (_PATHS,),
    ),
    Mutation(
        "The count of rows of an UPDATE is ignored",
        "models/guarded.py",
        "        if not updated and not step.adding:",
        "        if updated is None:",
        (_PATHS,),
    ),
    Mutation(
        "The count of rows of a DELETE is ignored",
        "models/guarded.py",
        "            if not count:\n                _explain(",
        "            if count is None:\n                _explain(",
        (_PATHS,),
    ),
    Mutation(
        "A row with dependents is deleted without being claimed first",
        "models/guarded.py",
        "            self.instance._claim_row(table, using, guards)\n",
        "            pass\n",
        (_PATHS,),
    ),
    Mutation(
        "The rows of a statement over many are deleted unclaimed",
        "models/querysets.py",
        "            models.QuerySet.update(claimed, fence=token_or_refused(writes))\n",
        "",
        (_PATHS,),
    ),
    Mutation(
        "The fence isn't raised by an update of many rows",
        "models/querysets.py",
        '            stamps["fence"] = token_or_refused(writes)\n',
        '            stamps["fence"] = F("fence")\n',
        (_PATHS,),
    ),
    Mutation(
        "New rows are added past conflicts with no look at their leases",
        "models/adding.py",
        "            if grant is not None and not is_newest(self._using, grant):\n",
        "            if grant is None and write.grant is None:\n",
        (_PATHS,),
    ),
    Mutation(
        "New rows are added in one statement with no look at their leases",
        "models/adding.py",
        "                obj.fence = new_rows_fence(write)\n",
        "                obj.fence = write.token\n",
        (_PATHS,),
    ),
)
