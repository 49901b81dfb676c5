"""The DynamoDB backend: without a server, and on an emulator that checks conditions atomically."""

import itertools
import os
import socket
import threading
import time
import uuid
from dataclasses import replace
from email.utils import formatdate
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from django.test import override_settings

from django_fencedlock.backends.dynamodb import (
    KEPT,
    MARGIN,
    DynamoDBBackend,
    RequestFailed,
    create_table,
)
from django_fencedlock.backends.interface import Grant, Granted, Held, Renewal, Wait
from django_fencedlock.conf import AliasConfig
from django_fencedlock.core.runtime import clock
from django_fencedlock.exceptions import BackendUnavailable
from tests.backends import DYNAMODB
from tests.scripts import run_python
from tests.servers.process import wait_until
from tests.services import ServiceAcceptance, on_postgres
from tests.test_backend_interface import BackendInterface, claim, take
from tests.threads import at_once

REGION = "eu-central-1"
#: Seconds that a busy machine may add to a time limit.
SLACK = 10.0


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    for key, value in (
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
        ("AWS_EC2_METADATA_DISABLED", "true"),
        ("AWS_CONFIG_FILE", os.devnull),
        ("AWS_SHARED_CREDENTIALS_FILE", os.devnull),
    ):
        monkeypatch.setenv(key, value)
    for key in ("AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(key, raising=False)


def config_of(url=None, table="fencedlock", prefix=None, **options):
    options = {"REGION": REGION, "ENDPOINT": url, **options}
    prefix = uuid.uuid4().hex if prefix is None else prefix
    terms = {"ttl": 30, "blocking_timeout": 10, "fence_database": "default", "options": options}
    return AliasConfig("default", DYNAMODB, table, key_prefix=prefix, **terms)


def entry_of(config):
    return {"BACKEND": DYNAMODB, "LOCATION": config.location, "OPTIONS": dict(config.options)}


@pytest.fixture(scope="module")
def table(shared_dynamodb):
    """Return the settings of a table that the tests share, each with a prefix of its own."""
    shared_dynamodb.empty()
    config = config_of(shared_dynamodb.url)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        with override_settings(FENCEDLOCK={"default": entry_of(config)}):
            create_table()
    return config


@pytest.fixture
def config(table):
    return replace(table, key_prefix=uuid.uuid4().hex)


@pytest.fixture
def make(config, closing):
    return lambda **options: closing(
        DynamoDBBackend(replace(config, options={**config.options, **options}))
    )


@pytest.fixture
def backend(make):
    return make()


@pytest.fixture
def other(make):
    return make()


class TestInterface(BackendInterface):
    @pytest.fixture
    def make(self, make):
        return make


# Settings


def found(**changes):
    config = replace(config_of(), **changes)
    return [(each.id, each.message) for each in DynamoDBBackend.problems(config)]


def test_good_settings_have_no_problems():
    assert found() == []
    for url in (
        "http://127.0.0.1:8000",
        "https://vpce-1.dynamodb.eu-central-1.vpce.amazonaws.com/",
    ):
        assert found(options={"REGION": REGION, "ENDPOINT": url, "TIMEOUT": 2}) == []


@pytest.mark.parametrize(
    "location", ["", "ab", "two words", "a,b", "http://127.0.0.1:8000", "ä" * 3]
)
def test_a_location_that_names_no_table_is_reported(location):
    ((key, message),) = found(location=location)
    assert key == "E007"
    assert "no name of a table" in message


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:8000", "redis://host", "https://", "http://a b", 5]
)
def test_an_endpoint_that_is_no_url_is_reported(endpoint):
    ((key, message),) = found(options={"REGION": REGION, "ENDPOINT": endpoint})
    assert key == "E008"
    assert "['ENDPOINT'] is" in message


@pytest.mark.parametrize("region", [None, "", "EU Central", 1.5, 1])
def test_a_missing_or_wrong_region_is_reported(region):
    ((key, message),) = found(options={"REGION": region})
    assert key == "E008"
    assert "['REGION'] is" in message


