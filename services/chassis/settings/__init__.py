"""Settings of a service: from its defaults, a file, the environment and the command line.

Open `service_settings.py` first: the settings that every service has, as a frozen pydantic model
that each service extends. `loading.py` reads the sources and names the origin of a bad value;
`environment.py` finds mistyped variables; `output.py` prints the result for `--print-config` and
`--help`.

Durations and sizes have their unit in the name. Every setting is checked before anything starts.
"""
