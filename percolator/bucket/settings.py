"""Settings of a bucket by which objects vanish, or stay after their deletion.

A store answers questions for them with XML, in which some leave the namespace out. Rules, each with
the failure that it prevents:

- A rule of the lifecycle counts if it may meet an object below the prefix. Only one for objects
  with a tag cannot, since no object is written with one. Otherwise, a rule for small objects, or
  one whose filter this does not know, would be taken for harmless.
- What the store does not tell is neither kept nor broken. Otherwise, an account that may not ask
  could use no bucket, or would be told that there is no rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from xml.etree.ElementTree import Element, ParseError, fromstring

_ARCHIVES = {"GLACIER", "DEEP_ARCHIVE"}
"""Classes of storage whose objects cannot be read until they are restored."""


class Settings(NamedTuple):
    """Settings of a bucket, as far as its store tells them."""

    versioning: str = ""
    """"Enabled", "Suspended", or empty if it never was."""
    removing: tuple[str, ...] = ()
    """Rules by which the store removes or archives objects below the prefix by itself."""
    removes_versions: bool = False
    """True if a rule removes the versions that were replaced or deleted."""
    untold: tuple[str, ...] = ()
    """Names of the settings that the store did not tell, each with the reason."""


def versioning_of(answer: bytes) -> str:
    """The status in a `VersioningConfiguration`. Raises `ValueError` if it is something else."""
    return _text(_parsed(answer, "VersioningConfiguration"), "Status")


def rules_for(answer: bytes, prefix: str) -> Settings:
    """`removing` and `removes_versions` by a `LifecycleConfiguration`, for objects below a prefix.

    Raises `ValueError` if it is something else."""
    folder = f"{prefix}/" if prefix else ""
    removing: list[str] = []
    removes_versions = False
    for rule in _children(_parsed(answer, "LifecycleConfiguration"), "Rule"):
        begins = _text(rule, "Prefix")  # in the rule itself, in its filter, or in its And
        meets = folder.startswith(begins) or begins.startswith(folder)
        if _text(rule, "Status") != "Enabled" or not meets or _has(rule, "Tag"):
            continue
        name = _text(rule, "ID")
        where = f"of the lifecycle, for objects below {begins!r}," if begins else "of the lifecycle"
        removing += [f"the rule {name!r} {where} {effect}" for effect in _effects(rule)]
        is_for_all = folder.startswith(begins) and not (
            _has(rule, "ObjectSizeGreaterThan") or _has(rule, "ObjectSizeLessThan")
        )
        removes_versions |= is_for_all and _has(rule, "NoncurrentVersionExpiration")
    return Settings(removing=tuple(removing), removes_versions=removes_versions)


def _effects(rule: Element) -> Iterator[str]:
    """Effects of a rule on objects that nothing has replaced or deleted."""
    for expiration in _children(rule, "Expiration"):
        if when := _when(expiration):
            yield f"removes them {when}"
    for transition in _children(rule, "Transition"):
        if (kind := _text(transition, "StorageClass")) in _ARCHIVES:
            yield f"moves them to {kind} {_when(transition)}, where they cannot be read"


def _when(action: Element) -> str:
    """Empty for an expiration that only means marks of deletion."""
    if days := _text(action, "Days"):
        return f"{days} days after they were written"
    date = _text(action, "Date")
    return f"on {date}" if date else ""


def _parsed(answer: bytes, name: str) -> Element:
    try:
        # The store is trusted with all data anyway.
        found = fromstring(answer)  # noqa: S314
    except ParseError as error:
        raise ValueError(f"the answer is not XML: {error}") from None
    if _name(found) != name:
        raise ValueError(f"the answer is a {_name(found)}, not a {name}")
    return found


def _children(parent: Element, name: str) -> list[Element]:
    return [one for one in parent if _name(one) == name]


def _has(parent: Element, name: str) -> bool:
    return any(_name(one) == name for one in parent.iter())


def _text(parent: Element, name: str) -> str:
    """The text of the first such element at any depth; empty if there is none."""
    return next(((one.text or "").strip() for one in parent.iter() if _name(one) == name), "")


def _name(element: Element) -> str:
    """Without the namespace."""
    return element.tag.rpartition("}")[2]
