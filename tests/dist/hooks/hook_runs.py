"""Three steps with a user's functions on several meshes; run by every rank, with one process group for all.

`python hook_runs.py FOLDER MESH-KIND...` writes what rank 0 has gathered to FOLDER/<mesh>-<kind>.pt.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from mesh_runs import batches, build, gather_anything, policy_of, section_of, whole_tensors
from tiny import documents, pack

from stretto.config.sections.algorithm import PpoLoss
from stretto.config.sections.trainer import TrainerHooksSection, TrainerSection
from stretto.trainer.ranks.mesh import Mesh, find_degrees, num_ranks, process_group, training_device
from stretto.trainer.updates import Updates

MESHES: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "hsdp": {"dp_replicate": 2},
    "tp": {"tp": 2},
    "ulysses": {"cp": 2},
    "ring": {"cp": 2, "cp_style": "ring"},
}
HOOKS = {
    "loss": ("loss",),
    "data": ("init", "before_log_prob", "before_train_step", "advantages", "data_postprocess"),
    "losses": ("tis", "pg_loss_reducer"),
}
"""Functions that are named together, by kind."""
QUICK = {
    *((mesh, "loss") for mesh in MESHES),
    ("fsdp", "data"),
    ("fsdp", "losses"),
    ("ulysses", "data"),
    ("ring", "losses"),
}
"""What `make test` runs: every mesh, and every kind on a mesh that cuts the rows and on one that does not."""
seen: list[Any] = []


def init(args: Any) -> None:
    seen.append("init")


def before_log_prob(args: Any, model: Any, store_prefix: str) -> None:
    seen.append("log_prob" + store_prefix)


def before_train_step(args: Any, rollout_id: int, step_id: int, *others: Any) -> None:
    seen.append(f"step {rollout_id}.{step_id}")


def advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """How likely a token was, so that what is trained depends on the log-probabilities that a rank is given."""
    rollout_data["advantages"] = [1 + each for each in rollout_data["log_probs"]]
    seen.append(sorted(rollout_data["sample_ids"]))


def data_postprocess(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    for tokens, mask in zip(rollout_data["tokens"], rollout_data["loss_masks"]):
        if int(tokens[-1]) % 3 == 0:
            mask[-1] = 0


def tis(args: Any, *, pg_loss: Any, train_log_probs: Any, rollout_log_probs: Any, loss_masks: Any, **_: Any) -> Any:
    ratios = [(ours - theirs).exp().clamp(max=1.5) for ours, theirs in zip(train_log_probs, rollout_log_probs)]
    flat = torch.cat(ratios)
    return pg_loss * flat, loss_masks, {"tis": flat}


def pg_loss_reducer(total_lengths: Any, response_lengths: list[int], loss_masks: Any, per_token: bool) -> Any:
    def reduce(losses: torch.Tensor) -> Any:
        each = zip(losses.split(response_lengths), loss_masks)
        return sum(((part * mask).sum() / mask.sum().clamp(min=1)) ** 2 for part, mask in each)

    return reduce


def loss(args: Any, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Any) -> Any:
    """A clipped loss with a bonus for the entropy of whole distributions, from the logits."""
    found, entropies, start = [], [], 0
    columns = ("sample_ids", "unconcat_tokens", "total_lengths", "response_lengths", "temperatures", "advantages")
    for name, tokens, length, size, temperatures, own in zip(*map(batch.get, columns)):
        end = start + length
        places = slice(end - size - 1, end - 1)
        rows = (logits[0, places] / temperatures[:, None]).log_softmax(-1)
        found.append(rows.gather(1, tokens[-size:, None])[:, 0])
        entropies.append(-(rows.exp() * rows).sum(-1))
        seen.append((name, tokens.clone(), own.clone(), logits[0, places].detach().clone()))
        start = end
    mask = torch.cat(batch["loss_masks"])
    ratio = ((torch.cat(found) - torch.cat(batch["log_probs"])) * mask).exp()
    gain = torch.cat(batch["advantages"])
    losses = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain) - 0.1 * torch.cat(entropies)
    return sum_of_sample_mean(losses), {"ratio": sum_of_sample_mean(ratio.detach())}


def steps() -> list[list[Any]]:
    """Micro batches of every step; in the last one some ranks have none."""
    return [*batches("dense")[:2], [pack(documents(seed=9, num_groups=2, group_size=2))]]


def play(kind: str, model: dict[str, Any]) -> dict[str, Any]:
    """Metrics, what the functions of every rank saw, and the state at the end: weights and moments of gradients."""
    own = importlib.import_module("hook_runs")
    own.seen.clear()
    mesh = None
    if num_ranks() > 1:
        mesh = Mesh(
            find_degrees(section_of("dense", **model), num_ranks(), policy_of("dense").config), training_device()
        )
    learner = build("dense", model, mesh)
    learner._loss = PpoLoss(use_rollout_logprobs=False, reduction="sample")
    names = {name: f"hook_runs:{name}" for name in HOOKS[kind]}
    section = TrainerSection(loss=learner._loss, epochs_per_step=2, hooks=TrainerHooksSection(**names))
    updates = Updates(learner, section)
    updates._hooks.call("init")
    metrics = [updates.train(learner.mesh.local_items(each)) for each in steps()]
    return {"metrics": metrics, "seen": gather_anything(list(own.seen)), "tensors": whole_tensors(learner)}


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    with process_group(timeout_s=60.0):
        for name, model in MESHES.items():
            for kind in HOOKS:
                if f"{name}-{kind}" not in names:
                    continue
                played = play(kind, model)
                if torch.distributed.get_rank() == 0:
                    torch.save(played, folder / f"{name}-{kind}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
