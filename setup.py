"""
All that setup.cfg can't say: what the README is on the page of a package index.

Its links to files would lead nowhere there. They lead into the repository that `project_urls` in
setup.cfg has as `Source`, to the tag of this version; without it, they are plain text.
"""

import re
from configparser import ConfigParser
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: A link or picture whose target is a file: no address, and no heading of the same page.
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")


def long_description() -> str:
    return elsewhere((HERE / "README.md").read_text(encoding="utf-8"), repository(), version())


def elsewhere(text: str, repository: str, version: str) -> str:
    """Have the links of a page lead to the files at a repository, if there is one."""

    def change(link: re.Match[str]) -> str:
        picture, words, path = link.groups()
        if not repository:
            return f"*{words}*" if picture else words
        return f"{picture}[{words}]({repository}/{'raw' if picture else 'blob'}/v{version}/{path})"

    return LINK.sub(change, text)


def repository() -> str:
    config = ConfigParser()
    config.read(HERE / "setup.cfg", encoding="utf-8")
    urls = config.get("metadata", "project_urls", fallback="")
    found = re.search(r"^Source\s*=\s*(\S+?)/?$", urls, re.MULTILINE)
    return found[1] if found else ""


def version() -> str:
    code = (HERE / "django_fencedlock/__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', code, re.MULTILINE)
    assert found, "django_fencedlock/__init__.py has no __version__."
    return found[1]


if __name__ == "__main__":
    # A build has it; the environment of the tests may not.
    from setuptools import setup

    setup(long_description=long_description())
