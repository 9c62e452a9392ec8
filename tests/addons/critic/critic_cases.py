"""Critics."""

from __future__ import annotations

from tiny import build_policy

from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import AdamWOptim, CriticSection
from stretto.models.value_head import with_value_head
from stretto_critic.critic import Critic

MODEL = ModelSection(dtype="float32", optimization_dtype="float32")


def build_critic(section: CriticSection | None = None, *, lr: float = 1e-2, seed: int = 3) -> Critic:
    section = section or CriticSection(value_clip=None)
    return Critic(with_value_head(build_policy(seed)), section=section, model=MODEL, optim=AdamWOptim(lr=lr))
