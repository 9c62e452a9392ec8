"""Checks the code and the data that a config names: imports functions, and reads the first record of each file.

Only what the config names is imported. orchestrator/dry_run.py makes the first tasks of it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

from stretto import addons
from stretto.base.errors import ConfigError
from stretto.base.foreign import load_function, load_object
from stretto.config.root import RLConfig
from stretto.config.sections.orchestrator import EnvSection, OrchestratorKeys
from stretto.config.sections.trainer import TrainerHooksSection
from stretto.data.records import read_records
from stretto.envs import find
from stretto.envs.base import needs_worker
from stretto.envs.checks import missing_for
from stretto.envs.rewards.builtin import scored_by
from stretto.vime.calls import REWARD_FORM, Hook

HOOKS = "stretto.hooks"
"""The group of add-ons whose "check" imports functions."""
Checked = tuple[str, str]
"""What was done (`imported` or `read`), and the name of the function or file."""


def check_user_code(cfg: OrchestratorKeys) -> list[Checked]:
    """Import the functions and read a record of each file that the section names.

    Raises: ConfigError or DataError for a path without an object, and for a file that cannot be read.
    """
    return list(_check_user_code(cfg))


def _check_user_code(cfg: OrchestratorKeys) -> Iterator[Checked]:
    if not cfg.hooks.is_empty:
        yield from addons.load(HOOKS, "check", "[orchestrator.hooks]").check_batch_hooks(cfg.hooks)
    held_out = cfg.eval.env if cfg.eval is not None else ()
    named: list[tuple[str, EnvSection]]
    named = [(f"orchestrator.env.{index}", env) for index, env in enumerate(cfg.env)]
    named += [(f"orchestrator.eval.env.{index}", env) for index, env in enumerate(held_out)]
    for place, env in named:
        yield from _check_environment(place, env)
        yield from _check_algo(getattr(env, "algo", None), f"{place}.algo.import_path")
    yield from _check_algo(cfg.algo, "orchestrator.algo.import_path")


def check_code(cfg: RLConfig) -> None:
    """Load the functions of [trainer.hooks], and look for the packages that environments name, where `rl` is given.

    On Slurm, whose nodes may have other packages, a missing one is a warning; with [ray] all is on other machines.

    Raises: ConfigError for a function that does not exist, or takes other arguments, and for a package that is missing.
    """
    if not (cfg.trainer.hooks.is_empty or cfg.slurm or cfg.ray):
        env = os.environ | cfg.env_vars | cfg.trainer.env_vars
        addons.load(HOOKS, "check", "[trainer.hooks]").check_in_process(cfg.trainer.hooks, env)
    try:
        if cfg.ray is None:
            check_plugins(cfg.orchestrator)
    except ConfigError as error:
        if cfg.slurm is None and cfg.deployment.type == "single_node":
            raise
        sys.stdout.write(f"warning: {error}\n")


def check_plugins(cfg: OrchestratorKeys) -> None:
    """Check that what environments of hubs and of verifiers need is there, before anything is started.

    Raises: ConfigError that names the environment, the key and the package.
    """
    for env in (*cfg.env, *(cfg.eval.env if cfg.eval is not None else ())):
        for text in missing_for(env.id, env.args):
            raise ConfigError(f"environment {env.name or env.id}: {text}")


def check_trainer_hooks(hooks: TrainerHooksSection) -> list[Checked]:
    """Import the functions of [trainer.hooks].

    Raises: ConfigError for one that does not exist, or takes other arguments.
    """
    return [] if hooks.is_empty else [*addons.load(HOOKS, "check", "[trainer.hooks]").check_trainer_hooks(hooks)]


def _check_algo(algo: Any, setting: str) -> Iterator[Checked]:
    if getattr(algo, "import_path", None) is not None:
        load_function(algo.import_path, algo.kwargs, setting)
        yield "imported", algo.import_path


def _check_environment(place: str, env: EnvSection) -> Iterator[Checked]:
    """Import an environment's class, or read the files and import the functions of a dataset."""
    if env.id == "dataset":
        yield from _check_dataset(env.args)
    elif ":" in env.id and not needs_worker(env.id):
        find.check_hub_name(env.id)
        load_object(env.id, f"{place}.id")
        yield "imported", env.id


def _check_dataset(args: dict[str, Any]) -> Iterator[Checked]:
    for key in ("path", "eval_path"):
        sources, convert = args.get(key) or [], args.get("convert")
        for source in [sources] if isinstance(sources, str) else sources:
            records = read_records(
                source,
                f"dataset: {key}",
                is_streamed=args.get("streaming") is True,
                convert=convert if isinstance(convert, str) else None,
            )
            next(records)
            yield "read", source
    for key in ("data_source", "reward", "generate"):
        path = args.get(key)
        if not isinstance(path, str) or not {":", "."} & set(path) or (key == "reward" and scored_by(path) is not None):
            continue
        if key == "reward":
            Hook.load(path, "dataset: reward", 2, form=REWARD_FORM)
        else:
            addons.load(HOOKS, "check", f"dataset: {key}").load_dataset_hook(key, path)
        yield "imported", path
