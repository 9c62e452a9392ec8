"""Trains on pairs on several ranks: `pair_runs.py OUT CASE ...`; the results are in OUT/CASE.pt."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from cases.pairs import PAIR_LOSSES, build_pair_learner, random_pairs
from ranks import gather_anything

from stretto.config.sections.model import ModelSection
from stretto.trainer.ranks.mesh import Mesh, find_degrees, process_group, training_device
from stretto_preference.learner import reference_of
from stretto_preference.rows import pack_pairs

NUM_STEPS = 3
ROW_TOKENS = 64
MOE = {"family": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CASES = {
    "2-fsdp-dpo": {},
    "2-fsdp-reward": {},
    "2-fsdp-dpo-lora": {},
    "2-fsdp-reward-lora": {},
    "2-ulysses-dpo": {"cp": 2},
    "2-ring-reward": {"cp": 2, "cp_style": "ring"},
    "2-tp-dpo": {"tp": 2},
    "2-tp-reward-lora": {"tp": 2},
    "2-split-reward": {"tp": 2, "sequence_parallel": True},
    "2-ep-dpo-moe": {"ep": 2},
    "2-ep-reward-moe": {"ep": 2},
    "4-hsdp_tp-ipo": {"dp_replicate": 2, "tp": 2},
    "4-ulysses-reward": {"cp": 2},
    "4-ep_tp-reward-moe": {"ep": 2, "tp": 2},
    "4-fsdp-free": {},
}
"""By number of ranks, mesh, loss and kind of policy."""
QUICK = frozenset(
    """
    2-fsdp-dpo 2-fsdp-reward-lora 2-ring-reward 2-tp-dpo 2-split-reward 2-ep-dpo-moe 4-hsdp_tp-ipo 4-ep_tp-reward-moe
    """.split()  # noqa: SIM905
)
"""The cases of `make test`: every axis with one loss, and either loss; `make test-all` has the others too."""
assert CASES.keys() >= QUICK


def build(case: str, mesh: Mesh | None = None, model: dict | None = None):
    """The learner of a case, on one rank without a mesh."""
    _, _, loss, *kinds = case.split("-")
    shape = MOE if "moe" in kinds else {}
    return build_pair_learner(loss, lora="lora" in kinds, model=model, mesh=mesh, **shape)


def train(learner, case: str, folder: Path) -> dict:
    """Metrics of each step, what the pairs score before and after, and the whole trained weights."""
    loss = PAIR_LOSSES[case.split("-")[2]]
    pairs = random_pairs(is_scored=loss.type == "reward")
    everything = range(len(pairs))
    reference = None
    if learner.needs_reference:
        reference = reference_of(learner, pairs, everything, ROW_TOKENS, kept=folder / f"{case}.npz", start="it")
    rows = learner.mesh.local_items(pack_pairs(pairs, everything, ROW_TOKENS, reference))
    out = {"reference": reference, "before": learner.evaluate(rows), "metrics": []}
    for step in range(NUM_STEPS):
        chosen = np.random.default_rng(step).permutation(len(pairs))[:7].tolist()
        batch = learner.mesh.local_items(pack_pairs(pairs, chosen, ROW_TOKENS, reference))
        learner.forward_backward(batch)
        out["metrics"].append(learner.optim_step())
    out["after"] = learner.evaluate(rows)
    out["weights"] = {}
    for parts in gather_anything(learner.network.weights.slices()):
        for name, part in parts.items():
            out["weights"].setdefault(name, torch.zeros(part.shape))[part.region] = part.tensor
    return out


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    with process_group(timeout_s=60.0):
        for case in names:
            model = CASES[case]
            degrees = find_degrees(ModelSection(**model), int(case[0]), build(case).policy.config)
            mesh = Mesh(degrees, training_device())
            result = train(build(case, mesh, model), case, out)
            if mesh.is_lead:
                torch.save(result, out / f"{case}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
