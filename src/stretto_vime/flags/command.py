"""Turns a command line of vime into the config of `rl`, or raises one error that lists everything wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from stretto.base.errors import ConfigError, StrettoError, meant_path
from stretto.config.load import build, dump
from stretto.config.reading.draft import dotted_to_path
from stretto.config.root import RLConfig, SFTConfig
from stretto.config.section import KeyPath, nest
from stretto.data.records import read_records
from stretto_megatron.places import find_iteration, is_megatron
from stretto_vime.files.models import read_models
from stretto_vime.flags import fine_tuning
from stretto_vime.flags.clashes import clashes, notes
from stretto_vime.flags.flag import Setting, Values, attribute_of, listed
from stretto_vime.flags.groups import BY_NAME, PARTS
from stretto_vime.flags.groups.learning import resolve_teacher
from stretto_vime.flags.groups.rollout import argument_tables
from stretto_vime.flags.groups.training import quantization, starts_elsewhere, why_no_state
from stretto_vime.flags.groups.watching import OF_WANDB, environment
from stretto_vime.flags.names import FlagNames
from stretto_vime.flags.resolved import resolved
from stretto_vime.flags.shape import mismatches
from stretto_vime.flags.words import read

HIDDEN = {
    "dry_run", "print_config", "load", "save", "ref_load", "save_hf", "prompt_data", "eval_prompt_data", "vllm_config",
    "rollout_num_gpus", "rollout_num_gpus_per_engine", "prefill_num_servers", "custom_config_path",
    "megatron_config_path", "eval_config", *map(attribute_of, OF_WANDB),
}  # fmt: skip
"""Flags that name a place, are secret, or whose value the plan resolves; functions find the resolved value."""


Root = TypeVar("Root", RLConfig, SFTConfig)


class Command(NamedTuple):
    """What a command line means."""

    config: RLConfig | SFTConfig
    notes: list[str]
    """Flags that do nothing here, each with the reason."""
    names: FlagNames
    """How messages about the config name the flags."""
    environment: dict[str, str]
    """Variables for the run's processes."""
    conversions: dict[Path, Path]
    """Iterations of Megatron's checkpoints, and the Hugging Face directories to which they are converted first."""
    states: dict[Path, Path]
    """Iterations whose optimizer's state is written first as a run's checkpoint, and the directory of that run."""


def read_command(words: Sequence[str]) -> Command:
    """What a command line means.

    Raises: ConfigError listing every mistake.
    """
    flags, passed = read(words)
    flags.conversions, flags.states = {}, {}
    if fine_tuning.is_fine_tuning(flags):
        return _fine_tuning(flags)
    if flags.colocate:  # trainer and engines share their GPUs
        flags.rollout_num_gpus = flags.actor_num_nodes * flags.actor_num_gpus_per_node
    resolve_teacher(flags)
    if problems := [*_missing_files(flags), *clashes(flags), *mismatches(flags)]:
        raise ConfigError(listed(problems))
    _resolve(flags)
    settings, problems = [*_copied(flags), *passed], []
    for module in PARTS:
        try:
            settings += module.settings(flags)
        except ConfigError as error:
            problems.append(str(error))
    if problems:  # two parts may find the same problem
        raise ConfigError(listed([*dict.fromkeys(problems)]))
    cfg = _build(flags, settings, RLConfig)
    if (unseen := _unseen(flags, cfg)) and (places := argument_tables(flags)):
        further = flags.extra | unseen
        kept = [each for each in settings if each.path not in places]
        known = {each.path: each.value for each in settings if each.path in places}
        settings = [*kept, *(Setting(path, further | known.get(path, {}), tuple(flags.given)) for path in places)]
        cfg = _build(flags, settings, RLConfig)
    _check_new(flags, cfg)
    said = [*flags.overridden, *_starts(flags), *_unquantized(flags, cfg), *notes(flags)]
    return _command(cfg, said, flags, settings)


def _fine_tuning(flags: Values) -> Command:
    """What a command line with --loss-type sft_loss means.

    Raises: ConfigError listing what is missing or cannot be.
    """
    if problems := [*_missing_files(flags), *fine_tuning.problems(flags), *mismatches(flags)]:
        raise ConfigError(listed(problems))
    _resolve(flags)
    fine_tuning.resolve(flags)
    settings = fine_tuning.settings(flags, [*_copied(flags)])
    cfg = _build(flags, settings, SFTConfig)
    _check_new(flags, cfg)
    said = [*flags.overridden, *_starts(flags), *fine_tuning.notes(flags, settings)]
    return _command(cfg, said, flags, settings)


def _command(cfg: RLConfig | SFTConfig, said: list[str], flags: Values, settings: Sequence[Setting]) -> Command:
    said += (f"{place} is converted first, to {target}" for place, target in flags.conversions.items())
    said += (
        f"{place}: training begins with the moments of its optimizer, which are written to {run}; steps, data and the "
        "schedule of the learning rate begin at their start"
        for place, run in flags.states.items()
    )
    return Command(cfg, said, FlagNames(flags, settings), environment(flags), flags.conversions, flags.states)


def _missing_files(flags: Values) -> Iterator[str]:
    """A problem for a file of prompts that is not there; a data set of the Hub is looked for later."""
    path, _, _ = str(flags.prompt_data or "").partition("@[")
    file = Path(path).expanduser()
    if path.endswith((".jsonl", ".parquet")) and not file.exists():
        yield f"{flags.given['--prompt-data']}: no such file{meant_path(file)}"


