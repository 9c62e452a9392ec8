"""Options of vllm-router: `--router-...` after `rl` and `inference`, and [inference.router] extra.

`router.json` lists the long options of the supported router; `python -m stretto_routers.flags` writes it for the
installed one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from stretto.config.flags import Flag, Program, Table, option_of, table_text
from stretto.config.spelling import Spelling

PREFIX = "--router-"
RESERVED = {
    "--host": "the router listens where engines do, inference.server.host",
    "--port": "the key is inference.deployment.router_port",
    "--worker-urls": "engines come from inference.deployment",
    "--prefill": 'engines come from inference.deployment with type = "disaggregated"',
    "--decode": 'engines come from inference.deployment with type = "disaggregated"',
    "--vllm-pd-disaggregation": 'the key is inference.deployment.type = "disaggregated"',
    "--kv-connector": "caches travel by NIXL",
    "--api-key": "it would be readable in the run's files; the key is inference.api_key",
    "--policy": "the key is inference.router.policy",
}
ROUTER = Program("vllm-router", Path(__file__).with_name("router.json"), RESERVED)


def arguments(name: str, value: Any, where: str) -> list[str]:
    """The words that set an option of the router.

    Raises: ConfigError for an option that is unknown or reserved, and for a value that it cannot take.
    """
    ROUTER.refuse_reserved(name, where)
    return ROUTER.arguments(name, value, where)


def rewrite_router_flags(words: Sequence[str], section: str) -> list[str]:
    """Rewrite `--router-NAME VALUE` among the words as `--<section>router.extra.NAME VALUE`.

    section: "" or "inference.". Raises: ConfigError for an option the router does not have.
    """
    done: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        option, equals, value = word.partition("=")
        name = option.removeprefix(PREFIX).replace("_", "-")
        if not option.startswith(PREFIX):
            done.append(word)
        elif name in ("type", "policy", "address", "interpreter", "extra"):
            done += [f"--{section}router.{name}", *([value] if equals else [])]
        else:
            # The router has options that begin like the prefix, such as `--router-temperature`.
            is_short = option_of(name) not in ROUTER.by_name and f"--router-{name}" in ROUTER.by_name
            name = f"router-{name}" if is_short else name
            ROUTER.refuse_reserved(name, option)
            given = ROUTER.parse_value(ROUTER.find(name, option), word, queue)
            done += [f"--{section}router.extra.{name.replace('-', '_')}", msgspec.json.encode(given).decode()]
    return done


def _words_of(verb: str, words: list[str]) -> list[str]:
    section = {"rl": "inference.", "inference": ""}.get(verb)
    return words if section is None else rewrite_router_flags(words, section)


SPELLING = Spelling((), words=_words_of)


def read_installed() -> Table:
    """The options of the vllm-router that is installed here."""
    import argparse
    from importlib.metadata import version

    from vllm_router.router_args import RouterArgs

    parser = argparse.ArgumentParser(add_help=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    flags = []
    kinds: dict[Any, str] = {int: "integer", float: "number"}
    for action in parser._actions:
        takes = "nothing" if action.nargs == 0 else "values" if action.nargs in ("+", "*") else "value"
        kind = kinds.get(action.type, "text")
        flags += [Flag(name, takes, kind=kind) for name in action.option_strings if name.startswith("--")]
    return Table(version("vllm-router"), tuple(sorted(flags, key=lambda flag: flag.name)))


if __name__ == "__main__":
    sys.stdout.write(table_text(read_installed()))
