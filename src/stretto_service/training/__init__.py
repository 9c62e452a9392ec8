"""The training half of the hub: requests of runs, the order in which they are computed, and the files of runs."""
