"""The Python interface: verbs from a script, and what a run has left behind as rows."""
