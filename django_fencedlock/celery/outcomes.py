"""How a body ended, as far as what comes after it is concerned."""

from __future__ import annotations

from typing import Any

from celery.exceptions import Ignore, Reject, Retry

SUCCESS, FAILURE, RETRY, IGNORED = "success", "failure", "retry", "ignored"
#: It didn't end: its process is being killed, or its message goes back to the queue.
UNENDED = ""


def outcome(error: BaseException | None, task: Any = None, request: Any = None) -> str:
    """Tell what became of a body that raised `error`, or returned."""
    if error is None:
        return SUCCESS
    if isinstance(error, Retry):
        return RETRY
    if isinstance(error, Ignore):
        return IGNORED
    if isinstance(error, Reject):
        return UNENDED if getattr(error, "requeue", False) else FAILURE
    if not isinstance(error, Exception):
        return UNENDED
    return RETRY if _is_retried(error, task, request) else FAILURE


def _is_retried(error: Exception, task: Any, request: Any) -> bool:
    """Whether Celery makes a retry of it, which it does outside of what we see."""
    if not hasattr(task, "_orig_run") or request is None or request.called_directly:
        return False
    if isinstance(error, tuple(getattr(task, "dont_autoretry_for", ()))):
        return False
    most = getattr(task, "retry_kwargs", {}).get("max_retries", task.max_retries)
    most = getattr(task, "override_max_retries", most)
    return isinstance(error, tuple(getattr(task, "autoretry_for", ()))) and (
        most is None or request.retries < most
    )