def test_the_region_may_come_from_where_boto3_finds_it(monkeypatch):
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    assert found(options={}) == []


def test_a_profile_that_does_not_exist_is_reported(monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    ((key, message),) = found(options={})
    assert key == "E008"
    assert "nobody" in message


def test_unknown_options_and_wrong_timeouts_are_reported():
    assert [key for key, _ in found(options={"REGION": REGION, "REGIO": 1})] == ["E008"]
    assert [key for key, _ in found(options={"REGION": REGION, "TIMEOUT": 0})] == ["E003"]


# Grants


def test_of_many_threads_only_one_gets_a_free_lock(make):
    backends = [make() for _ in range(4)]
    for number in range(40):
        name = f"free:{number}"
        backends[0].suggest(name, 7)
        answers = at_once([partial(each.acquire, claim(name), Wait()) for each in backends * 2])
        granted = [each for each in answers if isinstance(each, Granted)]
        assert [each.token for each in granted] == [8]
        winner = backends[0].holders([name])[name].owner
        assert {each.owner for each in answers if isinstance(each, Held)} <= {winner, ""}


@pytest.mark.slow
def test_of_many_threads_only_one_gets_an_expired_lock(make):
    backends = [make() for _ in range(4)]
    names = [f"expired:{number}" for number in range(20)]
    for name in names:
        take(backends[0], claim(name, ttl=0.1))
    time.sleep(0.1 + MARGIN + 2)
    for name in names:
        answers = at_once([partial(each.acquire, claim(name), Wait()) for each in backends * 2])
        assert [each.token for each in answers if isinstance(each, Granted)] == [2]


def test_the_counter_goes_on_after_each_release(backend):
    tokens = []
    for _ in range(5):
        tokens.append((taken := take(backend, claim("x"))).token)
        backend.release(taken)
    assert tokens == [1, 2, 3, 4, 5]


def test_an_unfenced_grant_has_no_token(backend):
    assert take(backend, claim("x", fenced=False)).token is None


def test_a_repeated_claim_counts_from_the_first(backend, other):
    sent = claim("x", ttl=5)
    first = other.acquire(sent, Wait())
    time.sleep(2.2)
    second = backend.acquire(sent, Wait())
    assert second.token == first.token
    # The lock expires five seconds after the first request: the lease may end no later.
    assert second.since < clock() - 1


def test_suggested_tokens_are_never_lowered(backend):
    taken = take(backend, claim("x"))
    for floor in (10**15, 7):
        backend.suggest("x", floor)
    assert backend.verify(taken)
    backend.release(taken)
    assert take(backend, claim("x")).token == 10**15 + 1


def test_an_identity_may_be_empty(backend, other):
    sent = claim("x")._replace(identity="")
    taken = take(backend, sent)
    assert other.holders(["x"])["x"].identity == ""
    assert backend.release(taken)


def test_the_prefix_is_part_of_the_key(config, closing):
    one, two = (
        closing(DynamoDBBackend(replace(config, key_prefix=prefix)))
        for prefix in (f"{config.key_prefix}a", f"{config.key_prefix}b")
    )
    take(one, claim("x"))
    take(two, claim("x"))


def test_a_name_may_be_as_long_as_the_package_allows(backend):
    name = "\N{SNOWMAN}" * 200
    taken = take(backend, claim(name))
    assert set(backend.holders([name])) == {name}
    assert backend.release(taken)


def test_many_locks_are_looked_up(backend):
    names = [f"x:{number}" for number in range(230)]
    for name in names[::2]:
        take(backend, claim(name))
    assert set(backend.holders([*names, names[0]])) == set(names[::2])


def test_an_item_keeps_its_counter_and_may_be_deleted_some_weeks_after_the_release(
    backend, config, shared_dynamodb
):
    def item():
        key = {"name": {"S": f"{config.key_prefix}x"}}
        return shared_dynamodb.request("GetItem", {"TableName": "fencedlock", "Key": key})["Item"]

    taken = take(backend, claim("x"))
    assert set(item()) == {"name", "owner", "identity", "lease", "fence"}
    backend.release(taken)
    assert set(item()) == {"name", "fence", "delete_at"}
    assert float(item()["delete_at"]["N"]) == pytest.approx(time.time() + KEPT, abs=60)
    assert item()["delete_at"]["N"].isdecimal()
    take(backend, claim("x"))
    # A held lock is never deleted, however long it is held.
    assert "delete_at" not in item()


# Renewals


def test_more_renewals_than_a_request_has_are_answered_in_order(backend, other):
    taken = [take(backend, claim(f"x:{number}")) for number in range(130)]
    for each in taken[::7]:
        other.release(each)
    lost = set(taken[::7])
    assert backend.renew(taken) == [
        Renewal.LOST if each in lost else Renewal.KEPT for each in taken
    ]


def test_two_owners_of_one_name_are_renewed_one_after_the_other(backend):
    # A process may have a lost lease beside its successor. DynamoDB refuses the whole batch.
    former = take(backend, claim("x"))
    backend.release(former)
    present, beside = take(backend, claim("x")), take(backend, claim("y"))
    answers = backend.renew([former, present, beside])
    assert answers == [Renewal.UNKNOWN, Renewal.KEPT, Renewal.KEPT]
    answers = backend.renew([present, former, beside])
    assert answers == [Renewal.UNKNOWN, Renewal.LOST, Renewal.KEPT]


def test_a_renewal_may_change_the_ttl(backend, other):
    taken = take(backend, claim("x", ttl=5))
    assert backend.renew([taken._replace(ttl=60)]) == [Renewal.KEPT]
    assert 50 < other.holders(["x"])["x"].expires_in <= 60


# Time


def test_no_wall_clock_is_asked(make, monkeypatch):
    holder, thief = make(), make()
    taken = take(holder, claim("x", ttl=10))
    now = time.time
    # boto3 signs requests by the wall clock, and the emulator doesn't look.
    for ahead in (-3600, -20, 20, 3600):
        monkeypatch.setattr("time.time", lambda ahead=ahead: now() + ahead)
        assert isinstance(thief.acquire(claim("x"), Wait()), Held)
        assert 0 < thief.holders(["x"])["x"].expires_in <= 10
    assert holder.verify(taken)


def test_a_process_with_a_fast_wall_clock_takes_no_live_lock(backend, config, make_clock):
    fast = make_clock()
    fast.set(10)
    take(backend, claim("x", ttl=5))
    code = """
        import sys, time
        import django
        django.setup()
        from tests.test_dynamodb_backend import DynamoDBBackend, Wait, claim, config_of
        backend = DynamoDBBackend(config_of(*sys.argv[1:]))
        print(time.time(), type(backend.acquire(claim("x"), Wait())).__name__)
    """
    arguments = (config.options["ENDPOINT"], config.location, config.key_prefix)
    done = run_python(
        *arguments, code=code, DJANGO_SETTINGS_MODULE="tests.settings", **fast.environment
    )
    told, answer = done.stdout.split()
    assert float(told) > time.time() + 5
    assert answer == "Held"


@pytest.mark.parametrize("step", [-3600, 3600])
def test_one_wrong_date_ends_no_lease_and_frees_no_lock(backend, other, step):
    mine, theirs = take(backend, claim("x")), take(other, claim("y"))
    heard = clock()
    date = sum(backend._now()) / 2 + step
    backend._time.hear(heard, heard, formatdate(date, usegmt=True))
    assert isinstance(backend.acquire(claim("y"), Wait()), Held)
    backend._time.hear(heard, heard, formatdate(date, usegmt=True))
    assert backend.renew([mine]) == [Renewal.KEPT]
    assert isinstance(other.acquire(claim("x"), Wait()), Held)
    assert backend.renew([mine]) == [Renewal.KEPT]
    # The next answer corrects it.
    assert other.holders(["x"])["x"].expires_in <= 30
    assert backend.verify(mine)
    assert other.verify(theirs)


def test_an_expired_lock_is_taken_after_the_margin(backend, other):
    until = clock() + 1.2
    while clock() < until:
        # Each answer tells the time more closely, once its second has changed.
        backend.holders(["x"]), other.holders(["x"])
    began, taken = clock(), take(backend, claim("x", ttl=0.5))
    wait_until(lambda: isinstance(other.acquire(claim("x"), Wait()), Granted), "the lock")
    assert 0.5 + MARGIN <= clock() - began < 0.5 + MARGIN + SLACK
    assert backend.renew([taken]) == [Renewal.LOST]
    assert not backend.verify(taken)


@pytest.mark.slow
def test_a_claim_that_is_repeated_after_its_expiry_has_the_same_token(backend):
    sent = claim("x", ttl=0.2)
    first = backend.acquire(sent, Wait())
    time.sleep(0.2 + MARGIN + 2)
    second = backend.acquire(sent, Wait())
    assert second.token == first.token
    # It isn't a lease any more: the core renews it before it counts.
    assert second.since + sent.ttl < clock()


def test_an_expired_lock_that_no_other_owner_took_is_renewed(backend):
    taken = take(backend, claim("x", ttl=0.2))
    time.sleep(1.5)
    assert backend.verify(taken)
    assert backend.renew([taken._replace(ttl=30)]) == [Renewal.KEPT]
    assert backend.verify(taken)


# Failures


def failing(config, **changes):
    return DynamoDBBackend(replace(config, **changes))


def error_of(act):
    began = clock()
    with pytest.raises(BackendUnavailable) as caught:
        act()
    return str(caught.value), clock() - began


def acts(backend):
    return [
        partial(backend.acquire, claim("x"), Wait()),
        partial(backend.release, Grant("x", "me")),
        partial(backend.renew, [Grant("x", "me", 5.0)]),
        partial(backend.verify, Grant("x", "me")),
        partial(backend.holders, ["x"]),
        partial(backend.suggest, "x", 5),
    ]


def test_a_missing_table_is_reported_with_the_command_that_creates_it(config):
    backend = failing(config, location="nothing")
    for act in acts(backend):
        message, _ = error_of(act)
        assert "Create table 'nothing': manage.py shell -c" in message
        assert (
            f"from {DynamoDBBackend.__module__} import create_table; create_table('default')"
            in message
        )
    ((key, message),) = [(each.id, each.message) for each in backend.check()]
    assert key == "W056"
    assert "create_table('default')" in message


def test_an_unreachable_service_is_an_error_of_the_check():
    config = config_of("http://127.0.0.1:9", TIMEOUT=0.5)
    assert [each.id for each in DynamoDBBackend(config).check()] == ["E013"]


def test_a_table_that_is_deleted_while_locks_are_held(backend, config, closing, shared_dynamodb):
    config = replace(config, location=f"t{uuid.uuid4().hex}")
    with override_settings(FENCEDLOCK={"default": entry_of(config)}):
        create_table()
    backend = closing(DynamoDBBackend(config))
    taken = take(backend, claim("x"))
    shared_dynamodb.request("DeleteTable", {"TableName": config.location})
    message, _ = error_of(partial(backend.renew, [taken]))
    assert "create_table" in message


def test_missing_credentials_are_reported(config, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    for act in acts(failing(config)):
        message, _ = error_of(act)
        assert "Unable to locate credentials" in message
        assert "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use an IAM role." in message


@pytest.mark.parametrize("timeout", [0.5, 2.5])
def test_an_unreachable_endpoint_is_reported_in_time(timeout):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        backend = DynamoDBBackend(
            config_of(f"http://127.0.0.1:{unused.getsockname()[1]}", TIMEOUT=timeout)
        )
        for act in acts(backend):
            message, took = error_of(act)
            assert "Could not connect to the endpoint URL" in message
            assert took < timeout + SLACK / 2


@pytest.mark.slow
@pytest.mark.parametrize("timeout", [0.5, 2.5])
def test_a_service_that_never_answers_is_reported_in_time(timeout):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        for act in acts(DynamoDBBackend(config_of(url, TIMEOUT=timeout))):
            message, took = error_of(act)
            assert "Read timeout" in message
            assert took < timeout + SLACK / 2


def test_a_server_of_another_kind_is_reported(closing):
    server = closing(Canned(200, b"<html>hi</html>"))
    for act in acts(DynamoDBBackend(config_of(server.url, TIMEOUT=1))):
        message, _ = error_of(act)
        assert "OPTIONS['ENDPOINT']" in message


def test_answers_without_a_date_are_reported(closing):
    body = b'{"Responses": {"fencedlock": []}}'
    backend = DynamoDBBackend(config_of(closing(Canned(200, body, request_id="1")).url))
    message, _ = error_of(partial(backend.acquire, claim("x"), Wait()))
    assert "its answers have no Date header" in message


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        ("AccessDeniedException", "Allow dynamodb:UpdateItem"),
        ("UnrecognizedClientException", "Correct the credentials"),
        ("ExpiredTokenException", "Correct the credentials"),
        ("InvalidSignatureException", "Correct the credentials"),
        ("ProvisionedThroughputExceededException", "Use the on-demand mode"),
        ("ThrottlingException", "Use the on-demand mode"),
    ],
)
def test_each_refusal_says_what_to_do(closing, code, remedy):
    body = b'{"__type": "com.amazonaws#%s", "message": "No."}' % code.encode()
    server = closing(Canned(400, body, request_id="1"))
    backend = DynamoDBBackend(config_of(server.url, TIMEOUT=2))
    message, took = error_of(partial(backend.acquire, claim("x"), Wait()))
    assert f"{code}: No. {remedy}" in message
    assert took < 2 + SLACK / 2


