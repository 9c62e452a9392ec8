"""The whole table: every flag by group, and by name.

Each module here has the flags of some groups (`FLAGS`) and, if several flags decide a setting, `settings`.
"""

from __future__ import annotations

from stretto_vime.flags.flag import Flag
from stretto_vime.flags.groups import cluster, evals, learning, megatron, rollout, serving, training, watching

PARTS = (cluster, megatron, training, rollout, evals, learning, serving, watching)
"""Modules with flags, in the order of the groups."""

OURS = (
    Flag("--dry-run", "switch", False, "Check flags, code and data, show what would run; start nothing.", "acts",
         ("dry_run",)),
    Flag("--print-config", "switch", False, "Print the same run as TOML for `rl @ FILE`; start nothing.", "acts",
         ("print_config",)),
)  # fmt: skip
GROUPS: dict[str, tuple[Flag, ...]] = {"stretto's own": OURS}
for _part in PARTS:
    GROUPS |= _part.FLAGS
BY_NAME: dict[str, Flag] = {flag.name: flag for flags in GROUPS.values() for flag in flags}
