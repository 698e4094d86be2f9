"""`make demo`: the paper's index of web pages on a cluster of processes, some of which are killed.

__main__.py   options, starting and stopping
story.py      what happens, one chapter after another
outages.py    what is killed, and when everything works again
gauges.py     keeps asking the cluster for its state, and fills in ...
state.py      ... the state to show
view.py       shows the state on a terminal, and as a line of text
screen.py     prints what happens, and shows the view in between
checking.py   checks that the right pages are served
queries.py    example queries of the result
"""
