"""A broker whose connection is lost, and comes back, while a body runs."""

import pytest

from tests.servers.process import wait_until
from tests.workers import RabbitBroker
from tests.workers.looks import is_free, wait_until_free
from tests.workers.tasks import task


# On Redis a worker of Celery 5.7 ends there if it has a message that isn't acknowledged yet.
@pytest.fixture
def proxy(make_proxy, rabbitmq):
    return make_proxy(rabbitmq.host, rabbitmq.port)


@pytest.fixture
def broker(closing, rabbitmq, brokers_redis, proxy):
    made = closing(RabbitBroker(rabbitmq, brokers_redis))
    address, proxied = f"{rabbitmq.host}:{rabbitmq.port}", f"{proxy.host}:{proxy.port}"
    made._url = rabbitmq.url.replace(address, proxied)
    return made


def test_a_body_goes_on_and_its_message_runs_no_more(make_worker, journal, key, broker, proxy):
    worker = make_worker(broker=broker, concurrency=2)
    result = task("late").delay(key, 42, gate=True)
    (span,) = journal.wait_for_begun(key)
    proxy.cut()
    received = f"[{result.id}] received"
    wait_until(lambda: worker.log.count(received) >= 2, "the message to come again")
    assert not is_free(key)
    journal.open_gate(key)
    assert result.get(timeout=20) == 42
    wait_until(lambda: not broker.depth(), "an empty queue")
    assert [each.run for each in journal.spans(key)] == [span.run]
    wait_until_free(key)


def test_a_cancelled_body_releases_its_lock(make_worker, journal, key, broker, proxy):
    settings = {"worker_cancel_long_running_tasks_on_connection_loss": True}
    make_worker(broker=broker, concurrency=2, **settings)
    result = task("late").delay(key, 42, gate=True)
    journal.wait_for_begun(key)
    proxy.cut()
    journal.wait_for_begun(key, 2)
    journal.open_gate(key)
    assert result.get(timeout=20) == 42
    spans = journal.assert_no_overlap(key)
    assert [span.outcome for span in spans] == ["SystemExit", "returned"]
