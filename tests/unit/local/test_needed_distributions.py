"""What the services look for before they start is what the extra installs."""

from __future__ import annotations

import re
from importlib.metadata import packages_distributions, requires

import services

DISPENSABLE = {"uvloop"}
"""Without these, services are slower."""


def test_services_look_for_all_that_the_extra_installs() -> None:
    extra = re.compile(r"""^([\w.-]+).*;.*\bextra *== *["']server["']""")
    wanted = map(extra.match, requires("percolator-store") or ())
    installed = {found[1] for found in wanted if found is not None}
    providers = packages_distributions()
    looked_for = {name for module in services._NEEDED for name in providers[module]}
    assert {name.replace("_", "-") for name in looked_for} == installed - DISPENSABLE
