"""What a run, the hub of a service and its trainer send each other: both ends of every wire in one file."""
