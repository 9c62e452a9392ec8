"""Tenants of a tiny backbone, and the same runs alone with [model.lora]: what tests of the training service share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter
from tiny import build_policy, documents, pack

from stretto.config.sections.algorithm import Loss
from stretto.config.sections.model import LoRASection, ModelSection
from stretto.config.sections.trainer import Optim, Scheduler
from stretto.models.hub import DTYPES
from stretto.records.sample import MicroBatch
from stretto.trainer.learner import Learner
from stretto.trainer.ranks.mesh import Mesh
from stretto_service.tenants.tenants import Tenants
from stretto_service.wires.operations import CreateTenant, OptimStep, Pass, TenantSpec, TenantWork

MOE = {"family": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
KINDS = {"dense": SHAPE, "moe": SHAPE | MOE}
MODEL = ModelSection(dtype="float32", optimization_dtype="float32")
NUM_STEPS = 3


@dataclass(frozen=True)
class Case:
    """A run: its spec and its loss."""

    spec: TenantSpec
    loss: dict


def cases(num: int = 8) -> list[Case]:
    """Runs of different ranks, targets, optimizers, learning rates, schedules and losses."""
    attention, mlp = (("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj", "experts"))
    targets = (None, attention, mlp, ("q_proj", "experts", "down_proj"), None, ("v_proj", *mlp), None, attention)
    losses = (
        {"type": "default"}, {"type": "ppo"}, {"type": "reinforce"}, {"type": "cispo"}, {"type": "ipo"},
        {"type": "gspo"}, {"type": "default", "reduction": "sample"}, {"type": "default", "entropy_coef": 0.01},
    )  # fmt: skip
    optims = ({"type": "adamw", "eps": 1e-4}, {"type": "sgd", "momentum": 0.9})
    schedules = ({"type": "constant", "warmup_steps": 0}, {"type": "cosine", "warmup_steps": 2, "min_lr": 1e-4})
    return [
        Case(
            TenantSpec(
                name=f"run-{i}",
                rank=(4, 8, 2, 3, 16, 1, 8, 5)[i],
                alpha=float(8 + i),
                target_modules=targets[i],
                seed=i,
                optim=optims[i % 2] | {"lr": 1e-3 * (i + 1)},
                scheduler=schedules[i // 4],
                max_steps=10,
            ),
            losses[i],
        )
        for i in range(num)
    ]


def batch_of(case: Case, step: int, num_ranks: int = 1) -> list[list[MicroBatch]]:
    """By rank: the micro batches of a run's step; their number and lengths differ between runs."""
    number = int(case.spec.name.partition("-")[2])
    seeds = [1000 * number + 10 * step + k for k in range(4)]
    rows = [pack(documents(seed, num_groups=1 + number % 3, group_size=2 + seed % 3)) for seed in seeds]
    return [rows[rank::num_ranks] for rank in range(num_ranks)]


def build_tenants(kind: str, mesh: Mesh | None = None, model: ModelSection = MODEL, **settings) -> Tenants:
    policy = build_policy(**KINDS[kind]).to(DTYPES[model.dtype])
    return Tenants(policy, model=model.model_copy(update={"ep": 1}), mesh=mesh, **settings)


def create(tenants: Tenants, some: list[Case], **how) -> None:
    for case in some:
        done = tenants.execute(CreateTenant(number=1, spec=case.spec, **how)).results[case.spec.name]
        assert done.error is None, done.error


def train(
    tenants: Tenants, some: list[Case], steps=range(NUM_STEPS), *, max_tokens=None, rank=0, num_ranks=1
) -> list[dict]:
    """Train all runs, each step of all in one operation; the metrics of each step by run."""
    metrics = []
    for step in steps:
        works = tuple(
            TenantWork(
                tenant=case.spec.name, micro_batches=tuple(batch_of(case, step, num_ranks)[rank]), loss=case.loss
            )
            for case in some
        )
        done = tenants.execute(Pass(number=1, works=works, max_tokens=max_tokens))
        assert all(result.error is None for result in done.results.values()), done
        found = {}
        for case in some:
            name = case.spec.name
            result = tenants.execute(OptimStep(number=1, tenant=name)).results[name]
            assert result.error is None, result.error
            found[name] = result.metrics
        metrics.append(found)
    return metrics


def weights_of(tenants: Tenants, name: str) -> dict[str, torch.Tensor]:
    weights = tenants[name].weights
    return {n: p.detach().clone() for n, p in zip(weights.names, weights.parameters)}


def build_alone(case: Case, kind: str, model: ModelSection = MODEL) -> Learner:
    """The same run alone, as `rl` with [model.lora] trains it."""
    spec = case.spec
    more = {} if spec.target_modules is None else {"target_modules": spec.target_modules}
    lora = LoRASection(rank=spec.rank, alpha=spec.alpha, dropout=spec.dropout, **more)
    torch.manual_seed(spec.seed)
    policy = build_policy(**KINDS[kind]).to(DTYPES[model.dtype])
    torch.manual_seed(spec.seed)
    return Learner(
        policy,
        model=model.model_copy(update={"lora": lora}),
        optim=TypeAdapter(Optim).validate_python(spec.optim),
        scheduler=TypeAdapter(Scheduler).validate_python(spec.scheduler),
        max_steps=spec.max_steps,
        loss=TypeAdapter(Loss).validate_python(case.loss),
    )


def train_alone(learner: Learner, case: Case, steps=range(NUM_STEPS)) -> list[dict]:
    metrics = []
    for step in steps:
        learner.forward_backward(batch_of(case, step)[0])
        metrics.append(learner.optim_step())
    return metrics


def weights_alone(learner: Learner) -> dict[str, torch.Tensor]:
    weights = learner.network.weights
    return {name: p.detach().clone() for name, p in zip(weights.names, weights.parameters)}


def save(result: dict, path: Path) -> None:
    torch.save(result, path)


def assert_equal(found: dict, wanted: dict) -> None:
    """Bit for bit."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), (name, (found[name] - tensor).abs().max())


def assert_close(found: dict, wanted: dict, tolerance: float = 1e-6) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        error = float((found[name] - tensor).abs().max())
        assert error <= tolerance, (name, error)
        assert np.isfinite(error)
