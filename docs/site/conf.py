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


_ABOUT_FILES = re.compile(r"\b(?!conftest)\w+\.py\b")
_NOT_CONSTRUCTED = {
    "Changes", "Database", "Pin", "Receipt", "Row", "Share", "SharedTransaction", "Snapshot",
    "Ticket", "Transaction",
}  # fmt: skip
"""Classes of which a program gets objects from elsewhere: how they are made is not its business."""


def markdown_to_restructured_text(
    _app: Sphinx, what: str, _name: str, _object: object, _options: object, lines: list[str]
) -> None:
    """Docstrings are Markdown: `code`, and indented blocks of it.

    What a module says about its files is for readers of the code.
    """
    paragraphs = "\n".join(lines).split("\n\n")
    if what == "module":
        paragraphs = [one for one in paragraphs if not _ABOUT_FILES.search(one)]
    text = _CODE.sub(r"``\1``", "\n\n".join(paragraphs))
    # Without "::" it would be a quotation, in which asterisks have a meaning.
    lines[:] = _INDENTED.sub(r"\1::\n\n", text).splitlines()


def without_internals(
    _app: Sphinx,
    what: str,
    name: str,
    _object: object,
    _options: object,
    signature: str | None,
    returned: str | None,
) -> tuple[str | None, str | None]:
    """Leaves out how an object is made that no program makes."""
    hidden = what == "class" and name.rpartition(".")[2] in _NOT_CONSTRUCTED
    return ("", None) if hidden else (signature, returned)


def write_first_page(app: Sphinx, error: Exception | None) -> None:
    """Makes the page at which `make docs` ends: the source directory has the contents elsewhere."""
    if error is None:
        target = f"{root_doc}.html"
        page = f'<!doctype html><meta http-equiv="refresh" content="0; url={target}">'
        link = f'<title>{html_title}</title><a href="{target}">{html_title}</a>'
        (app.outdir / "index.html").write_text(f"{page}{link}\n")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", without_internals)
    app.connect("build-finished", write_first_page)
    app.connect("autodoc-process-docstring", markdown_to_restructured_text)
