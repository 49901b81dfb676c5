"""The system checks over fenced models as they are written."""

import re

import pytest
from django.core.checks.registry import registry
from django.db import models
from django.test.utils import isolate_apps

from django_fencedlock.checks import (
    check_admin,
    check_models,
    check_services,
    check_settings,
    check_tables,
    check_tasks,
)
from django_fencedlock.models import (
    FencedManager,
    FencedModel,
    FencedQuerySet,
    Fencing,
    VersionedModel,
    checks,
)
from django_fencedlock.models.queryset import BaseRowsManager
from tests.models import Account, Contract, Document, Invoice
from tests.test_write_paths import Everything

PROXY = type("Meta", (), {"proxy": True})


@pytest.fixture(autouse=True)
def own_apps():
    with isolate_apps("tests"):
        yield


def found(*models_):
    return told(checks.model_problems(models_))


def told(problems):
    return {problem.id: str(problem) for problem in problems}


def of_type(name, *bases, **attributes):
    return type(name, bases, {"__module__": "tests.models", **attributes})


def abstract(name, **attributes):
    meta = type("Meta", (attributes.pop("Meta", object),), {"abstract": True})
    return of_type(name, models.Model, Meta=meta, **attributes)


def test_the_checks_are_registered_and_find_nothing_in_the_models_here():
    every = {check_admin, check_models, check_services, check_settings, check_tables, check_tasks}
    assert every <= set(registry.get_checks())
    assert check_models() == []
    assert found(Account, Invoice, Document, Contract) == {}


class TestFencing:
    @pytest.mark.parametrize(
        ("template", "words"),
        [
            ("account:{acount_id}", r"uses {acount_id}.*Use {pk} and .*account_id"),
            ("account:{account_id", "'account:{account_id'"),
            ("account:{}", "not a column"),
            ("{account_id}{id}", r"nothing between {account_id} and {id}.*such as ':'\."),
            ("{account_id}x{id}", r"nothing between {account_id} and {id}"),
        ],
    )
    def test_a_template_that_names_no_column(self, template, words):
        fields = {"account_id": models.IntegerField(), "fencing": Fencing(template)}
        assert re.search(words, found(of_type("Line", FencedModel, **fields))["E020"])

    def test_a_template_that_names_what_is_made_when_the_row_is_saved(self):
        fields = {"day": models.DateField(auto_now=True), "fencing": Fencing("day:{day}")}
        message = found(of_type("Line", FencedModel, **fields))["E020"]
        assert "{day}, whose value is made when the row is saved" in message

    def test_templates_and_callables_in_order(self):
        account = models.ForeignKey(Account, models.CASCADE)
        for name in (None, "{pk}", "a:{account}", "a:{account_id}", "a:{id:d}", lambda row: "x"):
            with isolate_apps("tests"):
                line = of_type("Line", FencedModel, account=account, fencing=Fencing(name))
                assert found(line) == {}

    def test_fencing_that_is_no_fencing(self):
        line = of_type("Line", FencedModel, fencing="account:{account_id}")
        assert "'account:{account_id}'" in found(line)["E021"]

    def test_an_alias_that_the_settings_have_not(self, settings):
        settings.FENCEDLOCK = {"default": {}, "fast": {}}
        line = of_type("Line", FencedModel, fencing=Fencing(backend="fest"))
        assert re.search("'fest'.*Known keys: default, fast", found(line)["E022"])
        settings.FENCEDLOCK = {"TTL": 3}  # Which can't be read.
        assert found(line) == {}

    def test_rows_in_another_database_than_the_fences(self, settings):
        settings.DATABASE_ROUTERS = [Everything("postgres")]
        strict = of_type("Strict", FencedModel)
        loose = of_type("Loose", FencedModel, fencing=Fencing(mode="high_water"))
        assert re.search("to database 'postgres'.*are in 'default'", found(strict)["E023"])
        assert found(loose) == {}
        settings.FENCEDLOCK = {"default": {"FENCE_DATABASE": "postgres"}}
        assert found(strict) == {}

    def test_broken_settings_and_routers_that_want_a_row_break_no_check(self, settings):
        line = of_type("Line", FencedModel)
        settings.FENCEDLOCK = {"default": {"TTL": 0}}
        assert found(line) == {}
        settings.FENCEDLOCK = {}
        settings.DATABASE_ROUTERS = [f"{__name__}.ByRow"]
        assert found(line) == {}


