"""Who holds a lock: which code may enter it again."""

import threading

from django_fencedlock.owners import whoami


def test_a_thread_that_got_the_number_of_one_that_ended_is_another():
    seen = []

    def look():
        seen.append((threading.get_ident(), whoami()))

    for _ in range(50):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        numbers = [number for number, _ in seen]
        if len(set(numbers)) < len(numbers):
            break
    else:
        raise AssertionError("the system gave no number out twice")
    assert len({who for _, who in seen}) == len(seen)


def test_a_thread_is_itself():
    assert whoami() is whoami()
