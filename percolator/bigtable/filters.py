"""Selections and changes as Bigtable's messages.

The service refuses chains and interleaves of fewer than two filters, and ranges that are empty; the
emulator accepts some of them. Condition filters are never used: they are not atomic.
"""

from __future__ import annotations

from collections.abc import Sequence

from percolator.rowstore.port import TIME_UNIT, Change, Check, Selection, SetCell
from percolator.v1.bigtable_pb2 import BigtableMutation, BigtableRowFilter


def selecting(selections: Sequence[Selection]) -> BigtableRowFilter:
    """A filter that leaves what any of the selections names."""
    if len(selections) == 1:
        return _selecting_one(selections[0])
    result = BigtableRowFilter()
    result.interleave.filters.extend(map(_selecting_one, selections))
    return result


def checking(check: Check) -> BigtableRowFilter:
    """A filter that leaves a cell if more than `more_than` are found."""
    found = selecting(check.selections)
    if not check.more_than:
        return found
    result = BigtableRowFilter()
    result.chain.filters.append(found)
    result.chain.filters.add(cells_per_row_offset_filter=check.more_than)
    return result


def mutation(change: Change) -> BigtableMutation:
    result = BigtableMutation()
    if isinstance(change, SetCell):
        cell = result.set_cell
        cell.family_name, cell.column_qualifier = change.family, change.column
        cell.timestamp_micros, cell.value = change.time, change.value
    else:
        version = result.delete_from_column
        version.family_name, version.column_qualifier = change.family, change.column
        version.time_range.start_timestamp_micros = change.time
        version.time_range.end_timestamp_micros = change.time + TIME_UNIT
    return result


def _selecting_one(selection: Selection) -> BigtableRowFilter:
    columns = BigtableRowFilter()
    column_range = columns.column_range_filter
    column_range.family_name = selection.family
    if selection.first_column:
        column_range.start_qualifier_closed = selection.first_column
    if selection.end_column:
        column_range.end_qualifier_open = selection.end_column
    filters = [columns]
    if selection.from_time or selection.until_time:
        times = BigtableRowFilter()
        times.timestamp_range_filter.start_timestamp_micros = selection.from_time
        times.timestamp_range_filter.end_timestamp_micros = selection.until_time
        filters.append(times)
    if selection.first_value or selection.end_value:
        values = BigtableRowFilter()
        if selection.first_value:
            values.value_range_filter.start_value_closed = selection.first_value
        if selection.end_value:
            values.value_range_filter.end_value_open = selection.end_value
        filters.append(values)
    if selection.newest:
        filters.append(BigtableRowFilter(cells_per_column_limit_filter=1))
    if len(filters) == 1:
        return columns
    result = BigtableRowFilter()
    result.chain.filters.extend(filters)
    return result
