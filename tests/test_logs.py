"""What is logged: by whom, how loud, and with which facts."""

import ast
import asyncio
import logging
import re
from pathlib import Path

import pytest

import django_fencedlock
from django_fencedlock import LeaseLost, LockNotAcquired, lock
from django_fencedlock.core.manager import service
from django_fencedlock.exceptions import StaleFence, StaleObject
from django_fencedlock.logs import KEYS, PREFIX
from django_fencedlock.models import Fence
from django_fencedlock.test import hold_lock, lose_lease
from tests.failing import unavailable
from tests.models import Invoice
from tests.test_docs import REFERENCE, _table

PACKAGE = Path(django_fencedlock.__file__).parent
pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def records(caplog):
    seen = logging.getLogger("django_fencedlock")
    handler = logging.Handler(logging.INFO)
    found = []
    handler.emit = found.append
    before = seen.level
    seen.setLevel(logging.INFO)
    seen.addHandler(handler)
    yield found
    seen.removeHandler(handler)
    seen.setLevel(before)


def facts(record):
    return {
        key.removeprefix(PREFIX): value
        for key, value in vars(record).items()
        if key.startswith(PREFIX)
    }


def test_taking_and_releasing_says_nothing(records):
    with lock("x"):
        pass
    assert records == []


@pytest.mark.parametrize("wait", [0, 0.1])
@pytest.mark.parametrize("how", ["with", "acquire", "aacquire"])
def test_a_conflict_is_info_and_names_the_holder(records, how, wait):
    with hold_lock("x", let_wait=True) as held:
        if how == "with":
            with pytest.raises(LockNotAcquired), lock("x", blocking_timeout=wait):
                pass
        elif how == "acquire":
            assert lock("x", blocking_timeout=wait).acquire() is None
        else:
            assert asyncio.run(lock("x", blocking_timeout=wait).aacquire()) is None
    (record,) = records
    assert (record.name, record.levelname) == ("django_fencedlock.core.events", "INFO")
    waited = r" in 0\.\d s" if wait else ""
    message = rf"Lock 'x' \(alias 'default'\) wasn't acquired{waited}: it is held by (.*)"
    assert re.fullmatch(message, record.getMessage())[1] == str(held.holder)
    known = facts(record)
    assert known.pop("waited") >= wait
    assert known == {"name": "x", "alias": "default", "holder": str(held.holder)}


def test_a_conflict_with_an_unknown_holder_is_logged(records):
    service("default").tell_refused("x", "", 0.01, None)
    message = "Lock 'x' (alias 'default') wasn't acquired: it is held by another holder"
    assert records[0].getMessage() == message


def test_a_lost_lease_is_a_warning(records):
    with pytest.raises(LeaseLost), lock("x") as lease:
        lose_lease(lease)
    (record,) = records
    assert (record.name, record.levelname) == ("django_fencedlock.core.events", "WARNING")
    known = facts(record)
    assert known.pop("held_for") >= 0
    assert "no longer knows" in known.pop("reason")
    assert known == facts_of(lease)
    with pytest.raises(LeaseLost), lock("x", fenced=False) as lease:
        lose_lease(lease)
    assert "token" not in facts(records[1])


def facts_of(lease, **more):
    facts = {"name": lease.name, "alias": "default", "token": lease.token, **more}
    return facts | {"owner": lease.owner_id}


def test_a_refused_write_is_an_error(records):
    invoice = Invoice.objects.create()
    with invoice.fencing.lock() as lease:
        Fence.objects.update(token=9, owner="else")
        with pytest.raises(StaleFence):
            invoice.save()
        with pytest.raises(StaleFence), lease.atomic():
            pass
    write, transaction = records
    assert (write.name, write.levelname) == ("django_fencedlock.models.writes", "ERROR")
    known = {"model": "tests.Invoice", "pk": invoice.pk}
    assert facts(write) == facts_of(lease, reason="stale", **known)
    # Of what isn't known, such as the holder, nothing is said.
    assert write.getMessage() == (
        f"Rejected a stale write: model=tests.Invoice pk={invoice.pk} lock={lease.name!r} "
        "writer_token=1"
    )
    assert transaction.name == "django_fencedlock.storage.fenced_atomic"
    assert transaction.levelname == "ERROR"
    assert facts(transaction)["token"] == lease.token


def test_an_object_that_was_read_before_its_lock_is_a_warning(records):
    old = Invoice.objects.create()
    with old.fencing.lock():
        Invoice.objects.get().save()
    with old.fencing.lock() as lease, pytest.raises(StaleObject):
        old.save()
    (write,) = records
    assert write.levelname == "WARNING"
    known = {"model": "tests.Invoice", "pk": old.pk, "row_token": 1, "reason": "read_before_lock"}
    assert facts(write) == facts_of(lease, **known)
    assert write.getMessage() == (
        f"Rejected a stale object: model=tests.Invoice pk={old.pk} lock={lease.name!r} "
        "row_token=1 writer_token=2"
    )


def test_a_failed_release_is_a_warning(records, monkeypatch):

    with lock("x") as lease:
        monkeypatch.setattr(service("default").backend, "release", unavailable)
    (record,) = records
    assert (record.name, record.levelname) == ("django_fencedlock.core.endings", "WARNING")
    message = "Lock 'x' couldn't be released, and is left to expire: no answer"
    assert record.getMessage() == message
    assert facts(record) == facts_of(lease, reason="no answer")


def calls():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield f"{path.name}:{node.lineno}", node


def test_every_logger_is_named_for_its_module():
    found = [
        (where, ast.unparse(node))
        for where, node in calls()
        if "getLogger" in ast.unparse(node.func)
    ]
    assert len(found) > 10
    assert [each for each in found if each[1] != "logging.getLogger(__name__)"] == []


def test_whatever_names_a_lock_or_a_run_carries_facts():
    """What is only for debugging aside."""
    levels = {"info", "warning", "error", "exception"}
    found = [
        (where, node)
        for where, node in calls()
        if isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "logger"
        and node.func.attr in levels
    ]
    assert len(found) > 30
    about_one = [
        (where, "extra" in {each.arg for each in node.keywords})
        for where, node in found
        if re.search(r"[Ll]ock %r|of a message|of a run|of its message", ast.unparse(node.args[0]))
    ]
    assert len(about_one) > 8
    assert [where for where, has_facts in about_one if not has_facts] == []


def test_records_carry_no_other_facts_than_the_documented_ones():
    used = {
        keyword.arg
        for _, node in calls()
        if ast.unparse(node.func) in ("logs.facts", "logs.about", "facts", "_facts")
        for keyword in node.keywords
        if keyword.arg
    }
    assert used == KEYS
    table = _table(REFERENCE / "monitoring.md", "| attribute | meaning |")
    assert {row[0] for row in table} == {PREFIX + key for key in KEYS}
    taken = vars(logging.makeLogRecord({}))
    assert not {PREFIX + key for key in KEYS} & set(taken)