class TestInheritance:
    def test_two_fenced_parents_with_tables_are_djangos_error(self):
        one = of_type("One", FencedModel)
        two = of_type("Two", FencedModel, number=models.AutoField(primary_key=True))
        both = of_type("Both", one, two)
        assert "models.E005" in {each.id for each in both.check()}
        assert found(both) == {}

    def test_a_fenced_abstract_beside_a_fenced_parent_with_a_table_is_in_order(self):
        concrete = of_type("Concrete", FencedModel)
        meta = type("Meta", (), {"abstract": True})
        abstract = of_type("Abstract", FencedModel, Meta=meta)
        assert found(of_type("Before", abstract, concrete)) == {}
        assert found(of_type("After", concrete, abstract)) == {}

    def test_children_and_proxies_of_a_fenced_model_are_in_order(self):
        concrete = of_type("Concrete", FencedModel)
        assert found(of_type("Child", concrete), of_type("Proxy", concrete, Meta=PROXY)) == {}

    @pytest.mark.parametrize("options", [{}, {"Meta": PROXY}])
    @pytest.mark.parametrize(
        "fencing",
        [*map(Fencing, ("other:{pk}", "{size}", lambda row: "x")), Fencing(mode="high_water")],
    )
    def test_a_child_or_a_proxy_under_another_lock_than_its_table(self, options, fencing):
        concrete = of_type("Concrete", FencedModel)
        message = found(of_type("Other", concrete, fencing=fencing, **options))["E026"]
        assert "tests.Other.fencing differs from that of tests.Concrete" in message
        assert "Remove the attribute from tests.Other" in message

    def test_a_child_or_a_proxy_may_have_a_policy_of_its_own_for_writes_without_lock(self):
        concrete = of_type("Concrete", FencedModel, fencing=Fencing("a:{pk}"))
        same = Fencing("a:{pk}", without_lock="allow")
        assert found(of_type("Proxy", concrete, fencing=same, Meta=PROXY)) == {}
        plain = of_type("Plain", models.Model)
        assert found(of_type("Child", FencedModel, plain, fencing=Fencing("b:{pk}"))) == {}


