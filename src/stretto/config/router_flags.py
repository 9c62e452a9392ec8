"""vllm-router's command line as data: `--router-...` after `rl` and `inference`, and [inference.router] extra.

`router_flags.json` lists the long options of the supported router; `python -m stretto.config.router_flags` makes it
from the one that is installed.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from stretto.base.errors import ConfigError
from stretto.config.vllm_flags import Flag, number

TABLE = Path(__file__).with_name("router_flags.json")
PREFIX = "--router-"
OURS = {
    "host": "the router listens where engines do, inference.server.host",
    "port": "the key is inference.deployment.router_port",
    "worker-urls": "engines come from inference.deployment",
    "prefill": 'engines come from inference.deployment with type = "disaggregated"',
    "decode": 'engines come from inference.deployment with type = "disaggregated"',
    "vllm-pd-disaggregation": 'the key is inference.deployment.type = "disaggregated"',
    "kv-connector": "caches travel by NIXL",
    "policy": "the key is inference.router.policy",
}
"""Options of the router that are not to be passed on, and why."""


class Table(msgspec.Struct, frozen=True):
    """All long options of one version of the router."""

    version: str
    flags: tuple[Flag, ...]


@cache
def _by_name() -> dict[str, Flag]:
    return {flag.name.removeprefix("--"): flag for flag in load_table().flags}


@cache
def load_table() -> Table:
    return msgspec.json.decode(TABLE.read_bytes(), type=Table)


def option_of(name: str, where: str) -> Flag:
    """The router's option of this name, with dashes or underscores.

    Raises: ConfigError naming the nearest one, or why it is not the user's to set.
    """
    name = name.replace("_", "-")
    if name in OURS:
        raise ConfigError(f"{where} is not yours to set: {OURS[name]}")
    if (flag := _by_name().get(name)) is not None:
        return flag
    nearest = difflib.get_close_matches(name, _by_name(), n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0].replace('-', '_')}?" if nearest else ""
    raise ConfigError(f"{where}: vllm-router {load_table().version} has no such option{hint}")


def arguments(name: str, value: Any, where: str) -> list[str]:
    """The words that set an option of the router's.

    Raises: ConfigError for an unknown one, and for a switch that is given a value or a value that is missing.
    """
    flag = option_of(name, where)
    if flag.takes == "nothing":
        if not isinstance(value, bool):
            raise ConfigError(f"{where} is a switch and takes true or false, not {value!r}")
        return [flag.name] if value else []
    if isinstance(value, bool):
        raise ConfigError(f"{where} takes a value, not {str(value).lower()}")
    many = value if isinstance(value, list | tuple) else [value]
    return [flag.name, *map(str, many)]


def take_router_flags(words: Sequence[str], section: str) -> list[str]:
    """`--router-cb-failure-threshold 3` as a word of ours: `--<section>router.extra.cb_failure_threshold 3`.

    section: "" or "inference.". Raises: ConfigError for an option the router does not have.
    """
    done: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        option, equals, value = word.partition("=")
        if not option.startswith(PREFIX):
            done.append(word)
            continue
        name = option.removeprefix(PREFIX).replace("_", "-")
        if name in ("policy", "address", "extra"):
            done += [f"--{section}router.{name}", *([value] if equals else [])]
            continue
        # `--router-temperature` of the router's own begins so too.
        name = name if name in _by_name() or f"router-{name}" not in _by_name() else f"router-{name}"
        flag = option_of(name, option)
        values = [value] if equals else []
        most = {"nothing": 0, "value": 1}.get(flag.takes, len(queue))
        while len(values) < most and queue and not queue[0].startswith(("--", "@")):
            values.append(queue.pop(0))
        if bool(values) == (flag.takes == "nothing"):
            raise ConfigError(
                f"{option}: {'takes no value' if values else 'the router takes a value; give one'}"
            )
        key = flag.name.removeprefix("--").replace("-", "_")
        found = [number(v) for v in values]
        given = True if flag.takes == "nothing" else found if flag.takes == "values" else found[0]
        done += [f"--{section}router.extra.{key}", msgspec.json.encode(given).decode()]
    return done


def read_installed() -> Table:
    """The options of the vllm-router that is installed here."""
    import argparse
    from importlib.metadata import version

    from vllm_router.router_args import RouterArgs

    parser = argparse.ArgumentParser(add_help=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    flags = []
    for action in parser._actions:
        takes = "nothing" if action.nargs == 0 else "values" if action.nargs in ("+", "*") else "value"
        flags += [Flag(name, takes) for name in action.option_strings if name.startswith("--")]
    return Table(version("vllm-router"), tuple(sorted(flags, key=lambda flag: flag.name)))


if __name__ == "__main__":
    print(msgspec.json.format(msgspec.json.encode(read_installed()), indent=1).decode())
