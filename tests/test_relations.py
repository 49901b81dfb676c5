"""Many-to-many relations to fenced models cost what they cost without the mixin."""

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from tests.models import Folder, Topic

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(("ask", "answer"), [("count", 2), ("exists", True)])
def test_they_are_counted_without_a_join(ask, answer):
    folder = Folder.objects.create()
    folder.topics.add(Topic.objects.create(), Topic.objects.create())
    with CaptureQueriesContext(
        connection,
    ) as queries:
        assert getattr(folder.topics, ask)() == answer
    assert len(queries) == 1
    assert "JOIN" not in queries[0]["sql"]


def test_a_prefetched_relation_is_counted_without_a_query(django_assert_num_queries):
    folder = Folder.objects.create()
    folder.topics.add(Topic.objects.create())
    folder = Folder.objects.prefetch_related("topics").get()
    with django_assert_num_queries(0):
        assert folder.topics.count() == 1
        assert folder.topics.exists()


def test_a_filter_is_still_joined():
    folder = Folder.objects.create()
    folder.topics.add(Topic.objects.create(text="a"), Topic.objects.create(text="b"))
    assert folder.topics.filter(text="a").count() == 1
