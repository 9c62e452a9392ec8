"""Checks the config against the model's config.json before anything starts: mesh degrees, and unused keys.

Nothing is checked if the model is not there yet: a warm-up may still make it, or it is downloaded first.
"""

from __future__ import annotations

from pathlib import Path

from stretto.base.errors import ConfigError
from stretto.config.rules.mesh_degrees import (
    SPARSE_FAMILIES,
    Shape,
    find_degrees,
    find_plain_degrees,
    read_shape,
)
from stretto.config.sections.model import ModelSection


def check_model(
    model: ModelSection, num_ranks: int, path: str, *, has_replay: bool = False, engine: str | None = None
) -> None:
    """Check parallel degrees and model options against the model; path names its section in messages.

    engine: `inference.engine` of a run that starts engines.

    Raises: ConfigError naming the key, the value and what this model allows.
    """
    directory = Path(model.name).expanduser()
    if model.scratch is not None or not (directory / "config.json").is_file():
        return
    try:
        shape = read_shape(directory)
    except (OSError, ValueError, KeyError):
        return  # the process that loads it says what is wrong with it
    if model.impl == "hf":
        shape = None
    try:
        if shape is None:
            find_plain_degrees(model, num_ranks)
        else:
            find_degrees(model, num_ranks, shape)
    except ConfigError as error:
        raise ConfigError(f"{model.name}: {str(error).replace('[model]', f'[{path}]')}") from None
    if engine == "embedded" and shape is not None and shape.family in SPARSE_FAMILIES:
        raise ConfigError(
            f'{model.name}: [inference] engine = "embedded" keeps no index of the keys that {shape.family} chooses '
            'from; set engine = "vllm"'
        )
    for key, why in _unused_keys(model, shape, has_replay=has_replay):
        raise ConfigError(f"{model.name}: {key.format(path=path)} {why}; leave it out")


def _unused_keys(model: ModelSection, shape: Shape | None, *, has_replay: bool) -> list[tuple[str, str]]:
    """Keys that would have no effect on this model, and why."""
    found = []
    if shape is None:
        why = "has no effect: transformers computes this model family, not our own modules"
        if not model.moe_use_grouped_mm:
            found.append(("[{path}] moe_use_grouped_mm = false", why))
        if model.ep_comm_backend != "torch":
            found.append((f'[{{path}}] ep_comm_backend = "{model.ep_comm_backend}"', why))
        if model.fp8:
            found.append(("[{path}] fp8 = true", why))
        if has_replay:
            found.append(("[trainer] enable_router_replay = true", why))
    elif not shape.num_experts:
        why = "has no effect: it is for mixtures of experts, and this model has no experts"
        if model.ep_comm_backend != "torch":
            found.append((f'[{{path}}] ep_comm_backend = "{model.ep_comm_backend}"', why))
        if has_replay:
            found.append(("[trainer] enable_router_replay = true", why))
    return found
