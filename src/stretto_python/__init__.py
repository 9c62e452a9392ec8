"""The Python interface: verbs from a script or notebook, with its objects, and a run as rows.

`import stretto` offers what the group `stretto.names` says: `stretto.rl`, `sft`, `evaluate`, `Run`, `compare`, `plot`.
"""
