"""Tables and durations for terminals."""

import pytest

from django_fencedlock.management.tables import duration, table


def test_columns_are_aligned_by_what_is_seen():
    rows = [("invoice:1", "held", "x"), ("请求书", "lost", "y"), ("cafe\u0301", "free", "z")]
    plain = table(("NAME", "STATE", "H"), rows)
    assert plain == [
        "NAME       STATE  H",
        "invoice:1  held   x",
        "请求书     lost   y",
        "cafe\u0301       free   z",
    ]
    painted = table(
        ("NAME", "STATE", "H"), rows, lambda column, text: {"lost": "<{}>".format}.get(text)
    )
    assert painted[2] == "请求书     <lost>   y"
    assert [painted[1], painted[3]] == [plain[1], plain[3]]


def test_a_name_can_neither_break_a_line_nor_colour_the_terminal():
    (_, line) = table(("NAME",), [("in\nvoice\x1b[31m\u202e",)])
    assert line == "in\\nvoice\\x1b[31m\\u202e"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0.0 s"),
        (59.94, "59.9 s"),
        (61, "1 min 1 s"),
        (3725, "1 h 2 min"),
        (90000, "1 d 1 h"),
        (-5, "-5.0 s"),
    ],
)
def test_durations(seconds, words):
    assert duration(seconds) == words
