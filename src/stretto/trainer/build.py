"""Builds what a trainer process trains, as configured: policy, reference and valuer."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from stretto import addons
from stretto.base.errors import ConfigError
from stretto.chat.tokenizer import load_tokenizer
from stretto.check.backend import find_backend
from stretto.check.models import check_quantize
from stretto.config.root import TrainerConfig
from stretto.data.hub_model import fetch
from stretto.models import hub
from stretto.models.fp8.checkpoint import BlockLayout
from stretto.trainer.batch.token_export import export_tokens
from stretto.trainer.hooks import TrainerHooks
from stretto.trainer.learner import Learner, find_tokens, load_policy
from stretto.trainer.network import NetworkBuilder, TorchNetwork
from stretto.trainer.ranks.mesh import Mesh, build_mesh, training_device
from stretto.trainer.valuer import NAME, Valuer

logger = logging.getLogger(__name__)


def build_learner(cfg: TrainerConfig, tokenizer_dir: Path, hooks: TrainerHooks) -> Learner:
    """The policy and its learner, as configured."""
    tokens = find_tokens(load_tokenizer(tokenizer_dir))
    policy = hooks.provide(lambda: load_policy(cfg.model, may_be_meta=True, **tokens))
    reference = None
    if (named := find_reference_model(cfg)) is not None:
        path, name = named
        other = {} if name is None else {"name": name, "scratch": None}
        section = cfg.model.model_copy(update=other)
        reference = hooks.provide(lambda: load_policy(section, may_be_meta=True, **tokens))
        reference.requires_grad_(False)
        if reference.output_weight.shape[0] != policy.output_weight.shape[0]:
            raise ConfigError(
                f"{path} knows {reference.output_weight.shape[0]} tokens and the "
                f"policy {policy.output_weight.shape[0]}; give a reference of the same family"
            )
    logger.info("%d parameters on %s", sum(p.numel() for p in policy.parameters()), training_device())
    mesh = build_mesh(cfg.model, policy.config, find_backend(cfg))
    if cfg.hooks.model is not None and mesh.degrees.ep > 1:
        raise ConfigError(
            f"trainer.hooks.model changes whole layers, and {mesh.degrees.ep} ranks would share the experts of this "
            "mixture; give model.ep = 1"
        )
    valuer: Valuer | None = None
    if cfg.critic is not None:
        build_valuer = addons.load("stretto.valuers", NAME, f"[trainer.{NAME}]")
        valuer = build_valuer(cfg, policy, mesh, **tokens)
    return Learner(
        policy,
        model=cfg.model,
        optim=cfg.optim,
        scheduler=cfg.scheduler,
        max_steps=cfg.max_steps,
        loss=cfg.loss,
        reference=reference,
        observe=partial(export_tokens, token_folder(cfg, mesh)) if cfg.enable_token_export else None,
        enable_router_replay=cfg.enable_router_replay,
        mesh=mesh,
        valuer=valuer,
        build=find_builder(cfg),
    )


def find_builder(cfg: TrainerConfig) -> NetworkBuilder:
    """What makes networks with trainer.backend.

    Raises: ConfigError if it is of an add-on that is not there.
    """
    backend = find_backend(cfg)
    return TorchNetwork if backend is None else backend.build


def token_folder(cfg: TrainerConfig, mesh: Mesh) -> Path:
    """Where this rank writes the tokens that it trains."""
    folder = cfg.run_dir.trained_tokens
    return folder / f"rank_{mesh.dp_rank}" if mesh.degrees.dp > 1 else folder


def find_engine_layout(cfg: TrainerConfig) -> BlockLayout | None:
    """The weights that engines hold in 8 bits; None if there are none.

    Raises: ConfigError if weight_broadcast.quantize_in_weight_transfer contradicts it.
    """
    section = cfg.weight_broadcast
    layout = None
    if section.engine_model is not None:
        layout = hub.load_layout(fetch(section.engine_model, has_weights=False))
    check_quantize(section.quantize_in_weight_transfer, section.engine_model, is_quantized=layout is not None)
    if layout is not None:
        logger.info("publishing %d weights in 8 bits, as %s", len(layout.names), section.engine_model)
    return layout


def find_reference_model(cfg: TrainerConfig) -> tuple[str, str | None] | None:
    """The key that makes a frozen reference necessary, and the model that it names; None without such a key."""
    if (kl := cfg.loss.reference_kl) is not None:
        return "trainer.loss.reference_kl.model", kl.model
    if cfg.advantages is not None and cfg.advantages.kl_coef:
        return "trainer.advantages.kl_model", cfg.advantages.kl_model
    return None
