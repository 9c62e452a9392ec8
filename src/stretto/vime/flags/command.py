"""A command line of vime's -> the config of `rl`, or one error that lists everything wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError, StrettoError
from stretto.config.load import build, dotted_to_path
from stretto.config.root import RLConfig
from stretto.config.section import Path as KeyPath
from stretto.config.section import nest
from stretto.data.records import read_records
from stretto.vime.flags.clashes import clashes, notes
from stretto.vime.flags.flag import Setting, Values, listed
from stretto.vime.flags.shape import mismatches
from stretto.vime.flags.table import BY_NAME, PARTS
from stretto.vime.flags.words import read


def read_command(words: Sequence[str]) -> tuple[RLConfig, list[str]]:
    """The config that the flags mean, and notes on flags that do nothing here.

    Raises: ConfigError listing every mistake.
    """
    flags, passed = read(words)
    if problems := [*clashes(flags), *mismatches(flags)]:
        raise ConfigError(listed(problems))
    _resolve(flags)
    settings, problems = [*_copied(flags), *passed], []
    for module in PARTS:
        try:
            settings += module.settings(flags)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(listed(problems))
    return _build(flags, settings), [*_starts(flags), *notes(flags)]


def _resolve(flags: Values) -> None:
    """Fill in what follows from several flags: the number of rollouts and of updates.

    Raises: ConfigError if the prompts of --num-epoch cannot be counted.
    """
    samples = flags.rollout_batch_size * flags.n_samples_per_prompt
    size = flags.global_batch_size or samples
    flags.num_updates = flags.num_steps_per_rollout or max(1, samples // size)
    if flags.num_rollout is None:
        flags.num_rollout = _count_rollouts(flags)


def _count_rollouts(flags: Values) -> int:
    try:
        prompts = sum(1 for _ in read_records(flags.prompt_data, "--prompt-data"))
    except StrettoError as error:
        raise ConfigError(f"{flags.given['--num-epoch']}: {error}") from None
    if prompts < flags.rollout_batch_size:
        raise ConfigError(
            f"{flags.given['--rollout-batch-size']}: {flags.given['--prompt-data']} has {prompts} prompts only; "
            f"lower it"
        )
    return prompts // flags.rollout_batch_size * flags.num_epoch


def _copied(flags: Values) -> Iterator[Setting]:
    """Settings of flags whose value goes to a key as it is: those given, and vime's defaults where it has one."""
    for flag in BY_NAME.values():
        value = getattr(flags, flag.attribute)
        is_off = flag.kind == "switch" and not value
        if flag.is_copied and value is not None and not is_off:
            yield from (Setting(key, value, (flag.name,)) for key in flag.keys)


def _build(flags: Values, settings: Sequence[Setting]) -> RLConfig:
    values: dict[KeyPath, Any] = {}
    sources: dict[KeyPath, str] = {}
    for each in settings:
        path = dotted_to_path(each.path)
        values[path] = each.value
        sources[path] = ", ".join(
            flags.given.get(name, name) for name in each.flags if _is_typed(flags, name)
        )
    for name in ("dry_run", "print_config"):
        if getattr(flags, name):
            values[(name,)] = True
    return build(RLConfig, nest(_from_above(values)), sources=sources, verb="vime")


def _is_typed(flags: Values, name: str) -> bool:
    return name in flags.given or name not in BY_NAME


def _from_above(values: dict[KeyPath, Any]) -> dict[KeyPath, Any]:
    """The values, tables before what is in them; an empty table that has values is left out."""
    is_full = lambda path: any(len(other) > len(path) and other[: len(path)] == path for other in values)
    return {path: value for path, value in values.items() if not (value == {} and is_full(path))}


def _starts(flags: Values) -> Iterator[str]:
    """Where training starts, if --load names nothing."""
    load = flags.load
    if load is None or (Path(load).is_dir() and any(Path(load).iterdir())):
        return
    start = flags.given.get("--ref-load", flags.given["--hf-checkpoint"])
    yield f"{flags.given['--load']}: nothing is there yet; training starts from {start}"
