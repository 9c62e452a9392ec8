"""--megatron-config-path: what differs for actor and critic.

    megatron:
      - {name: default, role: actor, overrides: {lr: 1e-6}}
      - {name: default, role: critic, overrides: {lr: 1e-5, load: /models/critic}}

An override is the flag of its name, for one role; it is checked like one that was typed.
"""

from __future__ import annotations

from typing import Any

from stretto.base.errors import ConfigError
from stretto_vime.files.read import check_keys, entries, read_yaml, typed

ROLES = ("actor", "critic")
PLACED = ("num_nodes", "num_gpus_per_node")
CRITIC = {
    "lr": "critic_lr",
    "load": "critic_load",
    "save": "critic_save",
    "lr_warmup_iters": "critic_lr_warmup_iters",
    "value_clip": "value_clip",
}
"""Overrides of the critic that are flags of their own."""
OF_CRITIC = "critic:"
"""Before the attribute of a flag that the file sets for the critic alone."""


def read_roles(path: str, where: str) -> dict[str, Any]:
    """Values of flags by attribute, out of the overrides of both roles; for the critic alone behind OF_CRITIC.

    Raises: ConfigError for the first thing that is wrong.
    """
    values: dict[str, Any] = {}
    seen: set[str] = set()
    for number, entry in enumerate(entries(read_yaml(path, where), "megatron", where)):
        at = f"{where}: megatron[{number}]"
        check_keys(entry, ("name", "role", "overrides", "args"), at)
        role = typed(entry, "role", str, at)
        if not typed(entry, "name", str, at) or role not in ROLES:
            raise ConfigError(f"{at}: name and role (actor or critic) are needed")
        if role in seen:
            raise ConfigError(f"{at}: there are two entries for the {role}; put their overrides into one")
        seen.add(role)
        if "overrides" in entry and "args" in entry:
            raise ConfigError(f"{at}: overrides and args are two words for the same; use overrides")
        given = typed(entry, "overrides" if "overrides" in entry else "args", dict, at) or {}
        for key, value in given.items():
            values[_flag(str(key).replace("-", "_"), role, at)] = value
    return values


def _flag(key: str, role: str, at: str) -> str:
    if key in PLACED:
        raise ConfigError(f"{at}: {key} is a flag: --{role}-{key.replace('_', '-')}; move it to the command line")
    if role == "actor":
        return key
    return CRITIC.get(key, OF_CRITIC + key)
