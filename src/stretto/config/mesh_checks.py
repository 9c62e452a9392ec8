"""Rules of the training mesh that a config shows by itself; the rest needs the model, and is trainer/mesh.py's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.config.shared import Problem

if TYPE_CHECKING:
    from stretto.config.roots import RLConfig


def check_mesh(cfg: RLConfig) -> list[Problem]:
    """Degrees of [trainer.model] against the ranks."""
    model, workers = cfg.trainer.model, cfg.orchestrator.num_train_workers
    ranks, path, problems = cfg.num_train_ranks, "trainer.model", []
    if workers % model.dp_replicate:
        valid = _listed(workers)
        rule = (
            f"does not divide orchestrator.num_train_workers = {workers} data-parallel ranks; valid: {valid}"
        )
        paths = (f"{path}.dp_replicate", "orchestrator.num_train_workers")
        problems.append(Problem(paths, f"{paths[0]} = {model.dp_replicate} {rule}"))
    if model.impl == "hf" and ranks > 1:
        paths = (f"{path}.impl", "orchestrator.num_train_workers")
        rule = 'trains on one rank, and there are {}; use impl = "custom", or one rank with cp = tp = 1'
        problems.append(Problem(paths, f'{paths[0]} = "hf" {rule.format(ranks)}'))
    return problems


def _listed(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