def _check_new(flags: Values, cfg: RLConfig | SFTConfig) -> None:
    """Raises: ConfigError if --save has checkpoints: of Megatron's, or of a run that --load does not continue."""
    if cfg.print_config or (cfg.resume is not None and not flags.states):
        return
    step = cfg.run_dir.latest_complete_checkpoint()
    save = flags.given.get("--save", "--save (left out)")
    if not step and flags.save is not None and is_megatron(Path(flags.save)):
        raise ConfigError(f"{save}: checkpoints of Megatron's are there; give the run a directory of its own")
    if not step:
        return
    raise ConfigError(
        f"{save}: {cfg.run_dir} has a run with a checkpoint of step {step}; continue it with --load {cfg.run_dir}, or "
        "give another directory"
    )


def _unseen(flags: Values, cfg: RLConfig) -> dict[str, Any]:
    """Typed flags whose value functions would not find in `args`, because no key of the config holds it."""
    known = resolved(dump(cfg))
    typed = {BY_NAME[name].attribute for name in flags.given} - HIDDEN
    found = {name: getattr(flags, name) for name in sorted(typed)}
    return {name: value for name, value in found.items() if value != known.get(name)}


def _resolve(flags: Values) -> None:
    """Fill in what follows from several flags: the number of rollouts and of updates.

    Raises: ConfigError if the prompts of --num-epoch cannot be counted.
    """
    _resolve_models(flags)
    samples = flags.rollout_batch_size * flags.n_samples_per_prompt
    size = flags.global_batch_size or samples
    flags.num_updates = flags.num_steps_per_rollout or max(1, samples // size)
    if flags.num_rollout is None:
        flags.num_rollout = _count_rollouts(flags)


def _resolve_models(flags: Values) -> None:
    """Read --vllm-config; the flags about engines are then those of the updated model.

    Raises: ConfigError for models that do not take the GPUs of --rollout-num-gpus.
    """
    flags.models = []
    if flags.vllm_config is None:
        return
    where = flags.given["--vllm-config"]
    per_engine = flags.rollout_num_gpus_per_engine
    flags.models = read_models(flags.vllm_config, where, checkpoint=flags.hf_checkpoint, per_engine=per_engine)
    total = sum(group.num_gpus for model in flags.models for group in model.groups)
    if total != flags.rollout_num_gpus:
        given = flags.given["--rollout-num-gpus"]
        raise ConfigError(f"{where}: its groups take {total} GPUs, and {given} gives another number; make them equal")
    updated = next(model for model in flags.models if model.is_updated)
    flags.rollout_num_gpus = updated.num_gpus
    flags.rollout_num_gpus_per_engine = updated.engines[0].num_gpus_per_engine
    flags.prefill_num_servers = updated.count("prefill") or None


def _count_rollouts(flags: Values) -> int:
    try:
        prompts = sum(1 for _ in read_records(flags.prompt_data, "--prompt-data"))
    except StrettoError as error:
        raise ConfigError(f"{flags.given['--num-epoch']}: {error}") from None
    if prompts < flags.rollout_batch_size:
        data = flags.given["--prompt-data"]
        raise ConfigError(f"{flags.given['--rollout-batch-size']}: {data} has {prompts} prompts only; lower it")
    return prompts // flags.rollout_batch_size * flags.num_epoch


def _copied(flags: Values) -> Iterator[Setting]:
    """Settings of the flags that are copied to their keys: typed or vime's default, but no switches that are off."""
    for flag in BY_NAME.values():
        value = getattr(flags, flag.attribute)
        is_off = flag.kind == "switch" and not value
        if flag.is_copied and value is not None and not is_off:
            yield from (Setting(key, value, (flag.name,)) for key in flag.keys)


def _build(flags: Values, settings: Sequence[Setting], root: type[Root]) -> Root:
    values: dict[KeyPath, Any] = {}
    sources: dict[KeyPath, str] = {}
    for each in settings:
        path = dotted_to_path(each.path)
        values[path] = each.value
        typed = [name for name in each.flags if name in flags.given or name not in BY_NAME]
        sources[path] = ", ".join(flags.given.get(name, name) for name in typed)
    for name in ("dry_run", "print_config"):
        if getattr(flags, name):
            values[(name,)] = True
    names = FlagNames(flags, settings)
    return build(root, nest(_without_empty_tables(values)), sources=sources, verb="vime", reword=names.reword)


def _without_empty_tables(values: dict[KeyPath, Any]) -> dict[KeyPath, Any]:
    """The values without those that are an empty table, where another value lies in that table."""
    is_full = lambda path: any(len(other) > len(path) and other[: len(path)] == path for other in values)
    return {path: value for path, value in values.items() if not (value == {} and is_full(path))}


def _unquantized(flags: Values, cfg: RLConfig) -> Iterator[str]:
    """A note if engines do not compute with the type of the weights that --hf-checkpoint has."""
    method = quantization(flags)
    if method and cfg.model.name != flags.hf_checkpoint and cfg.inference is not None and method != "fp8":
        yield (
            f"{flags.given['--hf-checkpoint']}: its weights are quantized ({method}), and engines compute with those "
            "that are trained, which are not: updates can be sent in fp8 of 128 x 128 blocks only"
        )


def _starts(flags: Values) -> Iterator[str]:
    """A note that says where training starts, if --load names neither a run nor weights, or weights alone."""
    if flags.load is None:
        return
    if not starts_elsewhere(flags):
        path = Path(flags.load)
        if is_megatron(path) and (why := why_no_state(flags, find_iteration(path, flags.ckpt_step))):
            yield f"{flags.given['--load']}: the optimizer begins anew: {why}"
        return
    there = Path(flags.load)
    what = "no checkpoint is there" if there.is_dir() and any(there.iterdir()) else "nothing is there yet"
    start = flags.given.get("--ref-load", flags.given["--hf-checkpoint"])
    yield f"{flags.given['--load']}: {what}; training starts from {start}"
