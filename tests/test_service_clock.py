"""The service's time, by the dates of its answers. No server, no waiting."""

import random

import pytest

from django_fencedlock.backends.dynamodb_clock import DRIFT, ServiceClock

#: What the service's clock is ahead of the local one.
AHEAD = 1_700_000_000.0


def answer(clock, sent, delay, *, answered=0.5, ahead=AHEAD):
    """Let the service answer a request that took `delay`, after this part of it."""
    made = sent + delay * answered
    clock.learn(sent, sent + delay, int(made + ahead))
    return sent + delay


def is_right(clock, now, ahead=AHEAD):
    earliest, latest = clock.bounds(now)
    return earliest <= now + ahead <= latest


def test_nothing_is_known_before_the_first_answer():
    clock = ServiceClock()
    assert not clock.is_known
    answer(clock, 100.25, 0.01)
    assert clock.is_known


def test_one_answer_tells_the_time_to_a_second():
    clock = ServiceClock()
    now = answer(clock, 100.25, 0.01)
    earliest, latest = clock.bounds(now)
    assert is_right(clock, now)
    assert latest - earliest == pytest.approx(1.01)


@pytest.mark.parametrize("answered", [0, 0.5, 1], ids=["at once", "half-way", "late"])
@pytest.mark.parametrize("seed", range(20))
def test_many_answers_tell_it_closely_and_never_wrongly(seed, answered):
    clock, rng, now = ServiceClock(), random.Random(seed), 100.0
    for _ in range(200):
        now = answer(clock, now + rng.uniform(0, 0.2), rng.uniform(0.001, 0.02), answered=answered)
        assert is_right(clock, now)
    earliest, latest = clock.bounds(now)
    assert latest - earliest < 0.1


@pytest.mark.parametrize("seed", range(20))
def test_delays_make_the_bounds_wider_and_not_wrong(seed):
    clock, rng, now = ServiceClock(), random.Random(seed), 100.0
    for _ in range(100):
        delay = rng.choice([0.01, 0.5, 4.0])
        now = answer(clock, now + rng.uniform(0, 3), delay, answered=rng.choice([0, 1]))
        assert is_right(clock, now)


@pytest.mark.parametrize("rate", [1 - DRIFT, 1 + DRIFT], ids=["slow", "fast"])
def test_a_local_clock_that_drifts_stays_within_the_bounds(rate):
    clock, rng, true = ServiceClock(), random.Random(1), 0.0
    for _ in range(500):
        true += rng.uniform(0, 60)
        # The local clock runs at `rate`: the difference grows by up to 15 s in all.
        clock.learn(100 + true * rate, 100 + (true + 0.01) * rate, int(true + 0.005 + AHEAD))
        earliest, latest = clock.bounds(100 + true * rate)
        assert earliest <= true + AHEAD + 0.01
        assert true + AHEAD - 0.01 <= latest


def test_the_bounds_get_wider_while_nothing_is_heard():
    clock = ServiceClock()
    now = answer(clock, 100.25, 0.01)
    before, after = clock.bounds(now), clock.bounds(now + 1000)
    assert after[1] - after[0] == pytest.approx(before[1] - before[0] + 2 * 1000 * DRIFT)
    # A moment before the last answer, which another thread noted.
    assert clock.bounds(now - 1)[0] == pytest.approx(before[0] - 1)


@pytest.mark.parametrize("step", [-3600, -2, 2, 3600])
def test_after_a_step_of_the_services_clock_only_the_new_answers_count(step):
    clock, now = ServiceClock(), 100.0
    for _ in range(20):
        now = answer(clock, now + 0.3, 0.01)
    for _ in range(2):
        now = answer(clock, now, 0.01, ahead=AHEAD + step)
        assert is_right(clock, now, AHEAD + step)
    earliest, latest = clock.bounds(now)
    assert latest - earliest < 1.1


@pytest.mark.parametrize("step", [-3600, -2, 2, 3600])
def test_one_wrong_date_makes_the_bounds_wider_and_not_wrong(step):
    clock, now = ServiceClock(), 100.0
    for _ in range(20):
        now = answer(clock, now + 0.3, 0.01)
    now = answer(clock, now, 0.01, ahead=AHEAD + step)
    assert is_right(clock, now)
    now = answer(clock, now, 0.01)
    assert is_right(clock, now)
    earliest, latest = clock.bounds(now)
    assert latest - earliest < 1.1


def test_two_clients_never_free_a_lock_before_its_owners_lease_ends():
    rng = random.Random(2)
    for _ in range(500):
        owner, other, now = ServiceClock(), ServiceClock(), 100 + rng.random()
        # The second client's local clock has another origin.
        apart = rng.uniform(-1e6, 1e6)
        for _ in range(rng.randint(1, 5)):
            sent, delay = now - rng.uniform(0, 1), rng.uniform(0, 0.5)
            answer(owner, sent, delay, answered=rng.random())
            answer(other, sent + apart, delay, answered=rng.random(), ahead=AHEAD - apart)
        expires = owner.bounds(now)[1] + 5
        # By the service's clock, the lease ends at now + 5: the other may take it no earlier.
        just_before = now + 4.999 + apart
        assert other.bounds(just_before)[0] <= expires
