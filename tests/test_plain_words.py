"""The words of docstrings, comments and messages: plain ones, each with one meaning."""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACES = ("django_fencedlock", "example_project")
TEMPLATES = (".html", ".txt")

#: Phrases that a reader stumbles over, and what to write instead.
PHRASES = {
    r"he|him|his|himself": "it for a process, they for a person",
    r"somebody|someone|nobody|no one|anybody|everybody|whoever|whom|those who": (
        "the actor: a worker, another process"
    ),
    r"lest|but for|thereof|anew|in vain|in earnest|as ever|to be had": "everyday words",
    r"(is|are|be|been|was|were) told|tells? (of|who|whether)": "what is logged, sent or known",
    r"(gives?|gave|given|giving) (\w+ ){0,2}back": "release, or return",
    r"(takes?|took|taken|taking) (\w+ ){0,2}away": "release by force, or remove",
    r"(runs?|ran|running) out": "expire",
    r"(hasn't|haven't) (a|an|any|no)\b": "has no",
    r"lift(s|ed|ing)?": "raise",
    r"scribes?|parcels?|dut(y|ies)|contenders?": "background writer, stored message, waiter",
    r"(bury|buries|buried|struck|strikes?)": "free, or interrupt",
}
FOUND = re.compile("|".join(rf"(?P<p{n}>\b(?:{each})\b)" for n, each in enumerate(PHRASES)), re.I)
#: A docstring that begins with "Have something done".
ORDER = re.compile(r'^[rf]?"""\s*Have (?!you)\w+ ', re.I)


def hits(path: Path) -> Iterator[str]:
    for line, text in texts(path):
        for match in FOUND.finditer(text):
            at = line + text.count("\n", 0, match.start())
            instead = list(PHRASES.values())[int(str(match.lastgroup)[1:])]
            yield f"{path.relative_to(ROOT)}:{at}: {match[0]!r}. Write {instead}."
        if ORDER.match(text):
            yield f"{path.relative_to(ROOT)}:{line}: begins with 'Have'. Begin with the verb."


def texts(path: Path) -> Iterator[tuple[int, str]]:
    if path.suffix != ".py":
        yield 1, path.read_text()
        return
    kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1))
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        # A single word is a name, such as that of Unix's user "nobody".
        if token.type in kinds and not re.fullmatch(r"(['\"])\w*\1", token.string):
            yield token.start[0], token.string


def files() -> list[Path]:
    found = (path for place in PLACES for path in (ROOT / place).rglob("*"))
    return sorted(path for path in found if path.suffix in (".py", *TEMPLATES))


def test_texts_have_plain_words() -> None:
    assert [hit for path in files() for hit in hits(path)] == []
