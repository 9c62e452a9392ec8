"""The smallest config of a run that can be planned, and how tests of plans load it; plans of engines alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from stretto.base import ports
from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.config.sections.inference import InferenceSection
from stretto.launch.plan.engines import EnginesPlan, plan_engines

TOML = """
max_steps = 30
seq_len = 64
[model]
name = "models/tiny"
[orchestrator]
batch_size = 32
group_size = 8
[[orchestrator.env]]
id = "sort-letters"
"""


def isolate(monkeypatch: pytest.MonkeyPatch, num_gpus: int = 0) -> None:
    """A machine with so many GPUs, and without ports that other runs have claimed."""
    monkeypatch.setattr(ports, "SCOPE", os.urandom(8).hex())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus))))


def loader(folder: Path, monkeypatch: pytest.MonkeyPatch, toml: str, *, num_gpus: int) -> Callable[[str], RLConfig]:
    """Loads the config with further flags, in one text, on a machine with so many GPUs and no other runs."""
    isolate(monkeypatch, num_gpus)
    (folder / "rl.toml").write_text(toml)
    at = ["@", str(folder / "rl.toml"), "--output-dir", str(folder), "--dry-run"]
    return lambda words: load(RLConfig, [*at, *words.split()])


def config_builder(folder: Path) -> Callable[..., RLConfig]:
    """Loads TOML with more words of the command line."""
    (folder / "rl.toml").write_text(TOML)
    at = ["@", str(folder / "rl.toml"), "--output-dir", str(folder / "out")]
    return lambda *words: load(RLConfig, [*at, *words])


def planned_engines(data: dict, hosts: list[str], **kwargs) -> EnginesPlan:
    section = InferenceSection.model_validate({"model": "PrimeIntellect/INTELLECT-3", **data})
    return plan_engines(section, hosts, **kwargs)


def summary(plan: EnginesPlan) -> list[tuple]:
    """Name, node, port, tp, dp, GPUs of every engine's process."""
    return [
        (e.name, e.node, e.section.server.port, e.section.parallel.tp, e.section.parallel.dp, e.num_gpus)
        for e in plan.engines
    ]


def words_of_router(plan: EnginesPlan) -> str:
    [router] = plan.routers
    return " ".join(router.argv[2:])
