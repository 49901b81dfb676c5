"""Functions that fail, in the place of others."""

import copy

from django_fencedlock.exceptions import BackendUnavailable


def raising(error):
    def fail(*args, **kwargs):
        # The error that is raised keeps what its traceback refers to.
        raise copy.copy(error)

    return fail


unavailable = raising(BackendUnavailable("no answer", name="x", alias="default"))
