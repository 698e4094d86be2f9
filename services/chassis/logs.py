"""Structured logs on standard error: one line per event, for humans on a terminal, else JSON.

All code logs with `structlog.get_logger("percolator.NAME")`, with the event as a short constant
text and the variable parts as keywords: `log.info("tablet opened", tablet=7, epoch=3)`.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog
from structlog.types import EventDict, Processor

_TRACEBACK_CHARACTERS_MAX = 32_768
_SENT_TO_NOBODY = "ExecuteBatchError raised in core by servicer method"


def configure(service: str, log_format: Literal["auto", "human", "json"], level: str) -> None:
    """Routes structlog and the standard library's logging, also of other packages, to stderr."""
    human = log_format == "human" or (log_format == "auto" and sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Tracebacks are text before they come to the console, which would have rich make them, if it is
    # installed: those show local variables, and so tokens, keys and stored values.
    plain = structlog.dev.plain_traceback
    last: Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)
        if human
        else structlog.processors.JSONRenderer()
    )
    renderers: list[Processor] = [
        structlog.processors.format_exc_info,
        _with_short_traceback,
        last,
    ]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    handler.addFilter(_is_no_caller_that_left)
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


def _with_short_traceback(_: object, __: str, entry: EventDict) -> EventDict:
    """Leaves out the middle of a long traceback: the message of an observer's error may contain
    the whole value that it could not handle."""
    text = entry.get("exception", "")
    if len(text) > _TRACEBACK_CHARACTERS_MAX:
        half = _TRACEBACK_CHARACTERS_MAX // 2
        left_out = len(text) - 2 * half
        entry["exception"] = f"{text[:half]} ({left_out} characters left out) {text[-half:]}"
    return entry


def _is_no_caller_that_left(record: logging.LogRecord) -> bool:
    """False for what gRPC logs, with a traceback, when a caller has gone just before its answer was
    to be sent: any caller could fill the disk with them."""
    text = record.msg
    return not (isinstance(text, str) and text.startswith(_SENT_TO_NOBODY))
