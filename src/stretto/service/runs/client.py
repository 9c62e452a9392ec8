"""What a run asks of a service before it starts, in plain requests: whether it would be taken.

Also what both ends need to agree on: the adapter of a run's config, and the digest of a tokenizer.
"""

from __future__ import annotations

import hashlib
import os
import urllib.error
import urllib.request
from typing import Any

import msgspec

from stretto.base.errors import ConfigError
from stretto.config.root import TrainerConfig
from stretto.config.sections.run import ServiceRunSection, name_at_service
from stretto.data.hub_model import find_local
from stretto.records.tenants import TenantSpec
from stretto.transports.engine import api

TIMEOUT_S = 20.0


class CheckRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run that may begin. tokenizer: digest of its tokenizer.json; may_exist: it continues, or replaces one."""

    spec: TenantSpec
    base_model: str
    seq_len: int
    tokenizer: str | None = None
    may_exist: bool = False


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


def tokenizer_digest(name: str) -> str | None:
    """SHA-256 of the tokenizer.json of a directory, or of a model of the Hub that is here; None if there is none."""
    directory = find_local(name, has_weights=False)
    path = None if directory is None else directory / "tokenizer.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path is not None and path.is_file() else None


def find_token(section: ServiceRunSection) -> str:
    """Raises: ConfigError if the variable is not set."""
    if token := os.environ.get(section.token_var, "").strip():
        return token
    raise ConfigError(
        f"[service]: the environment variable {section.token_var} is not set; put your token of {section.url} into it "
        "(RUN/tokens.json of the service has it), or name another one as service.token_var"
    )


def check(cfg: TrainerConfig, *, may_exist: bool) -> dict[str, Any]:
    """Ask whether the service takes this run; its answer.

    Raises: ConfigError with the service's reason and HTTP status; ConnectionError if nobody answers there.
    """
    section = cfg.service
    assert section is not None, "a run on a service"
    body = CheckRun(
        spec=spec_of(cfg),
        base_model=cfg.model.name,
        seq_len=cfg.seq_len,
        tokenizer=tokenizer_digest(cfg.tokenizer.name or cfg.model.name),
        may_exist=may_exist,
    )
    return _post(section, "/runs/check", msgspec.json.encode(body))


def end_earlier(cfg: TrainerConfig) -> None:
    """End what the service has of a run of this name, as --clean deletes its directory."""
    assert cfg.service is not None, "a run on a service"
    _post(cfg.service, f"/runs/{name_at_service(cfg.run_name)}/end", b"{}")


def _post(section: ServiceRunSection, path: str, body: bytes) -> dict[str, Any]:
    request = urllib.request.Request(
        section.url.rstrip("/") + path,
        data=body,
        headers={"X-API-Key": find_token(section), "Content-Type": "application/json"},
        method="POST",
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return dict(msgspec.json.decode(response.read()))
    except urllib.error.HTTPError as error:
        text = api.error_message(error.read())
        raise ConfigError(
            f"service {section.url} does not take this run: {text} (HTTP {error.code})"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConnectionError(f"no training service answers at {section.url}: {reason}") from None
