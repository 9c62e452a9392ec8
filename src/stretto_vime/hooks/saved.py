"""Rollouts in files, one per batch: written by a run, and given back by a rollout function to train on.

A file is JSON: `{"rollout_id": 0, "samples": [...]}`, each sample as `Sample.to_dict` has it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError, EnvError
from stretto.base.files import write_atomic
from stretto.vime.sample import Sample
from stretto_vime.hooks.outputs import RolloutFnTrainOutput

FUNCTION = "stretto_vime.hooks.saved:generate_rollout"
"""The rollout function that reads them; `args.load_debug_rollout_data` is the path."""
NUMBER = "{rollout_id}"


def path_of(pattern: str, rollout_id: int) -> Path:
    """The file of a batch, from 0."""
    return Path(pattern.replace(NUMBER, str(rollout_id))).expanduser()


def save(pattern: str, rollout_id: int, samples: Sequence[Sample]) -> None:
    """Write the samples of a batch."""
    path = path_of(pattern, rollout_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"rollout_id": rollout_id, "samples": [sample.to_dict() for sample in samples]})
    write_atomic(path, text.encode())


def load(pattern: str, rollout_id: int) -> list[Sample]:
    """The samples of a batch.

    Raises: ConfigError if there is no such file, or it is none of ours.
    """
    path = path_of(pattern, rollout_id)
    try:
        entries = json.loads(path.read_bytes())["samples"]
        return [Sample.from_dict(each) for each in entries]
    except OSError as cause:
        raise ConfigError(
            f"load_debug_rollout_data: {path}: {cause.strerror}; a file is needed for each of num_rollout"
        ) from None
    except (ValueError, KeyError, TypeError) as cause:
        raise ConfigError(f"load_debug_rollout_data: {path} holds no saved rollouts: {cause}") from None


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """The saved groups of a batch, as the trainer got them; `load_debug_rollout_data_subsample` is a share of them.

    Raises: EnvError for evals, which have no engines.
    """
    if evaluation:
        raise EnvError("there are no engines to evaluate with; leave the evals out")
    groups: dict[Any, dict[Any, list[Sample]]] = {}
    for sample in load(args.load_debug_rollout_data, rollout_id):
        group, episode = sample.group_index, sample.rollout_id
        sample.group_index = None  # a number of the run that saved it
        groups.setdefault(group, {}).setdefault(episode, []).append(sample)
    found = [list(members.values()) for members in groups.values()]
    share = getattr(args, "load_debug_rollout_data_subsample", None)
    if share is not None:
        found = found[: max(1, round(len(found) * share))]
    return RolloutFnTrainOutput(samples=found)
