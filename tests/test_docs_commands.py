"""What the pages show besides Python: commands exist with their options, and SQL does its work."""

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from importlib.util import find_spec
from pathlib import Path

import pytest
from django.core.management import get_commands, load_command_class
from django.db import connection

from tests.models import Invoice
from tests.test_docs import ALL, DOCS, FOLLOWED, PAGES, ROOT, Block, _blocks

#: Who tries blocks that are neither Python nor commands.
TRIED = {
    # By test_alert_rules.py, with Prometheus' own tool.
    "monitoring.md": "yaml",
    # By faults/test_runbooks.py.
    "troubleshooting.md": "sql",
    # Here.
    "external-effects.md": "sql",
    # By test_existing_tables.py.
    "adopting.md": "diff",
}
#: The reader's own project, and commands that a page writes itself.
PROJECT = "shop"
IMAGINED = ["close_books"]
SHELL = [
    block
    for page in ALL
    if page != FOLLOWED
    for block in _blocks(page)
    if block.language in ("", "sh")
]
INLINE = [
    pytest.param(command, id=f"{page.name}: {command}")
    for page in ALL
    for command in sorted(set(re.findall(r"`(manage\.py [^`]+)`", page.read_text())))
]


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_that_are_shown_exist(block: Block) -> None:
    if not block.text.startswith("6  admin"):  # A picture.
        for command in _commands(block.text):
            _examine(command)


@pytest.mark.parametrize("command", INLINE)
def test_commands_that_are_named_exist(command: str) -> None:
    _examine(shlex.split(command))


def test_every_block_is_tried_somewhere() -> None:
    rest = {
        (block.page.name, block.language)
        for page in PAGES
        for block in _blocks(page)
        if block.language not in ("", "sh", "python", "py", "text", "{toctree}")
    }
    assert rest == set(TRIED.items())


@pytest.mark.parametrize(
    "command",
    [
        *(f"manage.py {words}" for words in ("fencedlock lst", "fencedlock list --no", "nothing")),
        *("python -m nothing", "pip install 'django-fencedlock[nothing]'", "nothing"),
    ],
)
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    with pytest.raises(AssertionError):
        _examine(shlex.split(command))


@pytest.mark.django_db
def test_the_sql_of_a_service_of_ones_own_refuses_older_tokens() -> None:
    page = DOCS / "guides/external-effects.md"
    (block,) = [block for block in _blocks(page) if block.language == "sql"]
    statement = re.sub(r":(\w+)", r"%(\1)s", block.text)
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE newest_token (name text, token bigint)")
        cursor.execute("INSERT INTO newest_token VALUES ('x', 5)")
        for token, changed in ((4, 0), (5, 1), (7, 1), (6, 0)):
            cursor.execute(statement, {"name": "x", "token": token})
            assert cursor.rowcount == changed, token


@pytest.mark.django_db(transaction=True)
def test_the_warning_of_a_write_without_lock_is_as_it_is_shown(settings, caplog) -> None:
    settings.FENCEDLOCK_WITHOUT_LOCK = "warn"
    invoice = Invoice.objects.create()
    invoice.save()
    page = DOCS / "guides/adopting.md"
    (shown,) = [block.text.strip() for block in _blocks(page) if block.language == "text"]
    told = shown.replace("billing.Invoice", "tests.Invoice")
    assert caplog.messages == [told.replace("billing.invoice:42", f"tests.invoice:{invoice.pk}")]
    assert caplog.records[0].name in page.read_text()


def _commands(text: str) -> Iterator[list[str]]:
    lines = text.replace("\\\n", " ").splitlines()
    if any(line.startswith("$ ") for line in lines):
        # The rest is what they print.
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    for line in lines:
        for command in line.split(" && "):
            if words := shlex.split(command, comments=True):
                yield words


def _examine(words: list[str]) -> None:
    program, *rest = words
    program = Path(program).name
    if program in ("python", "python3") and rest[0] == "manage.py":
        program, rest = "manage.py", rest[1:]
    elif program in ("python", "python3") and rest[0] == "-m":
        module, *rest = rest[1:]
        assert find_spec(module), f"There is no module {module!r}."
        if module != "example_project" or rest[0] != "manage":
            return
        program, rest = "manage.py", rest[1:]
    if program == "manage.py":
        _examine_management(*rest)
    elif program == "pip":
        _examine_extras(rest)
    elif program == "celery":
        app = rest[rest.index("-A") + 1]
        assert app == PROJECT or find_spec(app)
    else:
        here = Path(sys.executable).parent / program
        assert here.exists() or shutil.which(program), f"There is no program {program!r}."


def _examine_management(name: str, *rest: str) -> None:
    if name in IMAGINED or any(ROOT.glob(f"example_project/*/management/commands/{name}.py")):
        return
    assert name in get_commands(), f"There is no command {name!r}."
    parser = load_command_class(get_commands()[name], name).create_parser("manage.py", name)
    known = set(parser._option_string_actions)
    if name == "fencedlock":
        (actions,) = [action for action in parser._actions if action.dest == "action"]
        if rest:
            assert rest[0] in actions.choices, f"{rest[0]!r} is no action."
            known |= set(actions.choices[rest[0]]._option_string_actions)
    for word in rest:
        if word.startswith("-"):
            assert word.partition("=")[0] in known, f"{name} has no option {word!r}."


def _examine_extras(words: list[str]) -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    for extra in re.findall(r"(?:fencedlock|^\.|\.whl| \.)\[([\w-]+)\]", " ".join(words)):
        assert extra in config["options.extras_require"], f"There is no extra {extra!r}."
