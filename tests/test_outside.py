"""docs/guides/external-effects.md: its code does what it says, against real files and Redis."""

import re
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis

PAGE = Path(__file__).parent.parent / "docs/guides/external-effects.md"


@pytest.fixture(scope="module")
def page():
    found = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S):
        if re.search(r"^def ((publish|cache|put)\(|charge\(client)", block, re.M):
            exec(block, found)
    return SimpleNamespace(**found)


class TestFile:
    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "report.json"

    def test_what_the_newest_holder_wrote_is_read(self, page, path):
        assert page.publish(path, b"first", 9)
        assert page.publish(path, b"second", 10)
        assert page.newest(path) == b"second"

    def test_a_former_holder_writes_what_is_never_read(self, page, path):
        assert page.publish(path, b"new", 10)
        assert not page.publish(path, b"old", 9)
        assert page.newest(path) == b"new"

    def test_older_files_are_removed_and_none_is_left_half_written(self, page, path, monkeypatch):
        page.publish(path, b"first", 1)
        page.publish(path, b"second", 2)
        monkeypatch.setattr("os.fsync", lambda file: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            page.publish(path, b"third", 3)
        assert [each.name for each in path.parent.iterdir()] == [f"report.json.{2:020d}"]

    def test_a_file_that_was_never_written(self, page, path):
        with pytest.raises(FileNotFoundError, match=r"report\.json"):
            page.newest(path)

    @pytest.mark.slow
    def test_readers_find_a_whole_file_while_it_is_written(self, page, path):
        page.publish(path, b"0" * 1000, 0)
        writer = threading.Thread(
            target=lambda: [page.publish(path, b"%d" % (n % 10) * 1000, n) for n in range(1, 200)]
        )
        writer.start()
        sizes = Counter()
        while writer.is_alive():
            sizes[len(page.newest(path))] += 1
        writer.join()
        assert set(sizes) == {1000}
        assert page.newest(path) == b"9" * 1000


class TestRedis:
    @pytest.fixture
    def client(self, redis_server):
        client = redis.Redis.from_url(redis_server.url)
        client.delete("report", "{report}:token")
        yield client
        client.delete("report", "{report}:token")
        client.close()

    def test_a_former_holder_is_refused(self, page, client):
        assert page.cache(client, "report", b"new", 10)
        assert not page.cache(client, "report", b"old", 9)
        assert client.get("report") == b"new"

    def test_a_holder_may_write_again_and_a_newer_one_as_well(self, page, client):
        for token, value in ((3, b"one"), (3, b"two"), (4, b"three")):
            assert page.cache(client, "report", value, token)
            assert client.get("report") == value

    def test_the_entry_expires_and_the_token_does_not(self, page, client):
        page.cache(client, "report", b"new", 10, seconds=60)
        assert 0 < client.ttl("report") <= 60
        assert client.ttl("{report}:token") == -1
        client.delete("report")
        assert not page.cache(client, "report", b"old", 9)

    def test_both_keys_are_in_the_same_slot_of_a_cluster(self):
        assert redis.crc.key_slot(b"report") == redis.crc.key_slot(b"{report}:token")


class TestObjectStore:
    @pytest.fixture
    def store(self):
        return Store()

    def test_a_former_holder_is_refused(self, page, store):
        assert page.put(store, "b", "report", b"new", 10)
        assert not page.put(store, "b", "report", b"old", 9)
        assert store.body == b"10\nnew"

    def test_one_that_was_overtaken_between_look_and_put_is_refused(self, page, store):
        page.put(store, "b", "report", b"same", 8)
        store.meanwhile = lambda: page.put(store, "b", "report", b"same", 10)
        assert not page.put(store, "b", "report", b"old", 9)
        assert store.body == b"10\nsame"

    def test_of_two_who_find_nothing_one_looks_again(self, page, store):
        store.meanwhile = lambda: page.put(store, "b", "report", b"old", 9)
        assert page.put(store, "b", "report", b"new", 10)
        assert store.body == b"10\nnew"


class Store:
    """An S3 with one object, whose ETag is a hash of the content as in S3."""

    class exceptions:  # noqa: N801
        class ClientError(Exception):
            def __init__(self, code):
                self.response = {"Error": {"Code": code}}

    body = metadata = None
    meanwhile = None

    def head_object(self, **where):
        if self.body is None:
            raise self.exceptions.ClientError("404")
        return {"ETag": hash(self.body), "Metadata": self.metadata}

    def put_object(self, *, Body, Metadata, IfMatch=None, IfNoneMatch=None, **where):  # noqa: N803
        if self.meanwhile:
            call, self.meanwhile = self.meanwhile, None
            call()
        found = None if self.body is None else hash(self.body)
        if found != IfMatch:
            raise self.exceptions.ClientError("PreconditionFailed")
        self.body, self.metadata = Body, Metadata


def test_the_idempotency_key_is_the_same_for_every_try(page):
    sent = []
    client = SimpleNamespace(post=lambda url, **request: sent.append(request["headers"]))
    for amount in (1, 2):
        page.charge(client, SimpleNamespace(pk=42), amount)
    assert sent == [{"Idempotency-Key": "charge-invoice-42"}] * 2
