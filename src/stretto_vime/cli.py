"""The verb `vime`, which is `rl` with the flags of vime."""

from __future__ import annotations

import os
import sys
from functools import partial

from stretto import verbs
from stretto.base.errors import ConfigError
from stretto.cli import run_command


def vime(words: list[str]) -> int:
    """Run the command; the exit status."""
    if (word := verbs.word_after_help(words)) is not None:
        from stretto_vime.flags.pages import help_text

        print(help_text(word), end="")
        return 0
    from stretto_vime.flags.command import read_command

    cfg, notes, names, environment = read_command(words)
    os.environ.update(environment)
    if cfg.print_config:
        return verbs.print_config(cfg)
    for note in notes:
        sys.stderr.write(f"note: {note}\n")
    try:
        return verbs.show_dry_run("rl", cfg) if cfg.dry_run else verbs.run_rl(cfg, words)
    except ConfigError as error:
        raise ConfigError(names.reword(str(error))) from error


def completions() -> list[str]:
    """The flags that act, with the values that they take."""
    from stretto_vime.flags.groups import BY_NAME

    return [" ".join([name, *map(str, flag.choices)]) for name, flag in BY_NAME.items() if flag.state != "refused"]


main = partial(run_command, "vime")