class Canned(ThreadingHTTPServer):
    """A server that has one answer."""

    def __init__(self, status, body, request_id=""):
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                # Without a date, as send_response() has it.
                self.send_response_only(status)
                self.send_header("Content-Length", str(len(body)))
                if request_id:
                    self.send_header("x-amzn-requestid", request_id)
                self.end_headers()
                self.wfile.write(body)

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self):
        self.shutdown()
        self.server_close()


# Renewals that the service answers in part. The emulator throttles nothing.


def test_a_throttled_renewal_is_unknown_and_a_forbidden_one_an_error(backend, monkeypatch):
    def ask(operation, **terms):
        return {"Responses": [dict(each) for each in answers]}

    taken = [take(backend, claim(f"x:{number}")) for number in range(3)]
    monkeypatch.setattr(backend, "_ask", ask)
    throttled = {"Error": {"Code": "ThrottlingError", "Message": "No."}}
    answers = [{}, throttled, {"Error": {"Code": "ConditionalCheckFailed"}}]
    assert backend.renew(taken) == [Renewal.KEPT, Renewal.UNKNOWN, Renewal.LOST]
    answers = [{"Error": {"Code": "AccessDenied", "Message": "No."}}] * 3
    message, _ = error_of(partial(backend.renew, taken))
    assert "AccessDenied: No. Allow dynamodb:UpdateItem" in message


