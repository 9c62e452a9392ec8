"""What a checkpoint says of itself, read without torch: before anything starts, and by each rank that loads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError, DataError
from stretto.base.paths import RunDir
from stretto.base.rundir import check_max_steps, find_checkpoint, recovery_advice
from stretto.check.models import find_model
from stretto.config.root import RLConfig, SFTConfig
from stretto.config.sections.model import LoRASection, ModelSection
from stretto.families.table import FAMILIES

SCHEMA = 2
VALUES = "state.json"
"""The file of a part that has its plain values, and the size of every other file."""
TRAINER, CRITIC = "trainer", "critic"
"""The parts of a checkpoint, each a directory; only a critic on ranks of its own has one."""
_OF_MODEL = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "n_routed_experts", "num_experts", "num_local_experts",
)  # fmt: skip
_OF_SCRATCH = (
    "family", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "tie_word_embeddings", "phrases",
)  # fmt: skip
_OF_EXPERTS = ("num_experts", "moe_intermediate_size", "has_expert_bias")
"""Keys that decide which weights a model has: of a config.json, of [model.scratch], and of that for experts."""
OWN_KEYS = "resume with the run's own [model] and [optim]"


def check_resumed(cfg: RLConfig | SFTConfig) -> None:
    """Check that the run can go on from the checkpoint that [resume] names, as far as its plain files tell.

    Raises: ConfigError or DataError for one that is damaged, of another kind of run, model, optimizer, adapter or
    critic, or of a step after max_steps.
    """
    if cfg.resume is None or (isinstance(cfg, RLConfig) and cfg.service is not None):  # a service has its state
        return
    run, step = find_checkpoint(cfg.run_dir, cfg.resume.step, cfg.resume.dir)
    if not cfg.resume.skip_progress:
        check_max_steps(cfg.max_steps, step)
    directory, advice = run.checkpoint(step) / TRAINER, recovery_advice(run, step)
    values = read_values(directory, advice)
    check_sizes(directory, values, advice)
    critic = directory.with_name(CRITIC)
    if critic.is_dir():
        check_sizes(critic, read_values(critic, advice), advice)
    if isinstance(cfg, RLConfig):
        _check_kind(run, step, "rl", is_own="data" not in values["cursor"])
        section = cfg.trainer.critic
        _check_values(values, directory, cfg, cfg.trainer.optim.type)
        has_critic = critic.is_dir() or values.get("has_critic")
        if section is None and has_critic:
            raise DataError(f"{directory}: the state has a critic, but there is no [trainer.critic]; {OWN_KEYS}")
        if section is not None and has_critic is False:
            raise DataError(f"{directory}: the state has no critic, but there is a [trainer.critic]; {OWN_KEYS}")
    else:
        _check_kind(run, step, "sft", is_own="data" in values["cursor"])
        _check_values(values, directory, cfg, cfg.optim.type)


def _check_kind(run: RunDir, step: int, verb: str, *, is_own: bool) -> None:
    if not is_own:
        other = "sft" if verb == "rl" else "rl"
        raise ConfigError(
            f"resume: {run.checkpoint(step)} is of a run of `{other}`, whose optimizer learned another loss; start "
            f'from its weights instead, model.name = "{run.weights_step(step)}", under another run.name'
        )


def _check_values(values: dict[str, Any], directory: Path, cfg: RLConfig | SFTConfig, optim: str) -> None:
    """Raises: DataError for the state of another optimizer or adapter."""
    if cfg.ckpt is None or not cfg.ckpt.skip_optimizer:
        check_has_optimizer(values, directory)
        if values["optim"] != optim:
            text = f"state of optimizer {values['optim']!r}, but [optim] type = {optim!r}"
            raise DataError(f"{directory}: {text}; {OWN_KEYS}")
    _check_network(values.get("network", {}), directory, cfg.model)
    _check_adapter(values, directory, cfg.model.lora)


def network_of(model: ModelSection, found: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a model that decide which weights it has, by key.

    found: its config.json, which one that is made from scratch does not need.
    """
    if (scratch := model.scratch) is None:
        numbers = {**found, **(found.get("text_config") or {}), "model_type": found.get("model_type")}
        return {key: numbers[key] for key in ("model_type", *_OF_MODEL) if numbers.get(key) is not None}
    has_experts = FAMILIES[scratch.family].scratch(scratch).get("moe") is not None
    keys = (*_OF_SCRATCH, *_OF_EXPERTS) if has_experts else _OF_SCRATCH
    return scratch.model_dump(mode="json", include=set(keys))


