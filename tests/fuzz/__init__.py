"""`make fuzz`: hostile input, given to real processes and to the code that reads files.

Open `run.py` first: a cluster of processes with TLS, whose methods are all called (`calls.py`)
while a canary's transactions go on (`scene.py`). `methods.py` lists the methods from the
descriptors, `valid_requests.py` has a valid request for each, and `messages.py` changes it.
`findings.py` judges answers, memory and logs. `targets.py` and `export_directories.py` damage what
is read from files. `guided.py` runs targets and `judging.py` with coverage guidance.

A finding is fixed at its cause, with a test of its own. An input that was found is never excused
here without a reason beside it.
"""
