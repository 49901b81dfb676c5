"""How Sphinx builds the documentation: ``sphinx-build -W docs build/docs``."""

from importlib.metadata import version as installed_version

project = "django-fencedlock"
author = "the django_fencedlock authors"
project_copyright = author
version = release = installed_version("django-fencedlock")

extensions = ["myst_parser"]
# The glossary is a list of definitions.
myst_enable_extensions = ["deflist"]
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
# What a link points at is looked up here; other people's sites are not.
nitpicky = True
