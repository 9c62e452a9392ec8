"""Whether the add-ons that a config needs are installed: asked before anything is planned or started.

What is an add-on's by what a model or data has (its family, pairs, a reward model) is asked where those are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stretto import addons
from stretto.config.root import RunRoot
from stretto.config.section import show
from stretto.config.sections.curriculum import POOLS
from stretto.config.sections.orchestrator import ADAPTIVE

SECTIONS = (
    ("slurm", "stretto.launchers", "slurm"),
    ("ray", "stretto.launchers", "ray"),
    ("service", "stretto.services", "client"),
    ("trainer.critic", "stretto.valuers", "critic"),
    ("orchestrator.steering", "stretto.orchestrator", "steering"),
    ("orchestrator.hooks", "stretto.hooks", "batches"),
    ("trainer.hooks", "stretto.hooks", "trainer"),
)
"""Path of a section that is an add-on's, the group of entry points that has it, and its name there."""


def check_add_ons(cfg: RunRoot) -> None:
    """Raises: ConfigError if a section, or a kind of one, needs an add-on that is not installed."""
    for group, name, needed_by in _needed_add_ons(cfg):
        addons.check(group, name, needed_by)


def _needed_add_ons(cfg: Any) -> Iterator[tuple[str, str, str]]:
    """Group and name of entry points that a config needs, and what needs them."""
    if type(cfg).__name__ == "SFTConfig":
        yield "stretto.config_verbs", "sft", "`sft`"
    is_run = type(cfg).__name__ == "RLConfig"
    trainer, orchestrator, at = (cfg.trainer, cfg.orchestrator, "trainer.") if is_run else (cfg, cfg, "")
    for path, group, name in SECTIONS:
        room, _, key = path.rpartition(".")
        holder = getattr(cfg, room) if is_run and room else cfg
        section = getattr(holder, key, None)
        if section is not None and section != type(holder).model_fields[key].default:
            yield group, name, f"[{path if is_run else key}]"
    if (broadcast := getattr(cfg, "weight_broadcast", None)) is not None:
        if broadcast.type not in ("shm", "filesystem"):
            yield "stretto.weights", broadcast.type, f'weight_broadcast.type = "{broadcast.type}"'
        if broadcast.delta is not None:
            yield "stretto.weights", "delta", "[weight_broadcast.delta]"
    for path, holder in ((at, trainer), (f"{at}critic.", getattr(trainer, "critic", None))):
        optim = getattr(holder, "optim", None)
        if optim is not None and optim.type not in ("adamw", "sgd"):
            yield "stretto.optimizers", optim.type, f'{path}optim.type = "{optim.type}"'
    if (backend := getattr(trainer, "backend", "fsdp")) != "fsdp":
        yield "stretto.networks", backend, f'{at}backend = "{backend}"'
    for name in addons.registered("stretto.networks"):
        if getattr(trainer, name, None) is not None:
            yield "stretto.networks", name, f"[{at}{name}]"
    if getattr(orchestrator, "has_pools", False):
        yield "stretto.orchestrator", "curriculum", POOLS
    if getattr(getattr(orchestrator, "concurrency", None), "type", None) == "adaptive":
        yield "stretto.orchestrator", "concurrency", ADAPTIVE
    if beside := getattr(cfg, "beside", ""):
        yield "stretto.beside", "run", beside
    yield from _needed_engines(cfg)


def _needed_engines(cfg: Any) -> Iterator[tuple[str, str, str]]:
    """The same of engines that are named, or that alone have a key that is set."""
    parts = {f"{key}.": getattr(cfg, key, None) for key in ("inference", "teacher_inference")}
    parts |= {f"models.{name}.": each for name, each in getattr(cfg, "models", {}).items() if each.base_url is None}
    for path, section in {"": cfg, **parts}.items():
        choose = getattr(section, "chosen_engine", None)
        if choose is not None and (engine := choose(has_gpu=False)) != "embedded":
            only = {"engine": engine} if section.engine == engine else section.vllm_only()
            key, value = next(iter(only.items()))
            yield "stretto.engines", engine, f"{path}{key} = {show(value)}"