def test_what_was_renewed_before_a_failure_is_kept(backend, monkeypatch):
    def ask(operation, **terms):
        if next(calls) == 2:
            raise RequestFailed("away")
        return really(operation, **terms)

    taken = [take(backend, claim(f"x:{number}")) for number in range(60)]
    really, calls = backend._ask, itertools.count()
    monkeypatch.setattr(backend, "_ask", ask)
    assert backend.renew(taken) == [Renewal.KEPT] * 50 + [Renewal.UNKNOWN] * 10


def test_what_a_busy_service_left_out_is_looked_up_again(backend, monkeypatch):
    def ask(operation, **terms):
        ((table, asked),) = terms["RequestItems"].items()
        # The emulator has one copy. DynamoDB reads one that may be out of date otherwise.
        assert asked["ConsistentRead"] is True
        now, later = asked["Keys"][:1], asked["Keys"][1:]
        answer = really(operation, RequestItems={table: {**asked, "Keys": now}})
        return {**answer, "UnprocessedKeys": {table: {"Keys": later}} if later else {}}

    names = [take(backend, claim(f"x:{number}")).name for number in range(5)]
    really = backend._ask
    monkeypatch.setattr(backend, "_ask", ask)
    assert set(backend.holders(names)) == set(names)


# A network that fails


