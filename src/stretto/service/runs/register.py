"""How a run gets its place: what is checked, and its record. Routes and the watched directory call these."""

from __future__ import annotations

import time
from functools import lru_cache
from uuid import uuid4

import msgspec

from stretto.records.tenants import TenantSpec
from stretto.service.access import User
from stretto.service.hub import Hub
from stretto.service.runs.client import CheckRun, tokenizer_digest
from stretto.service.store import Run
from stretto.service.training.checkpoints import check_name
from stretto.transports.engine.api import Refusal
from stretto.transports.service import CreateRun

GONE = ("ended", "failed")


def check_run(hub: Hub, user: User, body: CheckRun) -> Run | None:
    """The run that this user has under this name. Raises: Refusal with the first reason why it could not begin now."""
    spec = body.spec
    _check_spec(hub, spec, body.base_model)
    if body.seq_len > hub.cfg.seq_len:
        raise Refusal(f"seq_len = {body.seq_len} must be at most {hub.cfg.seq_len}, that of this service")
    own = _own_tokenizer(hub.cfg.tokenizer.name or hub.model_name)
    if None not in (own, body.tokenizer) and own != body.tokenizer:
        raise Refusal("tokenizer: this run's tokenizer.json is not that of the service's model")
    known = hub.store.get(Run, f"{user.name}:{spec.name}")
    if known is not None and known.is_prepared:
        _check_same(known, spec)
    elif known is not None and known.state not in GONE and not body.may_exist:
        raise Refusal(
            f"you have a run {spec.name!r} already ({known.state}, step {known.step}); continue it with --resume, "
            "end it with --clean, or choose another run.name",
            409,
        )
    if known is None or not known.is_placed:
        hub.training.check_place(user.name)
    return known


@lru_cache(maxsize=8)
def _own_tokenizer(name: str) -> str | None:
    """Read once: files that wait for a place are checked every second."""
    return tokenizer_digest(name)


def check_free(run: Run) -> None:
    """Raises: Refusal 423 for a run that the admin has frozen, or a file: it gets no samples either."""
    if run.is_held:
        raise Refusal(f"{run.id} is frozen: {run.reason}; only the admin resumes it", 423)


def register(hub: Hub, user: User, body: CreateRun, *, directory: str | None = None) -> Run:
    """Make a run with a name of its own and give it a place; its future is `<id>/0`.

    The same request again, with the key that it had, gets the same run, and so does the first request for one that a
    watched directory has registered. directory: of that one, else None.

    Raises: Refusal if it does not fit, its name is taken, or there is no place.
    """
    spec = body.spec
    _check_spec(hub, spec, body.base_model)
    name = f"{user.name}:{spec.name}"
    known = hub.store.get(Run, name)
    if known is not None and body.key is not None and known.key == body.key:  # its answer was lost
        return known
    if known is not None and known.is_held:
        raise Refusal(
            f"{spec.name!r} is frozen: {known.reason}; only the admin resumes it, or choose another name", 423
        )
    if known is not None and known.is_prepared and directory is None:
        return _taken_over(hub, known, body)
    if known is not None and known.state not in GONE:
        raise Refusal(f"you have a run {spec.name!r} already ({known.state}); end it, or choose another name")
    hub.training.check_place(user.name)
    run = Run(
        id=name,
        owner=user.name,
        spec=msgspec.structs.replace(spec, name=f"{user.name}.{spec.name}.{uuid4().hex[:8]}"),
        base_model=hub.model_name,
        created_at=time.time(),
        last_request_at=time.time(),
        weight=user.section.weight,
        priority=user.section.priority,
        tokens_per_minute=user.section.tokens_per_minute,
        user_metadata=body.metadata,
        key=body.key,
        directory=directory or (None if known is None else known.directory),
        is_prepared=directory is not None,
    )
    hub.futures.forget(f"{name}/")
    hub.training.create(run)
    return run


def _taken_over(hub: Hub, run: Run, body: CreateRun) -> Run:
    """A run that a directory has registered, now that its orchestrator is there."""
    _check_same(run, body.spec)
    run.is_prepared, run.key, run.user_metadata = False, body.key, body.metadata
    run.last_request_at = time.time()
    hub.store.put(run)
    return run


def _check_same(run: Run, spec: TenantSpec) -> None:
    """Raises: Refusal 409 for another adapter or optimizer than the directory has registered."""
    ours, theirs = (msgspec.to_builtins(each) for each in (run.spec, spec))
    other = sorted(key for key in ours if key != "name" and ours[key] != theirs[key])
    if other:
        raise Refusal(
            f"{spec.name!r} was registered by {run.directory} with another {', '.join(other)}; start it with the "
            "control/orch.toml that is there",
            409,
        )


def _check_spec(hub: Hub, spec: TenantSpec, base_model: str) -> None:
    """Raises: Refusal for a model, a name or a rank that this service does not have."""
    hub.check_model(base_model)
    check_name(spec.name)
    if hub.cfg.service.full_finetuning:
        raise Refusal(
            "this service trains all weights of one run (service.full_finetuning), and runs of this kind bring an "
            "adapter; use a service without that key, or `rl` with a trainer of its own"
        )
    largest = hub.cfg.service.max_lora_rank
    if not 0 < spec.rank <= largest:
        raise Refusal(f"rank = {spec.rank} must be 1 to {largest} (service.max_lora_rank)")
