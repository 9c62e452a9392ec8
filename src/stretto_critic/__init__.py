"""The critic of PPO, trained beside the policy on the policy's ranks or on its own: `[trainer.critic]`."""

from stretto.addons import ConfigVerb

SUMMARIES = {"critic": "the critic of an rl run alone, where it has ranks of its own"}
CRITIC = ConfigVerb(
    "stretto.config.root:TrainerConfig", "stretto_critic.ranks:main", "stretto_critic.dry_run:screen", computes=True
)