@pytest.fixture
def proxied(make_proxy, shared_dynamodb, config, closing):
    proxy = make_proxy(shared_dynamodb.host, shared_dynamodb.port)
    options = {**config.options, "ENDPOINT": f"http://127.0.0.1:{proxy.port}", "TIMEOUT": 10}
    return proxy, closing(DynamoDBBackend(replace(config, options=options)))


def lose_first_reply(proxy):
    """Drop the next answer. The second try, after 2.25 s, gets one."""

    def heal():
        time.sleep(1)
        proxy.pass_through()

    proxy.drop_replies()
    threading.Thread(target=heal, daemon=True).start()


def test_an_acquire_whose_answer_is_lost_has_the_same_token(proxied):
    proxy, backend = proxied
    backend.release(take(backend, claim("x")))
    lose_first_reply(proxy)
    taken = take(backend, claim("x"))
    assert taken.token == 2
    assert backend.verify(taken)


def test_a_release_whose_answer_is_lost_still_says_that_it_had_the_lock(proxied):
    proxy, backend = proxied
    taken = take(backend, claim("x"))
    lose_first_reply(proxy)
    assert backend.release(taken)
    assert backend.holders(["x"]) == {}
    assert not backend.release(taken)


def test_a_release_whose_answer_is_lost_does_not_claim_the_successors_lock(proxied, other):
    proxy, backend = proxied
    former = take(backend, claim("x"))
    other.release(former)
    present = take(other, claim("x"))
    lose_first_reply(proxy)
    assert not backend.release(former)
    other.release(present)
    lose_first_reply(proxy)
    assert not backend.release(former)


