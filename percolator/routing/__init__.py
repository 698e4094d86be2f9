"""The way from a cell to the server that has it: finds tablets, batches calls, and sends again.

Open `cells.py` first: the requests and results that the protocol speaks in. `router.py` looks each
row up in the map of tablets, and sends again what was definitely not executed. `lanes.py` turns
what is pending into calls, and responses into results. `together.py` sends groups of mutations, and
`rolling_forward.py` orders to roll locks forward.

`catalog.py` asks the masters about tables, and remembers the answers. `range_scan.py` and
`tablet_walk.py` go from tablet to tablet; `change_scan.py` reads changes in the order of their
commits. `ranges.py` divides tables among parallel readers, and `contents.py` lists what is stored:
both are ports, of which tablets are one engine.

A mutation that may have been executed is never sent again here: only the protocol knows what
repeating it means. No rule of transactions belongs in this package.
"""
