"""What an error means to somebody at the admin, in their language; its own text is in English."""

from __future__ import annotations

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from .. import exceptions as errors

_REASONS = {
    errors.LockNotAcquired: gettext_lazy("Somebody else has the lock."),
    errors.BackendUnavailable: gettext_lazy("The lock service doesn't answer."),
    errors.ReleaseBlocked: gettext_lazy("An open transaction keeps the fence locked."),
    errors.InsideTransaction: gettext_lazy("The request's own transaction is in the way."),
    errors.LeaseLost: gettext_lazy("The lock was lost meanwhile."),
    errors.LockRequired: gettext_lazy("It takes the lock of another row as well."),
    errors.StaleFence: gettext_lazy("Somebody else was given the lock, or wrote the row, since."),
    errors.VersionConflict: gettext_lazy("Somebody else changed it since."),
    errors.WrongDatabase: gettext_lazy("It isn't in the database that has its fences."),
    errors.OutcomeUnknown: gettext_lazy("It may have been saved, or not: look again."),
    errors.SettingsError: gettext_lazy("The settings of the locks have an error."),
}


def reason(error: errors.FencedLockError) -> str:
    """A sentence that can be translated, and what the error itself says."""
    for kind in type(error).__mro__:
        if kind in _REASONS:
            facts = {"reason": _REASONS[kind], "details": error}
            return _("%(reason)s Details: %(details)s") % facts
    return str(error)
