"""`stretto completion SHELL`: a script that completes verbs, keys, values and files.

The script contains a table of all keys, generated from the config classes when it is printed; pressing Tab starts no
Python. A key is completed part by part, as directories are: `--trainer.` before `--trainer.optim.`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from stretto.config.section import Key, Section, all_paths, tag_of

SHELLS = ("bash", "zsh", "fish")


def completion_script(
    shell: str, roots: Mapping[str, type[Section]], verbs: Sequence[str], plain: Mapping[str, Sequence[str]]
) -> str:
    """The script for one of SHELLS: its file in shells/, with the tables filled in.

    roots: the root of every verb that has a configuration; verbs: all of them; plain: flags of the verbs without a
    configuration, whose other words are files and directories.
    """
    text = Path(__file__).with_name(f"completion.{shell}").read_text(encoding="utf-8")
    tables = "\n".join(_table(shell, verb, flags_of(cls)) for verb, cls in roots.items())
    tables += "\n" + "\n".join(_table(shell, verb, flags) for verb, flags in plain.items())
    return text.replace("@PLAIN@", " ".join(plain)).replace("@TABLES@", tables).replace("@VERBS@", " ".join(verbs))


def _table(shell: str, verb: str, flags: Sequence[str]) -> str:
    """A variable that holds one line per key; in fish a list with one item per key."""
    if shell == "fish":
        return f"set -g __stretto_{verb} " + " ".join(f"'{flag}'" for flag in flags)
    return "__stretto_{}='{}'".format(verb, "\n".join(flags))


def flags_of(cls: type[Section]) -> list[str]:
    """`--key value value ...` for every key of a root, and for its help; values only if there are few."""
    values: dict[str, dict[str, None]] = {"--help": {"all": None}}
    for path, section, key in all_paths(cls):
        flag = path.replace("_", "-")
        if key.item_sections or (key.sections and not key.is_nullable):
            continue  # completed by the keys in it
        known = values.setdefault(f"--{flag}", {})
        known.update(dict.fromkeys(_values(key, section)))
        if key.is_bool:
            values.setdefault(f"--no-{flag}", {})
    return [" ".join([flag, *known]) for flag, known in values.items()]


def _values(key: Key, section: type[Section]) -> Iterable[str]:
    if key.name == "type" and (tag := tag_of(section)) is not None:
        return [tag]
    choices = [str(choice) for choice in key.choices]
    return choices + ["true", "false"] * key.is_bool + ["None"] * (key.is_nullable and bool(choices))
