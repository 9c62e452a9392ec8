"""Builds the critic that `[trainer.critic]` describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError
from stretto.chat.tokenizer import load_tokenizer
from stretto.check.backend import find_backend
from stretto.config.root import TrainerConfig
from stretto.data.hub_model import fetch
from stretto.models import hub
from stretto.models.decoder import Decoder
from stretto.models.hf import Policy
from stretto.models.value_head import with_value_head
from stretto.trainer.build import find_builder
from stretto.trainer.learner import find_tokenizer, find_tokens, load_policy
from stretto.trainer.ranks.mesh import Mesh, build_mesh, training_device
from stretto_critic.critic import Critic, load_critic
from stretto_critic.wire import RemoteCritic


def build(cfg: TrainerConfig, policy: Policy, mesh: Mesh, **tokens: Any) -> Critic | RemoteCritic:
    """The critic beside this policy, or what stands for it if it has ranks of its own.

    tokens: those of `find_tokens`.

    Raises: ConfigError when the policy has impl = "hf", or the critic has another vocabulary.
    """
    assert cfg.critic is not None, "the caller has looked"
    if cfg.critic.placement is not None:
        return RemoteCritic(cfg, mesh)
    if not isinstance(policy, Decoder):
        raise ConfigError('[trainer.critic] needs impl = "custom"; model.impl = "hf" has no value output')
    network = _load_network(cfg, tokens)
    _check_vocabulary(*(m.model.embed_tokens.weight.shape[0] for m in (network, policy)))
    return _critic(cfg, network, mesh)


def build_alone(cfg: TrainerConfig) -> tuple[Critic, Path]:
    """The critic on ranks of its own, and the tokenizer of its exports."""
    directory = find_tokenizer(cfg.model, cfg.tokenizer, cfg.run_dir)
    network = _load_network(cfg, find_tokens(load_tokenizer(directory)))
    critic_size, policy_size = network.config.vocab_size, None
    if cfg.model.scratch is None:
        policy_size = hub.load_config(fetch(cfg.model.name, has_weights=False)).vocab_size
    _check_vocabulary(critic_size, policy_size or critic_size)
    return _critic(cfg, network, build_mesh(cfg.model, network.config, find_backend(cfg))), directory


def _load_network(cfg: TrainerConfig, tokens: dict[str, Any]) -> Decoder:
    """The critic's network, from trainer.critic.load or from the model that the policy starts from."""
    assert cfg.critic is not None, "the caller has looked"
    if cfg.critic.load is None and cfg.model.scratch is not None:
        network = load_policy(cfg.model, **tokens)
        assert isinstance(network, Decoder), "a scratch model is ours"
        return with_value_head(network)
    dtype = hub.dtype_of(cfg.model.dtype, training_device())
    return load_critic(cfg.critic.load or cfg.model.name, dtype=dtype, may_be_meta=True)


def _critic(cfg: TrainerConfig, network: Decoder, mesh: Mesh) -> Critic:
    assert cfg.critic is not None, "the caller has looked"
    model = cfg.model.model_copy(update={"lora": None})
    return Critic(network, section=cfg.critic, model=model, optim=cfg.optim, mesh=mesh, build=find_builder(cfg))


def _check_vocabulary(critic: int, policy: int) -> None:
    if critic != policy:
        raise ConfigError(
            f"trainer.critic.load knows {critic} tokens and the policy {policy}; give a critic of its family"
        )