def _check_network(saved: Mapping[str, Any], directory: Path, model: ModelSection) -> None:
    """Raises: DataError for the state of another model. saved: what `network_of` said, empty if it was not asked."""
    here = None if model.scratch is not None or not saved else find_model(model.name)
    if not saved or (here is None and model.scratch is None):
        return
    mine = network_of(model, {} if here is None else here.found)
    for key in saved:
        if key in mine and mine[key] != saved[key]:
            where = f"{model.name}" if model.scratch is None else "[model.scratch]"
            raise DataError(
                f"{directory}: state of a model with {key} = {saved[key]!r:.60}, but {where} has {mine[key]!r:.60}; "
                f"{OWN_KEYS}"
            )


def _check_adapter(values: dict[str, Any], directory: Path, lora: LoRASection | None) -> None:
    """Raises: DataError for the state of another adapter."""
    scaling, adapter = values.get("adapter_scaling", ...), values.get("adapter")  # older checkpoints lack the keys
    if lora is None and scaling not in (None, ...):
        raise DataError(f"{directory}: state of an adapter, but there is no [model.lora]; {OWN_KEYS}")
    if lora is not None and scaling is None:
        raise DataError(f"{directory}: state without an adapter, but there is a [model.lora]; {OWN_KEYS}")
    if lora is None:
        return
    if adapter is not None and adapter["rank"] != lora.rank:
        text = f"state of an adapter of rank {adapter['rank']}, but [model.lora] has rank = {lora.rank}"
        raise DataError(f"{directory}: {text}; {OWN_KEYS}")
    if scaling is not ... and scaling != lora.alpha / lora.rank:
        raise DataError(
            f"{directory}: state of an adapter with alpha / rank = {scaling:g}, but [model.lora] has "
            f"{lora.alpha / lora.rank:g}; {OWN_KEYS}"
        )
    if adapter is None:
        return
    missing = sorted(set(adapter["layers"]) - set(lora.target_modules))
    more = sorted(set(adapter["bare"]) & set(lora.target_modules))
    if missing or more:
        fault = f"names {', '.join(more)} too" if more else f"lacks {', '.join(missing)}"
        text = f"state of an adapter of {', '.join(adapter['layers'])}, but [model.lora] target_modules {fault}"
        raise DataError(f"{directory}: {text}; {OWN_KEYS}")


def check_has_optimizer(values: dict[str, Any], directory: Path) -> None:
    """Raises: DataError if the state was written without an optimizer's."""
    if values["optim"] is None:
        raise DataError(
            f"{directory} was written without the optimizer's state; resume with ckpt.skip_optimizer = true, which "
            "begins with a new optimizer"
        )


def read_values(directory: Path, advice: str) -> dict[str, Any]:
    """The plain values of one part of a checkpoint.

    advice: what the user can do if it is damaged.

    Raises: DataError if they cannot be read, or another version of stretto wrote them.
    """
    path = directory / VALUES
    try:
        values = json.loads(path.read_text())
        schema, sizes, _ = values["schema"], values["num_bytes"], values["cursor"]
        if not isinstance(sizes, dict):
            raise TypeError("num_bytes is not an object")
    except (OSError, ValueError, KeyError, TypeError) as cause:
        text = f"{path}: cannot be read ({type(cause).__name__}: {cause}); {advice}"
        raise DataError(text) from cause
    if schema != SCHEMA:
        text = f"schema {schema}, this version of stretto reads {SCHEMA}"
        raise DataError(f"{path}: {text}; {advice}")
    return values


def check_sizes(directory: Path, values: dict[str, Any], advice: str) -> None:
    """Raises: DataError if a file of the part has another size than was recorded."""
    for name, size in values["num_bytes"].items():
        path = directory / name
        num_bytes = path.stat().st_size if path.is_file() else 0
        if num_bytes != size:
            raise DataError(f"{path}: has {num_bytes} of {size} bytes, it was cut off; {advice}")
