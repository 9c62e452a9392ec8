"""Checks [trainer.critic] against the model's files before a run starts."""

from __future__ import annotations

from stretto.base.errors import ConfigError
from stretto.check.backend import find_backend
from stretto.check.models import check_beside_policy, check_model, find_model
from stretto.config.root import RLConfig, TrainerConfig


def check(cfg: RLConfig) -> None:
    """Check its ranks, and with another backend its model and what it computes again.

    Raises: ConfigError naming the key, and what it does not allow.
    """
    critic, backend = cfg.trainer.critic, find_backend(cfg.trainer)
    assert critic is not None, "the caller has looked"
    if cfg.num_critic_ranks:
        where = "model, of the ranks in trainer.critic.placement"
        check_model(cfg.model, cfg.num_critic_ranks, where, backend=backend)
    if backend is None:
        return
    if critic.load:
        check_beside_policy("trainer.critic.load", critic.load, cfg, backend, cfg.num_critic_ranks)
    scratch = cfg.model.scratch
    here = None if scratch is not None else find_model(cfg.model.name)
    family = scratch.family if scratch is not None else here.family if here is not None else None
    if critic.ac is None or family is None:
        return
    try:
        backend.check(family, {}, cfg.model.model_copy(update={"ac": critic.ac}))
    except ConfigError as error:
        raise ConfigError(str(error).replace("[model.ac]", "[trainer.critic.ac]")) from None


def check_is_alone(cfg: TrainerConfig) -> None:
    """Raises: ConfigError if the critic has no process of its own."""
    if cfg.critic is None or cfg.critic.placement is None:
        raise ConfigError(
            "trainer.critic.placement is missing: without it the critic is on the trainer's ranks, and has no process"
        )
