"""How Sphinx builds the documentation: ``sphinx-build -W docs build/docs``."""

import re
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent

project = "django-fencedlock"
author = "the django_fencedlock authors"
project_copyright = author
version = release = installed_version("django-fencedlock")

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
# The anchors that GitHub gives to headings, so that a link works in both places.
myst_heading_anchors = 4

html_theme = "furo"
html_title = "django-fencedlock"
html_static_path: list[str] = []
html_show_sourcelink = False
html_copy_source = False
# Blocks of the shell and of output are shown as they are.
highlight_language = "text"
# Links within the documentation are checked; links to other sites aren't.
nitpicky = True


def setup(app: Any) -> None:
    app.connect("source-read", without_links_out)


def without_links_out(app: Any, docname: str, source: list[str]) -> None:
    """Make plain text of links to files outside of docs/, which aren't part of the pages."""

    def change(link: re.Match[str]) -> str:
        target = (DOCS / docname).parent / link[2].partition("#")[0]
        return link[0] if DOCS in target.resolve().parents else link[1]

    source[0] = re.sub(r"(?<!!)\[([^\]]*)\]\((\.\./[^)\s]+)\)", change, source[0])