class TestManagers:
    def test_a_default_manager_that_is_not_fenced(self):
        line = of_type("Line", FencedModel, objects=models.Manager())
        assert re.search(r"'objects'.*update\(\), bulk_\*\(\)", found(line)["W020"])
        assert list(found(line)) == ["W020"]

    @pytest.mark.parametrize("manager", [models.Manager, FencedManager])
    def test_a_base_manager_that_is_not_the_packages_own(self, manager):
        meta = type("Meta", (), {"base_manager_name": "mine"})
        for parent in (FencedModel, VersionedModel):
            with isolate_apps("tests"):
                line = of_type("Line", parent, mine=manager(), Meta=meta)
                assert re.search("'mine'.*cascades, SET_NULL", found(line)["W021"])

    @pytest.mark.parametrize("first", [True, False])
    @pytest.mark.parametrize("guarded", [FencedModel, VersionedModel])
    def test_the_base_manager_is_the_packages_own_in_every_order_of_bases(self, guarded, first):
        plain = abstract("Plain")
        bases = (guarded, plain) if first else (plain, guarded)
        for meta in (None, type("Meta", (), {"ordering": ["pk"]})):
            with isolate_apps("tests"):
                line = of_type("Line", *bases, **({"Meta": meta} if meta else {}))
                assert found(line) == {}
                assert isinstance(line._base_manager, BaseRowsManager)

    def test_what_is_to_be_done_about_another_base_manager_works(self):
        both = {"mine": models.Manager(), "Meta": type("Meta", (), {"base_manager_name": "mine"})}
        plain = abstract("Plain", **both)
        assert "W021" in found(of_type("Line", plain, FencedModel))
        for bases in ((), (both["Meta"],)):
            with isolate_apps("tests"):
                own = type("Meta", bases, {"base_manager_name": None} if bases else {})
                line = of_type("Line", FencedModel, plain, Meta=own)
                assert "W021" not in found(line)
                line = of_type("Other", plain, FencedModel, Meta=own, objects=FencedManager())
                assert "W021" not in found(line)

    def test_a_manager_of_another_base_class_that_is_hidden(self):
        class Kept(models.Manager):
            def get_queryset(self):
                return super().get_queryset().filter(gone=False)

        trash = abstract("Trash", objects=Kept(), gone=models.BooleanField(default=False))
        for guarded in (FencedModel, VersionedModel):
            with isolate_apps("tests"):
                message = found(of_type("Line", guarded, trash))["W027"]
                assert "tests.Line.objects is the FencedManager of" in message
                assert "hides the Kept of Trash" in message

        class Both(Kept, FencedManager):
            pass

        line = of_type("Mended", FencedModel, trash, objects=Both())
        assert found(line) == {}
        assert "gone" in str(line.objects.all().query)
        assert isinstance(line.objects.all(), FencedQuerySet)
        with isolate_apps("tests"):
            assert list(found(of_type("Last", trash, FencedModel))) == ["W020"]

    def test_managers_of_other_names_or_without_a_mind_of_their_own_are_hidden_by_none(self):
        trash = abstract("Trash", kept=FencedManager())
        plain = abstract("Plain", objects=models.Manager())
        assert found(of_type("One", FencedModel, trash), of_type("Two", FencedModel, plain)) == {}

    def test_fenced_managers_of_every_make_are_in_order(self):
        class Mine(FencedQuerySet):
            pass

        made = [FencedManager.from_queryset(Mine)(), Mine.as_manager()]
        for number, manager in enumerate(made):
            assert found(of_type(f"Line{number}", FencedModel, objects=manager)) == {}

    def test_a_manager_that_cannot_be_asked_counts_as_not_fenced(self):
        class Tenants(models.Manager):
            def get_queryset(self):
                raise RuntimeError("no tenant")

        assert "W020" in found(of_type("Line", FencedModel, objects=Tenants()))


@pytest.mark.skipif(not hasattr(models, "DB_CASCADE"), reason="new in Django 6.1")
@pytest.mark.parametrize("rule", ["DB_CASCADE", "DB_SET_NULL"])
def test_a_foreign_key_by_which_the_database_writes_on_its_own(rule):
    key = models.ForeignKey(Account, getattr(models, rule), null=True)
    message = found(of_type("Line", FencedModel, account=key))["W022"]
    assert f"tests.Line.account has on_delete={rule}: when a row of tests.Account" in message
    assert f"on_delete=models.{rule[3:]}." in message


@pytest.mark.parametrize(("base", "name"), [(FencedModel, "fence"), (VersionedModel, "version")])
def test_a_field_of_the_models_own_in_place_of_ours_or_ours_taken_away(base, name):
    model = of_type("Own", base, **{name: models.TextField()})
    needs = f", but {base.__name__} needs this name for its own field."
    assert f"tests.Own.{name} is a TextField{needs} Rename that field." in found(model)["E025"]
    model = of_type("None_", base, **{name: None})
    assert f"tests.None_ has no field '{name}'{needs} Remove {name} = " in found(model)["E025"]
    model = of_type("Number", base, **{name: models.IntegerField()})
    assert f"tests.Number.{name} is an IntegerField, but" in found(model)["E025"]


def test_a_column_that_is_called_as_an_option_of_lock():
    fencing = Fencing("job:{backend}:{size}")
    fields = {"backend": models.CharField(max_length=9), "size": models.IntegerField()}
    message = found(of_type("Job", FencedModel, fencing=fencing, **fields))["W028"]
    assert message == (
        "The locks of tests.Job are named by backend, which fencing.lock() takes for its own "
        'argument of that name. Write Job.fencing.lock(columns={"backend": ..., "size": ...}).'
    )
    key = models.ForeignKey(Account, models.CASCADE)
    fenced = of_type("Line", FencedModel, fencing=Fencing("{backend_id}"), backend=key)
    assert found(fenced) == {}


class ByRow:
    def db_for_write(self, model, **hints):
        return hints["instance"].shard
