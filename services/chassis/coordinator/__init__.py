"""Who leads, who is alive, and what a leader has recorded, through one small interface.

Open `interface.py` first: it is what services build on. `candidacy.py` stands for a role, and leads
or stands by. `directory.py` is the back end on the store root, with one directory for each role.
Every back end has to pass tests/contracts/test_coordinator.py.

A value counts only when it is durable and its writer's directory still existed afterwards. Liveness
is a hint here, as everywhere: it never decides who may write.
"""
