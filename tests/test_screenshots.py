"""The pictures of the documentation can be made again."""

import pytest

from tests import screenshots
from tests.scripts import run_python


@pytest.mark.slow
@pytest.mark.usefixtures("browser")  # Skips without Chromium.
def test_the_script_makes_the_pictures_that_are_shown(tmp_path):
    run_python("-m", "tests.screenshots", tmp_path)
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {path.name for path in screenshots.IMAGES.glob("*.png")}
