"""`make fuzz`: hostile input, given to real processes and to the code that reads files.

Open `run.py` first: a cluster of processes with TLS, whose methods are all called (`calls.py`)
while a canary lives in it (`canary.py`). `methods.py` lists the methods from the descriptors,
`valid_requests.py` has a valid request for each, and `messages.py` changes it. `answers.py` judges
each answer, and `processes.py` memory, logs, and calls that never end. `export_directories.py`,
`settings_files.py`, `observer_modules.py` and `certificate_files.py` damage files. `guided.py` runs
`decoding.py`, `judging.py` and `on_rows.py` with coverage guidance.

A finding is mended at its cause, with a test of its own. An input that was found is never excused
here without a reason beside it.
"""
