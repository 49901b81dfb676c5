"""
Rows that a delete collects one by one: nothing of theirs is asked but Django's signals.

A model that has listeners is never deleted in one statement. So only those are listened to where
Django collects the rows anyway, because of what depends on them or of other listeners.
"""

from __future__ import annotations

from typing import Any

from django.db.models import DO_NOTHING
from django.db.models.deletion import get_candidate_relations_to_delete
from django.db.models.signals import post_delete, pre_delete
from django.dispatch.dispatcher import NONE_ID

_UID = "django_fencedlock.cascades"
#: The models that are listened to, and whether that is for good.
_watched: dict[type, bool] = {}
#: The relations of the models that have none that would have their rows collected.
_leaves: dict[type, Any] = {}


def watch(model: Any) -> None:
    """
    See to it that the rows of a fenced model are guarded when they are collected.

    Called whenever rows are looked up: listeners and relations may come at any time, and go.
    """
    if _watched.get(model):
        return
    if model in _watched:
        if not _others_listen(model):
            pre_delete.disconnect(sender=model, dispatch_uid=_UID)
            del _watched[model]
        return
    collected = _is_collected(model)
    if not (collected or pre_delete.has_listeners(model) or post_delete.has_listeners(model)):
        return
    if not model.fencing.may_need_lease(None):
        return  # Nothing is guarded, so nothing is to be slowed down.
    if collected:
        # A child's row of the fence's own table is collected along with it.
        for each in {model, model.fencing.table}:
            listen(each)
    else:
        listen(model, for_good=False)


def listen(model: type, for_good: bool = True) -> None:
    """Guard each row of a model that is collected."""
    pre_delete.connect(_guard, sender=model, dispatch_uid=_UID)
    _watched[model] = for_good


def _others_listen(model: type) -> bool:
    senders = (id(model), NONE_ID)
    return post_delete.has_listeners(model) or any(
        key[1] in senders and key[0] != _UID for key, *_ in pre_delete.receivers
    )


def _is_collected(model: Any) -> bool:
    # Django makes a new list when relations were added.
    relations = model._meta.related_objects
    if _leaves.get(model) is relations:
        return False
    meta = model._meta
    if (
        any(link is not None for link in meta.concrete_model._meta.parents.values())
        or any(
            relation.field.remote_field.on_delete is not DO_NOTHING  # type: ignore[attr-defined]
            for relation in get_candidate_relations_to_delete(meta)
        )
        or any(hasattr(field, "bulk_related_objects") for field in meta.private_fields)
    ):
        return True
    _leaves[model] = relations
    return False


def _guard(instance: Any, using: str, origin: Any = None, **kwargs: Any) -> None:
    instance._guard_collected(using, origin)
