"""Mutations of the admin, who may do what there, and of `manage.py fencedlock`."""

# ruff: noqa: E501 - quoted code is as long as it is
from __future__ import annotations

from .mutation import Mutation

_ACCESS = "tests/test_admin_access.py"
_PERMISSIONS = "tests/test_admin_permissions.py"
_RELEASING = "tests/test_admin_releasing.py"
_DATABASES = "tests/test_admin_databases.py"
_FENCED = "tests/test_fenced_admin.py"
_COMMAND = "tests/test_command.py"

MUTATIONS = (
    Mutation(
        "Who may release locks needn't be allowed to see them",
        "admin/releasing.py",
        "        return page.has_view_permission(request) and user.has_perm(\n",
        "        return user.has_perm(\n",
        (_ACCESS, _RELEASING),
    ),
    Mutation(
        "Who may see locks may release them",
        "admin/releasing.py",
        "        return page.has_view_permission(request) and user.has_perm(\n"
        '            f"{page.opts.app_label}.release_heldlock"\n'
        "        )\n",
        "        return page.has_view_permission(request) and user.is_staff\n",
        (_ACCESS, _RELEASING),
    ),
    Mutation(
        "The page that releases asks for no permission",
        "admin/releasing.py",
        "        if not self.has_release_permission(request):\n            raise PermissionDenied\n",
        "",
        (_ACCESS, _RELEASING),
    ),
    Mutation(
        "The action of the list asks for no permission",
        "admin/releasing.py",
        '        permissions=["release"], description',
        "        description",
        (_ACCESS, _RELEASING),
    ),
    Mutation(
        "The page that releases is none of the admin's: it knows no login",
        "admin/releasing.py",
        "page.admin_site.admin_view(self.release_view)",
        "(lambda request: self.release_view(request))",
        (_ACCESS, _RELEASING),
    ),
    Mutation(
        "The button that releases is shown to everybody",
        "admin/releasing.py",
        "        if row is not None and self.has_release_permission(request):",
        "        if row is not None:",
        (_ACCESS, _RELEASING),
    ),
    Mutation(
        "A page links to a history that its reader may not see",
        "admin/held_locks.py",
        "        if not site.get_model_admin(LockEvent).has_view_permission(request):\n"
        '            return ""\n',
        "",
        (_PERMISSIONS,),
    ),
    *(
        Mutation(
            f"Rows of locks can be {what} in the admin",
            "admin/readonly.py",
            old := f"    def has_{verb}_permission(self, request: HttpRequest{more}) -> bool:\n",
            f"{old}        if request.user.is_superuser:\n            return True\n",
            (_ACCESS, "tests/test_admin.py"),
        )
        for what, verb, more in (
            ("added", "add", ""),
            ("changed", "change", ", obj: Model | None = None"),
            ("deleted", "delete", ", obj: Model | None = None"),
        )
    ),
    Mutation(
        "A form releases locks that the list hides from the user",
        "admin/releasing.py",
        "            if (mark.name, mark.alias) not in listed:\n",
        "            if not mark.name:\n",
        (_ACCESS,),
    ),
    Mutation(
        "A form releases the lock that another alias has under a listed name",
        "admin/releasing.py",
        "            if (mark.name, mark.alias) not in listed:\n",
        "            if mark.name not in {name for name, _ in listed}:\n",
        (_RELEASING,),
    ),
    Mutation(
        "A form releases whoever has the lock by now",
        "admin/releasing.py",
        "backend=mark.alias, owner=mark.owner)\n",
        "backend=mark.alias, owner=None)\n",
        (_RELEASING,),
    ),
    Mutation(
        "A form may name any number of locks",
        "admin/releasing.py",
        'request.POST.getlist("lock")[:MOST]]',
        'request.POST.getlist("lock")]',
        (_RELEASING,),
    ),
    Mutation(
        "A page takes as long as all its locks do",
        "admin/releasing.py",
        "            if mark.alias in away or clock() > until:",
        "            if mark.alias in away or clock() > until + 1e6:",
        (_RELEASING,),
    ),
    Mutation(
        "A lock service that is away is asked for each lock once more",
        "admin/releasing.py",
        "                    away.add(mark.alias)\n",
        "                    pass\n",
        (_RELEASING,),
    ),
    Mutation(
        "What a form names needn't be text",
        "admin/releasing.py",
        "len(found) == 3 and _are_texts(found)):",
        "len(found) == 3):",
        (_RELEASING,),
    ),
    Mutation(
        "A forced release that is left to its holder isn't in the admin's log",
        "admin/releasing.py",
        "            if release.done:\n                _log",
        "            if release.outcome is Outcome.FREED:\n                _log",
        (_RELEASING,),
    ),
    Mutation(
        "Locks are released within the request's transaction",
        "admin/transactions.py",
        "        view = transaction.non_atomic_requests(using)(view)\n",
        "        pass\n",
        (_RELEASING, _FENCED),
    ),
    Mutation(
        "The address of a page names any database of the project",
        "admin/databases.py",
        "    if wanted in known:\n",
        "    if wanted:\n",
        (_DATABASES,),
    ),
    Mutation(
        "Who had a form open overwrites what others changed meanwhile",
        "admin/fenced.py",
        "    if row is None or seen is None or seen == _stamp(row):",
        "    if row is None or seen or seen is None:",
        (_FENCED,),
    ),
    Mutation(
        "A form's page may be sent again until it passes",
        "admin/fenced.py",
        "request.POST.get(SEEN) or _stamp(row)",
        "_stamp(row)",
        (_FENCED,),
    ),
    Mutation(
        "The admin acquires a row's lock for a user who may not change the row",
        "admin/fenced.py",
        "            may = row is not None and self.has_change_permission(request, row)\n",
        "            may = row is not None\n",
        (_ACCESS,),
    ),
    Mutation(
        "The admin acquires a row's lock for a user who may not delete what goes with it",
        "admin/fenced.py",
        "        return [] if lacking or protected else [row]\n",
        "        return [row]\n",
        (_FENCED,),
    ),
    Mutation(
        "The admin acquires the lock of a new row for a user who may not add it",
        "admin/fenced.py",
        "        if self.model.fencing.is_of_own_pk or not self.has_add_permission(request):\n",
        "        if self.model.fencing.is_of_own_pk:\n",
        (_ACCESS,),
    ),
    Mutation(
        "Rows are deleted in the admin without their locks",
        "admin/fenced.py",
        "            refusal = _take(stack, queryset)\n",
        "            refusal = None\n",
        (_FENCED,),
    ),
    Mutation(
        "The admin takes the locks of many rows in any order",
        "admin/fenced.py",
        "    for _name, row in sorted({row.fencing.name(): row for row in rows}.items()):",
        "    for _name, row in {row.fencing.name(): row for row in rows}.items():",
        (_FENCED,),
    ),
    Mutation(
        "`list` succeeds though a lock service didn't answer",
        "management/commands/fencedlock.py",
        "        return FAILED if found.unanswered else 0\n",
        "        return 0\n",
        (_COMMAND,),
    ),
    Mutation(
        "`show` calls a lock free whose service didn't answer",
        "management/commands/fencedlock.py",
        "        return FAILED if found.unanswered else 1\n",
        "        return 1\n",
        (_COMMAND,),
    ),
    Mutation(
        "`release` calls a lock free whose service didn't answer",
        "management/commands/fencedlock.py",
        "        if found is None and unanswered:\n",
        "        if False:\n",
        (_COMMAND,),
    ),
    Mutation(
        "`release` succeeds whatever became of it",
        "management/commands/fencedlock.py",
        "        return 0 if done.done else 1\n",
        "        return 0\n",
        (_COMMAND,),
    ),
    Mutation(
        "`doctor` succeeds whatever it finds",
        "management/commands/fencedlock.py",
        "        return worst.exit_code\n",
        "        return 0\n",
        (_COMMAND,),
    ),
    Mutation(
        "`resync` succeeds though a fence was locked, and is as it was",
        "management/commands/fencedlock.py",
        "        if any(each.error or each.locked for each in resynced):",
        "        if any(each.error for each in resynced):",
        (_COMMAND,),
    ),
    Mutation(
        "`resync --dry-run` succeeds though fences are too low",
        "management/commands/fencedlock.py",
        "        return int(dry_run and any(each.low for each in resynced))\n",
        "        return 0\n",
        (_COMMAND,),
    ),
    Mutation(
        "`release` needs nobody's word where there is no terminal",
        "management/releasing.py",
        "    if not stdin.isatty():",
        "    if stdin.closed:",
        (_COMMAND,),
    ),
    Mutation(
        "`release --format json` needs nobody's word",
        "management/commands/fencedlock.py",
        "        if as_json and not yes:\n"
        '            raise ValueError("--format json asks nothing: say it with --yes.")\n',
        "        yes = yes or as_json\n",
        (_COMMAND,),
    ),
    Mutation(
        "Whatever begins with a y means yes",
        "management/releasing.py",
        '.strip().lower() not in ("y", "yes"):',
        '.strip().lower()[:1] != "y":',
        (_COMMAND,),
    ),
    Mutation(
        "`release` takes the lock from whoever has it once the question is answered",
        "management/releasing.py",
        "owner=owner or found.owner)\n",
        "owner=owner)\n",
        (_COMMAND,),
    ),
    Mutation(
        "Of a lock that several aliases have, the first is released",
        "management/releasing.py",
        "    if len(found) > 1:",
        "    if len(found) > 9:",
        (_COMMAND,),
    ),
)
