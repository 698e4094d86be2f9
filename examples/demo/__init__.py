"""`make demo`: the paper's index of web pages on a cluster of processes, one of which is killed.

__main__.py   options, starting and stopping
story.py      what happens, one chapter after another
gauges.py     asks the cluster how it is, again and again, and fills in ...
state.py      ... what is shown
view.py       how that looks on a terminal, and as a line of text
screen.py     says what happens, and shows the view between
checking.py   whether what is served is what has to be
queries.py    what can be asked of the result
"""
