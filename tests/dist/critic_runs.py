"""Loads a critic from a model directory and trains it with a policy; run by every rank.

`python critic_runs.py FOLDER`: models are in FOLDER/<kind>, results are written to FOLDER/<kind>.pt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from mesh_runs import optim_of, policy_of, section_of, train

from stretto.config.sections.trainer import ConstantScheduler, CriticSection
from stretto.trainer.learner import Learner
from stretto.trainer.ranks.mesh import Mesh, find_degrees, num_ranks, process_group, training_device
from stretto_critic.critic import Critic, load_critic

KINDS = ("language_model", "reward_model")


def play(directory: Path) -> dict:
    """Three steps of PPO with a critic from a directory."""
    torch.manual_seed(0)
    section, optim, policy = section_of("ppo"), optim_of("ppo"), policy_of("ppo")
    mesh = None
    if num_ranks() > 1:
        mesh = Mesh(find_degrees(section, num_ranks(), policy.config), training_device())
    network = load_critic(directory, dtype=torch.float32, may_be_meta=True)
    is_on_meta = all(parameter.is_meta for parameter in network.parameters())
    critic = Critic(network, section=CriticSection(), model=section, optim=optim, mesh=mesh)
    learner = Learner(
        policy,
        model=section,
        optim=optim,
        valuer=critic,
        scheduler=ConstantScheduler(warmup_steps=0),
        max_steps=None,
        mesh=mesh,
    )
    result = train(learner, "ppo")
    return {"metrics": result["metrics"], "tensors": result["tensors"], "is_on_meta": is_on_meta}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with process_group(timeout_s=60.0):
        for kind in KINDS:
            played = play(folder / kind)
            if os.environ["RANK"] == "0":
                torch.save(played, folder / f"{kind}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
