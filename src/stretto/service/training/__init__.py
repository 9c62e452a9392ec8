"""The trainer's side of the hub: requests of runs, whose turn it is, and what a run leaves on disk."""
