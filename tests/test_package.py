"""What a package index shows: links that lead somewhere, and versions that are tested."""

import importlib.util
import re
from configparser import ConfigParser
from pathlib import Path
from types import ModuleType

import pytest

import django_fencedlock

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
TARGET = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def setup_py() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_of_the_package", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_are_plain_text_without_a_repository(setup_py: ModuleType) -> None:
    shown = setup_py.elsewhere(README, "", "1.2")
    assert TARGET.findall(README)
    assert TARGET.findall(shown) == []
    # What a picture tells is told in words.
    assert "\n*Worker A gets the lock with token 33" in shown


def test_links_lead_to_the_files_of_the_version(setup_py: ModuleType) -> None:
    shown = setup_py.elsewhere(README, "https://code.example/us/it", "1.2")
    assert "](https://code.example/us/it/raw/v1.2/docs/stale_write.svg)" in shown
    targets = TARGET.findall(shown)
    assert len(targets) == len(TARGET.findall(README))
    for target in targets:
        kind, path = re.fullmatch(
            r"https://code.example/us/it/(raw|blob)/v1.2/(.+)", target
        ).groups()
        assert (ROOT / path.partition("#")[0]).is_file()
        assert (kind == "raw") == path.endswith(".svg")


def test_addresses_and_headings_stay(setup_py: ModuleType) -> None:
    text = "[a](https://code.example/) [b](#there) [c](mailto:x@code.example)"
    assert setup_py.elsewhere(text, "https://code.example/us/it", "1.2") == text


@pytest.mark.parametrize(
    ("urls", "found"),
    [
        ("", ""),
        ("project_urls =\n    Documentation = https://docs.example/\n", ""),
        (
            "project_urls =\n    Docs = https://d.example\n    Source = https://s.example/a/\n",
            "https://s.example/a",
        ),
    ],
)
def test_the_repository_is_that_of_the_metadata(
    setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, urls: str, found: str
) -> None:
    monkeypatch.setattr(setup_py, "HERE", tmp_path)
    (tmp_path / "setup.cfg").write_text(f"[metadata]\nname = it\n{urls}")
    assert setup_py.repository() == found


def test_the_version_is_that_of_the_package(setup_py: ModuleType) -> None:
    assert setup_py.version() == django_fencedlock.__version__


def test_what_the_classifiers_claim_is_what_tox_runs() -> None:
    config = ConfigParser(interpolation=None)
    config.read([ROOT / "setup.cfg", ROOT / "tox.ini"])
    claimed = re.findall(
        r"Python :: (3\.\d+)|Django :: (\d\.\d)", config["metadata"]["classifiers"]
    )
    run = re.findall(r"py3(\d+)-django(\d)(\d)", config["tox"]["env_list"])
    assert {python for python, _ in claimed if python} == {f"3.{minor}" for minor, _, _ in run}
    assert {django for _, django in claimed if django} == {f"{a}.{b}" for _, a, b in run}
    oldest = min(python for python, _ in claimed if python)
    assert config["options"]["python_requires"] == f">={oldest}"


def test_what_the_readme_claims_is_what_tox_runs() -> None:
    config = ConfigParser(interpolation=None)
    config.read(ROOT / "tox.ini")
    run = re.findall(r"py3(\d+)-django(\d\d)-celery(\d\d)", config["tox"]["env_list"])
    pythons, djangos, celeries = (
        [int(each) for each in column] for column in zip(*run, strict=True)
    )
    told = (
        f"Python 3.{min(pythons)} to 3.{max(pythons)}, Django {min(djangos) / 10} to "
        f"{max(djangos) / 10} and Celery {min(celeries) / 10} to {max(celeries) / 10}."
    )
    assert told in " ".join(README.split())
