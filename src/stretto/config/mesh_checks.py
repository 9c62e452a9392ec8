"""Rules of the training mesh that a config shows by itself; the rest needs the model, and is trainer/mesh.py's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.config.shared import Problem

if TYPE_CHECKING:
    from stretto.config.roots import RLConfig


def check_mesh(cfg: RLConfig) -> list[Problem]:
    """Degrees of [trainer.model] against the ranks."""
    model, workers = cfg.trainer.model, cfg.orchestrator.num_train_workers
    path, problems = "trainer.model", []
    if workers % model.dp_replicate:
        valid = _listed(workers)
        rule = (
            f"does not divide orchestrator.num_train_workers = {workers} data-parallel ranks; valid: {valid}"
        )
        paths = (f"{path}.dp_replicate", "orchestrator.num_train_workers")
        problems.append(Problem(paths, f"{paths[0]} = {model.dp_replicate} {rule}"))
    for key in ("tp", "cp", "ep"):
        if model.impl == "hf" and (value := getattr(model, key)) not in (1, "auto"):
            paths = (f"{path}.impl", f"{path}.{key}")
            rule = f"is of modules of our own; models of transformers' are sharded only, so leave {key} out"
            problems.append(Problem(paths, f'{paths[1]} = {value} with {paths[0]} = "hf": {key} {rule}'))
    return problems


def _listed(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
