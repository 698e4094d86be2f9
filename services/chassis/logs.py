"""Structured logs on standard error: one line per event, for humans on a terminal, else JSON.

Everybody logs by `structlog.get_logger("percolator.NAME")`, with the event as a short constant
text and what varies as keywords: `log.info("tablet opened", tablet=7, epoch=3)`.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog
from structlog.types import Processor


def configure(service: str, log_format: Literal["auto", "human", "json"], level: str) -> None:
    """Routes structlog and the standard library's logging, other packages' included, to stderr."""
    human = log_format == "human" or (log_format == "auto" and sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Not rich's tracebacks, the default where rich is there: they show local variables, and so
    # tokens, keys and stored values.
    plain = structlog.dev.plain_traceback
    renderers: list[Processor] = (
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
        if human
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
