"""vime's command line: its flags, and the config of `rl` that they mean.

groups/ has the table of flags. words.py reads a command line, clashes.py says which values contradict each other,
shape.py compares the model's shape, command.py makes a config of it all, names.py puts messages about keys into flags,
pages.py writes `--help` and the page of all flags.
Nothing here starts anything.
"""
