"""Where the search for a planted bug begins, for bugs that only few seeds show.

Each is a seed that showed its bug when it was noted here. A change of the product may move what a
seed shows. Then the search goes on with the seeds after it, as far as a search from 0 would, and
costs only time: note the seed that `make planted-bugs` prints instead.
"""

from __future__ import annotations

FIRST_SEEDS = {
    "a former owner says that a table has no feed": 27,
    "a hidden version taken for none": 136,
    "baton taken by one that came later": 50,
    "change ends what is remembered only when its writer hears of it": 27,
    "deletions in loaded rows are collected": 14,
    "epoch from before the timestamps": 2,
    "executed counts as not sent": 28,
    "intent cleared by the marker of another start": 110,
    "intent cleared while its cell is locked": 2,
    "intent cleared without a trace": 35,
    "intents that were not answered taken for written": 2,
    "look under way joined": 43,
    "marker not checked": 333,
    "marker put over a lock": 1,
    "one refusal for all joined steps": 48,
    "oracle begins before the epoch of the store": 87500865,
    "oracle on rows answers without a look": 311,
    "prewrite passes newer lock only commits": 173,
    "prewrite passes the note": 19,
    "refusal answered before its batch is durable": 42,
    "refusal speaks for an unanswered message": 457,
    "rows that were not answered are taken for loaded": 20,
    "scans of changes do not wait": 14,
    "shared reads as of whoever leads": 136,
    "shown before it is durable": 123,
    "stalled look answered without the store": 13,
    "tablets are opened before all know that the load is complete": 142,
    "tablets roll forward what has lost its lock": 30,
    "timestamp fetched before the cells are held": 16,
    "unknown run taken for committed": 11,
    "values are collected before the safe point has seen their end": 6,
    "write after a delete handled with it": 70,
    "write latch does not wait for held cells": 99,
}
