"""What is shown of texts that come from elsewhere."""

import pytest

from django_fencedlock.storage.text import escape_control, without_secrets


@pytest.mark.parametrize("text", ["invoice:42", "é 🔒", "a b", "日本", "{x}'\"<b>"])
def test_what_can_be_seen_stays(text):
    assert escape_control(text) == text


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("a\nb", "a\\nb"),
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("a\x9b31mb", "a\\x9b31mb"),
        ("é\u202eb", "é\\u202eb"),
        ("a\u2028b\u200b", "a\\u2028b\\u200b"),
        ("\0\ud800", "\\x00\\ud800"),
    ],
)
def test_what_hides_or_moves_a_cursor_is_an_escape(text, seen):
    assert escape_control(text) == seen


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://user:s3cret@host/0", "redis://user:***@host/0"),
        ("redis://:s3/cr@et'\"#?@host", "redis://:***@host"),
        ("redis://s3cret@host", "redis://***@host"),
        ("redis://h?password=s3cret&db=1", "redis://h?password=***&db=1"),
        (
            "redis+sentinel://h/x?sentinel_password=s3'cret",
            "redis+sentinel://h/x?sentinel_password=***",
        ),
        ("['redis://:s3cret@a', 'redis://:s3cret@b']", "['redis://:***@b']"),
        ("{'L': 'redis://a?password=s3cret'}", "{'L': 'redis://a?password=***'}"),
    ],
)
def test_passwords_of_urls_are_hidden(text, shown):
    assert without_secrets(text) == shown
