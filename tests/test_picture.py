"""The picture of the layers shows them as they are."""

import pytest

from tests.picture import PICTURE, TITLES, draw, names
from tests.test_layers import LAYERS, ROOT


def test_the_picture_is_of_the_layers_as_they_are() -> None:
    assert PICTURE.read_text() == draw(LAYERS), "draw it anew: python -m tests.picture"
    assert set(TITLES) == set(LAYERS)


def test_rooms_of_one_package_stand_together() -> None:
    assert names(["b", "p.one", "a", "p.two*"]) == ["a", "b", "p: one, two"]


def test_the_table_of_contributing_has_every_module() -> None:
    text = (ROOT.parent / "CONTRIBUTING.md").read_text().split("| module | its job |")[1]
    told = text.split("`")[1::2]
    whole = {name.rstrip("*") for layer in LAYERS.values() for name in layer}
    missing = {
        name
        for name in whole
        if name not in told and not any(each.startswith(f"{name}.") for each in told)
    }
    # One row for all that keeps locks.
    assert {name for name in missing if not name.startswith("backends.")} == set()


@pytest.mark.parametrize("package", ["fences", "backends"])
def test_its_tables_of_rooms_have_every_module(package: str) -> None:
    text = (ROOT.parent / "CONTRIBUTING.md").read_text().split(f"| in `{package}` | |")[1]
    told = text.split("\n\n")[0].split("`")[1::2]
    rooms = {path.stem for path in (ROOT / package).glob("*.py")} - {"__init__"}
    assert rooms <= set(told)
