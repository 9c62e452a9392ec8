"""What a run's config says to a training service: its adapter and tokenizer, and whether the service takes the run."""

from __future__ import annotations

import hashlib
from typing import Any

from stretto.config.root import TrainerConfig
from stretto.config.sections.run import name_at_service
from stretto.data.hub_model import find_local
from stretto_service.wires import service
from stretto_service.wires.operations import TenantSpec
from stretto_service.wires.service import CheckRun


def spec_of(cfg: TrainerConfig) -> TenantSpec:
    """What the service trains for a run."""
    lora = cfg.model.lora
    assert lora is not None, "checked with the config"
    return TenantSpec(
        name=name_at_service(cfg.run_name),
        rank=lora.rank,
        alpha=lora.alpha,
        dropout=lora.dropout,
        target_modules=lora.target_modules,
        seed=cfg.seed,
        optim=cfg.optim.model_dump(mode="json"),
        scheduler=cfg.scheduler.model_dump(mode="json"),
        max_steps=cfg.max_steps,
    )


def request_of(cfg: TrainerConfig, *, may_exist: bool = False) -> CheckRun:
    """The request for a run with this config; may_exist: it continues or replaces one."""
    return CheckRun(
        spec=spec_of(cfg),
        base_model=cfg.model.name,
        seq_len=cfg.seq_len,
        tokenizer=tokenizer_digest(cfg.tokenizer.name or cfg.model.name),
        may_exist=may_exist,
    )


def tokenizer_digest(name: str) -> str | None:
    """SHA-256 of a model's tokenizer.json, from a directory or the local cache of the Hub; None if there is none."""
    directory = find_local(name, has_weights=False)
    path = None if directory is None else directory / "tokenizer.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path is not None and path.is_file() else None


def check(cfg: TrainerConfig, *, may_exist: bool) -> dict[str, Any]:
    """Ask whether the service takes this run; returns its answer.

    Raises: ConfigError with the service's reason and HTTP status; ConnectionError if no service answers there.
    """
    assert cfg.service is not None, "a run on a service"
    return service.check_run(cfg.service, request_of(cfg, may_exist=may_exist))


def end_earlier(cfg: TrainerConfig) -> None:
    """End the service's run of this name, as --clean deletes its directory."""
    assert cfg.service is not None, "a run on a service"
    service.end_run(cfg.service, name_at_service(cfg.run_name))
