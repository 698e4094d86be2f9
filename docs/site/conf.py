"""How `make docs` builds the pages: README, the guides, and the API from its docstrings."""

from __future__ import annotations

import re
from importlib.metadata import version as installed_version

from sphinx.application import Sphinx

project = "Percolator"
version = release = installed_version("percolator-store")
html_title = f"Percolator {release}"
html_theme = "furo"
html_show_copyright = False

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
# The source directory is the root of the checkout, so that links resolve as they do on GitHub.
root_doc = "docs/site/index"
include_patterns = ["*.md", "docs/**", "examples/**/README.md"]
exclude_patterns = ["var/**", "build/**"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_default_options = {"members": True, "undoc-members": True}
default_role = "code"

_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_INDENTED = re.compile(r"(\A|\n\n)(?=    \S)")


def markdown_to_restructured_text(
    _app: Sphinx, _what: str, _name: str, _object: object, _options: object, lines: list[str]
) -> None:
    """Docstrings are Markdown: `code`, and indented blocks of it."""
    text = _CODE.sub(r"``\1``", "\n".join(lines))
    # Without "::" it would be a quotation, in which asterisks have a meaning.
    lines[:] = _INDENTED.sub(r"\1::\n\n", text).splitlines()


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", markdown_to_restructured_text)
