"""The private hooks of Django that the models go through are as they were when it was read."""

import inspect

import django
import pytest
from django.contrib.contenttypes.models import ContentType
from django.db import models
from django.db.models.deletion import Collector
from django.db.models.options import Options
from django.utils.functional import cached_property

#: The versions of Django whose source was read for them. Read a new one before you add it.
READ = [(5, 2), (6, 0), (6, 1)]
RETURNING = ["returning_fields"] if django.VERSION >= (6, 0) else []
PARAMETERS = {
    models.Model._save_table: [
        *("raw", "cls", "force_insert", "force_update", "using", "update_fields")
    ],
    models.Model._do_update: [
        *("base_qs", "using", "pk_val", "values", "update_fields", "forced_update", *RETURNING)
    ],
    models.Model._do_insert: ["manager", "using", "fields", "returning_fields", "raw"],
    models.QuerySet._raw_delete: ["using"],
    models.QuerySet._fetch_all: [],
    models.QuerySet._chain: [],
    models.QuerySet._clone: [],
    Collector.can_fast_delete: ["objs", "from_field"],
}


def test_this_version_of_django_was_read():
    assert django.VERSION[:2] in READ


@pytest.mark.parametrize("hook", PARAMETERS, ids=lambda hook: hook.__qualname__)
def test_a_hook_takes_what_it_took(hook):
    assert list(inspect.signature(hook).parameters)[1:] == PARAMETERS[hook]


def test_django_asks_the_options_of_a_model_for_its_base_manager():
    assert isinstance(vars(Options)["base_manager"], cached_property)
    assert "base_manager" in Options.FORWARD_PROPERTIES
    assert ContentType._base_manager is ContentType._meta.base_manager
