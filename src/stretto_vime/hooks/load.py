"""The functions of both [hooks] and of `dataset`: what each gets, how they are loaded, and tried out before a start."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator, Mapping

from stretto.base.errors import ConfigError
from stretto.config.sections.hooks import ENVIRONMENTS, HooksSection
from stretto.config.sections.trainer import TrainerHooksSection
from stretto.vime.calls import Hook
from stretto_vime.hooks.saved import load as load_saved

TRAINER_HOOKS = {
    "model": 2,
    "init": 1,
    "before_log_prob": 3,
    "before_train_step": 6,
    "advantages": 2,
    "data_postprocess": 3,
    "tis": 1,
    "loss": 4,
    "pg_loss_reducer": 4,
    "post_write": 3,
}
"""Number of arguments of each function in [trainer.hooks]; none is awaited."""
BATCH_HOOKS = {
    "dynamic_sampling_filter": 2,
    "buffer_filter": 4,
    "sample_filter": 2,
    "reward_post_process": 2,
    "convert_samples_to_train_data": 2,
    "all_samples_process": 3,
    "rollout_log": 5,
    "eval_log": 4,
    "rollout_function": 3,
    "eval_function": 3,
}
"""Number of arguments of each function in [orchestrator.hooks]."""
DATASET_HOOKS = {"data_source": 1, "generate": 3, "sample_hooks": 2}
"""Number of arguments of each function of the environment `dataset`, rewards aside."""
BY_NAME: dict[str, tuple[str, ...]] = {
    "tis": (
        "pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths",
    ),
    "sample_hooks": ("rollout_id", "evaluation"),
}  # fmt: skip
"""Arguments that a function gets by name."""
FORMS = {
    "model": "; write `def provider(args, build)` and return what build() gives, with parts changed",
    "generate": "; write `async def generate(args, sample, sampling_params)` and return the sample",
}
"""How a function is written, for messages about other arguments."""
_NOT_LOADED = "not loaded: "
"""Begins the message of `python -m stretto_vime.hooks.load` for a function that cannot be loaded."""


def load_batch_hook(key: str, path: str) -> Hook:
    """The function of a key of [orchestrator.hooks]. Raises: ConfigError as `Hook.load`."""
    is_awaited = key != "dynamic_sampling_filter"
    return Hook.load(path, f"orchestrator.hooks.{key}", BATCH_HOOKS[key], is_awaited=is_awaited)


def load_dataset_hook(key: str, path: str) -> Hook:
    """A function of the environment `dataset`. Raises: ConfigError as `Hook.load`."""
    named, form = BY_NAME.get(key, ()), FORMS.get(key, "")
    return Hook.load(path, f"dataset: {key}", DATASET_HOOKS[key], named=named, form=form)


def load_trainer_hooks(paths: Mapping[str, str]) -> dict[str, Hook]:
    """The functions of [trainer.hooks], by their keys. Raises: ConfigError as `Hook.load`."""
    return {key: _load_trainer_hook(key, path) for key, path in paths.items()}


def _load_trainer_hook(key: str, path: str) -> Hook:
    named, form = BY_NAME.get(key, ()), FORMS.get(key, "")
    hook = Hook.load(path, f"trainer.hooks.{key}", TRAINER_HOOKS[key], named=named, is_awaited=False, form=form)
    if key == "model" and "pre_process" in inspect.signature(hook.function).parameters:
        raise ConfigError(f"{hook.where} builds a module of Megatron-LM's, which is not used{form}")
    return hook


def named_in(section: TrainerHooksSection) -> dict[str, str]:
    """The paths of the functions that [trainer.hooks] names, by their keys."""
    return {key: path for key in TRAINER_HOOKS if (path := getattr(section, key)) is not None}


# -- before a start --


def check_batch_hooks(section: HooksSection) -> Iterator[tuple[str, str]]:
    """Import the functions of [orchestrator.hooks], and read the first of the saved rollouts that are trained on.

    What is yielded are the words of `check.code.Checked`. Raises: ConfigError for what is not there, or does not fit.
    """
    for key in BATCH_HOOKS:
        if (path := getattr(section, key)) is not None and path != ENVIRONMENTS:
            load_batch_hook(key, path)
            yield "imported", path
    if (pattern := section.args.get("load_debug_rollout_data")) is not None:
        load_saved(pattern, 0)
        yield "read", str(pattern)


def check_trainer_hooks(section: TrainerHooksSection) -> Iterator[tuple[str, str]]:
    """Import the functions of [trainer.hooks]. Raises: ConfigError."""
    paths = named_in(section)
    load_trainer_hooks(paths)
    yield from (("imported", path) for path in paths.values())


def check_in_process(section: TrainerHooksSection, env: Mapping[str, str]) -> None:
    """Load the functions of [trainer.hooks] in another process, because they may import torch.

    env: the environment variables of that process.

    Raises: ConfigError as `Hook.load`, also if the import ends the process.
    """
    paths = named_in(section)
    words = [sys.executable, "-m", "stretto_vime.hooks.load", *(f"{key}={path}" for key, path in paths.items())]
    done = subprocess.run(words, env=dict(env), stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        return
    *before, last = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    if last.startswith(_NOT_LOADED):
        raise ConfigError(last.removeprefix(_NOT_LOADED))
    text = "\n".join([*before, last])
    raise ConfigError(f"trainer.hooks: importing {', '.join(paths.values())} ended its process: {text}")


if __name__ == "__main__":  # python -m stretto_vime.hooks.load KEY=PATH ...
    try:
        load_trainer_hooks(dict(word.split("=", 1) for word in sys.argv[1:]))
    except ConfigError as error:
        sys.exit(f"{_NOT_LOADED}{error}")
