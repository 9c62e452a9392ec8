"""The screen of `critic --dry-run`."""

from __future__ import annotations

from stretto.config.root import TrainerConfig
from stretto.dry_run import trainer
from stretto_critic.check import check_is_alone


def screen(cfg: TrainerConfig) -> str:
    """What the critic would do alone. Raises: ConfigError if it has no process of its own."""
    check_is_alone(cfg)
    return trainer(cfg)
