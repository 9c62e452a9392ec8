"""Checks and registers runs that bring an orchestrator; routes and the watched directory call these functions."""

from __future__ import annotations

import time
from functools import lru_cache
from uuid import uuid4

import msgspec

from stretto.transports.engine.api import Refusal
from stretto_service.access import User
from stretto_service.hub import Hub
from stretto_service.runs.client import tokenizer_digest
from stretto_service.store import Run
from stretto_service.training.checkpoints import check_name
from stretto_service.wires.operations import TenantSpec
from stretto_service.wires.service import CheckRun, CreateRun

GONE = ("ended", "failed")


def check_run(hub: Hub, user: User, body: CheckRun) -> Run | None:
    """The user's run of this name, None if there is none. Raises: Refusal with the first reason against a start now."""
    spec = body.spec
    _check_spec(hub, spec, body.base_model)
    if body.seq_len > hub.cfg.seq_len:
        raise Refusal(f"seq_len = {body.seq_len} must be at most {hub.cfg.seq_len}, that of this service")
    expected = _service_tokenizer(hub.cfg.tokenizer.name or hub.model_name)
    if None not in (expected, body.tokenizer) and expected != body.tokenizer:
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
def _service_tokenizer(name: str) -> str | None:
    """The digest of the service's tokenizer; cached, because a run that waits for a place is checked every second."""
    return tokenizer_digest(name)


def check_free(run: Run) -> None:
    """Raises: Refusal 423 for a run that the admin or a file has frozen, which gets no samples either."""
    if run.is_held:
        raise Refusal(f"{run.id} is frozen: {run.reason}; only the admin resumes it", 423)


def register(hub: Hub, user: User, body: CreateRun, *, directory: str | None = None) -> Run:
    """Make a run and give it a place; the future of its creation is `<id>/0`.

    A repeated request with the same key gets the same run. The first request for a run that a watched directory has
    registered gets that run. directory: the watched directory that calls this; None: a request.

    Raises: Refusal if the spec does not fit, the name is taken, or there is no place.
    """
    spec = body.spec
    _check_spec(hub, spec, body.base_model)
    name = f"{user.name}:{spec.name}"
    known = hub.store.get(Run, name)
    if known is not None and body.key is not None and known.key == body.key:  # the first answer was lost
        return known
    if known is not None and known.is_held:
        raise Refusal(
            f"{spec.name!r} is frozen: {known.reason}; only the admin resumes it, or choose another name", 423
        )
    if known is not None and known.is_prepared and directory is None:
        return _attach(hub, known, body)
    if known is not None and known.state not in GONE:
        raise Refusal(f"you have a run {spec.name!r} already ({known.state}); end it, or choose another name")
    hub.training.check_place(user.name)
    run = hub.new_run(
        user,
        name,
        msgspec.structs.replace(spec, name=f"{user.name}.{spec.name}.{uuid4().hex[:8]}"),
        user_metadata=body.metadata,
        key=body.key,
        directory=directory or (None if known is None else known.directory),
        is_prepared=directory is not None,
    )
    hub.futures.forget(f"{name}/")
    hub.training.create(run)
    return run


def _attach(hub: Hub, run: Run, body: CreateRun) -> Run:
    """Attach the orchestrator to the run that a directory has registered for it."""
    _check_same(run, body.spec)
    run.is_prepared, run.key, run.user_metadata = False, body.key, body.metadata
    run.last_request_at = time.time()
    hub.store.put(run)
    return run


def _check_same(run: Run, spec: TenantSpec) -> None:
    """Raises: Refusal 409 for another adapter or optimizer than the directory has registered."""
    ours, theirs = (msgspec.to_builtins(each) for each in (run.spec, spec))
    changed = sorted(key for key in ours if key != "name" and ours[key] != theirs[key])
    if changed:
        raise Refusal(
            f"{spec.name!r} was registered by {run.directory} with another {', '.join(changed)}; start it with the "
            "control/orch.toml that is there",
            409,
        )


def _check_spec(hub: Hub, spec: TenantSpec, base_model: str) -> None:
    """Raises: Refusal for another model, a name that is no file name, or a rank that is too large."""
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
