"""The patterns that lock names are counted by."""

import uuid

import pytest

from django_fencedlock.contrib.patterns import OTHER, Patterns, pattern_of


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("nightly-close", "nightly-close"),
        ("invoice:42", "invoice:*"),
        ("report:2026-11-18", "report:*-*-*"),
        ("shard12:row7", "shard*:row*"),
        (f"order:{uuid.UUID(int=7)}", "order:*"),
        (f"order:{uuid.UUID(int=7).hex}", "order:*"),
        ("order_8f14e45fceea167a", "order_*"),
        ("commit:DEADBEE1", "commit:*"),
        ("cafebabe", "cafebabe"),
        ("backup2026", "backup*"),
        ("upload:01ARZ3NDEKTSV4RRFFQ69G5FAV", "upload:*"),
        ("konto:ärger٣", "konto:ärger٣"),
    ],
)
def test_what_tells_one_row_from_another_becomes_a_star(name, pattern):
    assert pattern_of(name) == pattern


def test_a_template_goes_before_the_rule_and_a_function_before_both():
    assert Patterns().of("stock:A-1", "stock:{sku}") == "stock:{sku}"
    patterns = Patterns(lambda name, template: template.upper() or None)
    assert patterns.of("stock:A-1", "stock:{sku}") == "STOCK:{SKU}"
    assert patterns.of("stock:1") == "stock:*"


def test_there_are_never_more_patterns_than_allowed():
    patterns = Patterns(most=2)
    found = {patterns.of(f"{letter}:1") for letter in "abcdefg"}
    assert found == {"a:*", "b:*", OTHER}
    assert patterns.of("a:2") == "a:*"
