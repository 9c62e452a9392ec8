"""What [trainer.critic] does not go with, by the names of keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.base.errors import ConfigError
from stretto.cli import run_verb
from stretto.config.load import load
from stretto.config.root import RLConfig, TrainerConfig

PPO = '[orchestrator.algo]\ntype = "ppo"\n[trainer.advantages]\ntype = "gae"\n[trainer.critic]\n'
ENV = '[[orchestrator.env]]\nid = "reverse-text"\n'
WRONG = {
    "a critic that learns until the end": ("max_steps = 10\n" + PPO + "num_critic_only_steps = 10\n",
        ["trainer.critic.num_critic_only_steps = 10 must be below", "max_steps = 10", "never learns"]),
    "a bound on values that do not move": (PPO + "value_clip = 0.4\n",
        ["c.toml:6: trainer.critic.value_clip = 0.4", "does nothing", "trainer.updates_per_step = 1"]),
    "a critic that nobody asks": ("[trainer.critic]\nlr = 1e-5\n",
        ["trainer.critic", "values that are not used", '[trainer.advantages] with type = "gae"']),
    "a critic beside layers of one's own": (PPO + '[trainer.hooks]\nmodel = "mine:changed"\n',
        ['trainer.hooks.model = "mine:changed" changes the policy', "[trainer.critic] would be another model"]),
    "two rates": (PPO + 'lr = 1e-5\noptim = { type = "adamw", lr = 1e-4 }\n',
        ["trainer.critic.lr = 1e-05 beside [trainer.critic.optim]", "as trainer.critic.optim.lr"]),
    "a critic for another implementation": ('[model]\nimpl = "hf"\n' + PPO,
        ["trainer.critic needs a network of our own", 'use impl = "custom"']),
    "an optimizer that Megatron has not": ('[trainer]\nbackend = "megatron"\n' + PPO + 'optim = { type = "sgd" }\n',
        ['trainer.critic.optim.type = "sgd" with trainer.backend = "megatron"', "its optimizer is AdamW"]),
    "turns with ranks of its own": (
        PPO + "[trainer.critic.placement]\n[colocate]\n[orchestrator]\nmax_async_level = 0\n",
        ["[trainer.critic.placement] with [colocate]", "on the trainer's ranks"]),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_critic_that_does_not_go_with_the_rest_is_refused(case: str, tmp_path: Path) -> None:
    toml, parts = WRONG[case]
    file = tmp_path / "c.toml"
    file.write_text(toml + ENV)
    with pytest.raises(ConfigError) as caught:
        load(RLConfig, ["@", str(file)], verb="rl")
    assert all(part in str(caught.value) for part in parts), caught.value


def test_its_rules_hold_for_the_trainer_alone(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[critic]\n")
    with pytest.raises(ConfigError, match=r"critic trains values that are not used; add \[advantages\]"):
        load(TrainerConfig, ["@", str(tmp_path / "c.toml")], verb="trainer")


@pytest.mark.heavy
@pytest.mark.parametrize("words", [[], ["--dry-run"]])
def test_a_critic_on_the_trainers_ranks_has_no_process(words: list[str], tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_verb("critic", words) == 2
    assert "trainer.critic.placement is missing" in capsys.readouterr().err
