"""vime's command line: its flags, and the config of `rl` that they mean.

Each module but the last four is a part of the table: the flags of some groups (`FLAGS`), and the settings that follow
from several of them (`settings`). table.py joins the parts. words.py reads a command line, clashes.py says which values
contradict each other, shape.py compares the model's shape, command.py makes a config of it all, pages.py writes
`--help` and docs/vime.md. Nothing here starts anything.
"""
