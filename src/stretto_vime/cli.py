"""The verb `vime`, which is `rl` with the flags of vime."""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from stretto import addons, verbs
from stretto.base.errors import ConfigError, DataError
from stretto.base.paths import RunDir
from stretto.check.add_ons import check_add_ons
from stretto.cli import run_command
from stretto.config.load import shown_text
from stretto.config.root import RLConfig, SFTConfig

NEEDED = (("stretto.engines", "vllm"), ("stretto.routers", "vllm"), ("stretto.networks", "megatron"))
"""What add-ons have whose flags and checkpoints this command reads."""


def vime(words: list[str]) -> int:
    """Run the command; the exit status."""
    for group, name in NEEDED:
        addons.check(group, name, "`stretto vime`")
    if (word := verbs.word_after_help(words)) is not None:
        from stretto_vime.flags.pages import help_text

        print(help_text(word), end="")
        return 0
    from stretto_vime.flags.command import read_command

    cfg, notes, names, environment, conversions, states = read_command(words)
    os.environ.update(environment)
    if cfg.print_config:
        return verbs.print_config(cfg)
    for note in notes:
        sys.stderr.write(f"note: {note}\n")
    model = Path(cfg.tokenizer.name or cfg.model.name)
    if conversions:
        _convert(conversions, model, is_dry_run=cfg.dry_run)
    for place, run in states.items():
        _write_state(place, run, model, is_dry_run=cfg.dry_run)
    try:
        check_add_ons(cfg)
        if cfg.dry_run:
            return verbs.show_dry_run("rl" if isinstance(cfg, RLConfig) else "sft", cfg)
        return verbs.run_rl(cfg, words) if isinstance(cfg, RLConfig) else _fine_tune(cfg)
    except ConfigError as error:
        raise ConfigError(names.reword(str(error))) from error


def _fine_tune(cfg: SFTConfig) -> int:
    """Run `sft` with this config, whose ranks read it from a file."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(shown_text(cfg))
        file.flush()
        return verbs.run_config_verb("sft", ["@", file.name], "vime")


def _convert(conversions: Mapping[Path, Path], model: Path, *, is_dry_run: bool) -> None:
    """Convert checkpoints of Megatron's; a dry run only looks whether they have what the model needs.

    A dry run with nothing but config.json is about a model that is elsewhere, and says what does not fit it.

    Raises: ConfigError if one does not.
    """
    from stretto.check.weights import has_only_config
    from stretto_megatron.convert import check_megatron, to_hugging_face

    for place, target in conversions.items():
        try:
            if is_dry_run:
                check_megatron(place, model)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                with (target.parent / ".lock").open("w") as lock:  # another run may convert it at this moment
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    if not (target / "config.json").exists():
                        to_hugging_face(place, model, target)
        except (DataError, OSError) as error:
            what = f"{place} cannot be converted to {target}: {error}"
            if not is_dry_run or not has_only_config(model):
                raise ConfigError(what) from None
            sys.stderr.write(f"note: the run would end at its start: {what}\n")


def _write_state(place: Path, run: Path, model: Path, *, is_dry_run: bool) -> None:
    """Write what Megatron's optimizer has saved as a run's checkpoint; a dry run only looks whether it fits the model.

    Raises: ConfigError if it does not.
    """
    from stretto_megatron.moments import check_state, write_state

    try:
        if is_dry_run:
            check_state(place, model)
            return
        run.parent.mkdir(parents=True, exist_ok=True)
        with (run.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not RunDir(run).complete_checkpoints():
                write_state(place, model, RunDir(run))
    except (DataError, OSError) as error:
        raise ConfigError(f"{place}: its optimizer's state cannot be loaded: {error}; give --no-load-optim") from None


def completions() -> list[str]:
    """Its help, and the flags that act with the values that they take."""
    from stretto_vime.flags.groups import BY_NAME

    flags = [" ".join([name, *map(str, flag.choices)]) for name, flag in BY_NAME.items() if flag.state != "refused"]
    return ["--help", *flags]


main = partial(run_command, "vime")