def test_renewals_whose_answers_are_lost_are_repeated(proxied):
    proxy, backend = proxied
    taken = [take(backend, claim(f"x:{number}")) for number in range(30)]
    lose_first_reply(proxy)
    assert backend.renew(taken) == [Renewal.KEPT] * 30


@pytest.mark.slow
def test_a_slow_network_makes_leases_shorter_and_locks_later(proxied, other):
    proxy, backend = proxied
    proxy.delay(to_server=0.15, to_client=0.15)
    began, taken = clock(), take(backend, claim("x", ttl=2))
    wait_until(lambda: isinstance(other.acquire(claim("x"), Wait()), Granted), "the lock")
    assert clock() - began > 2
    assert not backend.verify(taken)


def test_a_cut_connection_costs_nothing(proxied):
    proxy, backend = proxied
    taken = take(backend, claim("x"))
    proxy.cut()
    assert backend.renew([taken]) == [Renewal.KEPT]
    proxy.cut()
    assert backend.release(taken)


# The table


def own_table(config, **changes):
    return replace(config, location=f"t{uuid.uuid4().hex}", **changes)


def create(config):
    with override_settings(FENCEDLOCK={"default": entry_of(config)}):
        create_table()


def ids(config):
    return [each.id for each in DynamoDBBackend(config).check()]


def test_a_table_may_be_created_again(config):
    new = own_table(config)
    create(new)
    taken = take(DynamoDBBackend(new), claim("x"))
    create(new)
    assert DynamoDBBackend(new).verify(taken)
    assert ids(new) == ["", ""]


def test_the_new_table_is_billed_by_request_and_has_nothing_else(config, shared_dynamodb):
    new = own_table(config)
    create(new)
    found = shared_dynamodb.request("DescribeTable", {"TableName": new.location})["Table"]
    assert found["BillingModeSummary"]["BillingMode"] == "PAY_PER_REQUEST"
    assert not found.keys() & {"Replicas", "StreamSpecification", "GlobalSecondaryIndexes"}


