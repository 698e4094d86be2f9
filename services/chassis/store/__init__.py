"""The store root: files, and directories that have one owner at a time.

Open `files.py` first: the few operations on files that services use, so that tests can replace
them. `real_files.py` runs them in `disk_threads.py`, where a store that hangs stops no event loop.
`file_systems.py` refuses stores on networks, by what `mounts.py` finds; `store_watch.py` ends a
process whose store is gone.

`epoch_directory.py` takes a directory over from its former owner by renaming, which is the fence
that keeps two owners apart; `epoch_names.py` lists the names, and `shared_look.py` answers many who
ask who owns a directory with one look. `cluster_identity.py` keeps a process from serving the store
of another cluster.

No clock decides ownership, and nothing here trusts a name before its directory is synced.
"""
