"""An index that the tests of commands build and check."""

from __future__ import annotations

from percolator import Table, codecs
from percolator.recipes import Index

people = Table("people")
city = people.column("city", codecs.text)
by_city: Index[str, str, str] = Index("people by city", on=city, value=codecs.text)
