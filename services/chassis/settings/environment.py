"""Finds variables in the environment that were meant for a service, and that it does not know.

They are not refused: container platforms invent some with any prefix, and one environment may
serve several programs.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence

from percolator.services.chassis.settings.loading import environment_name
from percolator.services.chassis.settings.service_settings import ServiceSettings
from percolator.v1.cluster_pb2 import ServiceKind
from percolator.wire.cluster import ENVIRONMENT_VARIABLE
from percolator.wire.credentials import TLS_VARIABLES, TOKEN_VARIABLE

_PREFIX = "PERCOLATOR_"

SERVICES = tuple(
    name.removeprefix("SERVICE_KIND_").replace("_", "")
    for name, kind in ServiceKind.items()
    if kind != ServiceKind.SERVICE_KIND_UNSPECIFIED
)
"""What follows the prefix in the variables of each service, such as TABLETSERVER."""

_OF_CLIENTS = {ENVIRONMENT_VARIABLE, TOKEN_VARIABLE, *TLS_VARIABLES.values()}

_INVENTED = re.compile(
    r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$"
)
"""The variables that Kubernetes sets in each container for a service called percolator-oracle."""

_LIKENESS_OF_FIELDS = 0.5
_LIKENESS_OF_NAMES = 0.9
"""Without the prefix of the service, a name is only reported if it is nearly one of its own."""


def unknown_variables(
    kind: type[ServiceSettings], environment: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Variables that look like settings of this service, and the nearest that exists, or ""."""
    own = environment_name(kind, "")
    known = [environment_name(kind, field) for field in ("config", *kind.model_fields)]
    of_services = tuple(f"{_PREFIX}{service}_" for service in SERVICES)
    for name in sorted(environment):
        if not name.startswith(_PREFIX) or name in known or name in _OF_CLIENTS:
            continue
        if _INVENTED.search(name):
            continue
        if name.startswith(own):
            fields = [one.removeprefix(own) for one in known]
            nearest = _nearest(name.removeprefix(own), fields, _LIKENESS_OF_FIELDS)
            yield name, own + nearest if nearest else ""
        elif not name.startswith(of_services):
            with_service = own + name.removeprefix(_PREFIX)
            is_missing = with_service in known  # as in PERCOLATOR_LOG_LEVEL
            nearest = with_service if is_missing else _nearest(name, known, _LIKENESS_OF_NAMES)
            if nearest:
                yield name, nearest


def _nearest(name: str, among: Sequence[str], likeness: float) -> str:
    return next(iter(difflib.get_close_matches(name, among, n=1, cutoff=likeness)), "")