@pytest.mark.parametrize("keys", [{"name": "B"}, {"id": "S"}, {"name": "S", "at": "N"}])
def test_a_table_with_another_key_is_reported(config, shared_dynamodb, keys):
    wrong = own_table(config)
    kinds = ("HASH", "RANGE")
    schema = [
        {"AttributeName": key, "KeyType": kind} for key, kind in zip(keys, kinds, strict=False)
    ]
    types = [{"AttributeName": key, "AttributeType": kind} for key, kind in keys.items()]
    terms = {"TableName": wrong.location, "BillingMode": "PAY_PER_REQUEST"}
    shared_dynamodb.request(
        "CreateTable", {**terms, "KeySchema": schema, "AttributeDefinitions": types}
    )
    assert ids(wrong) == ["", "E056"]


def test_a_global_table_is_reported(backend, monkeypatch):
    def ask(operation, **terms):
        answer = really(operation, **terms)
        if operation == "describe_table":
            answer["Table"]["Replicas"] = [{"RegionName": "eu-west-1"}]
        return answer

    really = backend._ask
    monkeypatch.setattr(backend, "_ask", ask)
    assert [each.id for each in backend.check() if each.id] == ["E056"]


def test_a_wrong_wall_clock_is_reported(backend, monkeypatch):
    now = time.time
    monkeypatch.setattr("time.time", lambda: now() + 60)
    ((key, message),) = [(each.id, each.message) for each in backend.check() if each.id]
    assert key == "W005"
    assert "differs by" in message


# Processes


def test_a_child_has_connections_of_its_own(backend):
    taken = take(backend, claim("x"))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        backend.after_fork()
        held = isinstance(backend.acquire(claim("x"), Wait()), Held)
        kept = backend.release(take(backend, claim("y")))
        os.write(writing, f"{held} {kept}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 100) == b"True True"
    os.close(reading), os.close(writing)
    assert backend.renew([taken]) == [Renewal.KEPT]
    assert backend.release(taken)


@pytest.mark.slow
def test_greenlets_take_locks_while_a_real_thread_renews(config):
    code = """
        from gevent import monkey
        monkey.patch_all()
        import sys
        import django
        import gevent
        django.setup()
        from django_fencedlock.core import runtime
        from tests.test_dynamodb_backend import DynamoDBBackend, Grant, claim, config_of, take

        backend = DynamoDBBackend(config_of(*sys.argv[1:]))
        taken = [take(backend, claim(f"x:{number}")) for number in range(10)]
        renewed, stop = [], []

        def renew():
            while not stop:
                renewed.append(backend.renew(taken))

        def work(number):
            until = runtime.clock() + 60
            while len(renewed) < 5 and runtime.clock() < until:
                backend.release(take(backend, claim(f"y:{number}")))

        runtime.start(renew)
        gevent.joinall([gevent.spawn(work, number) for number in range(10)], raise_error=True)
        stop.append(True)
        assert len(renewed) >= 5
        assert {each.name for answers in renewed for each in answers} == {"KEPT"}
    """
    arguments = (config.options["ENDPOINT"], config.location, config.key_prefix)
    run_python(*arguments, code=code, DJANGO_SETTINGS_MODULE="tests.settings")


@on_postgres
class TestAcceptance(ServiceAcceptance):
    backend = DYNAMODB
    # It has no nodes of ours. Its outage is in tests/test_contract.py.
    test_a_leader_is_killed_under_load = None
    test_a_server_that_starts_empty = None
    test_no_quorum_is_an_error_in_time_and_leaves_nothing_locked = None

    def location(self, *addresses):
        return "fencedlock"

    def settings_of(self, *addresses, **options):
        endpoint = f"http://{addresses[0].host}:{addresses[0].port}"
        return super().settings_of(REGION=REGION, ENDPOINT=endpoint, **options)

    @pytest.fixture
    def servers(self, table, shared_dynamodb):
        return [shared_dynamodb]
