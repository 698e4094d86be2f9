"""Who leads, who is alive, and what a leader has recorded, through one small interface.

Open `interface.py` first: it is what services build on. `candidacy.py` stands for a role, and leads
or stands by. There are two back ends: `directory.py` on the store root, with one directory for each
role, and `row_coordinator.py` in a row store, with one row for each; `own_process.py` is what they
do alike. Every back end has to pass tests/contracts/test_coordinator.py.

A value counts only when it is durable and its writer still led afterwards. Liveness is a hint here,
as everywhere: it never decides who may write.
"""
