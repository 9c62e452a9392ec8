"""A rank of a training service's trainer: loads the backbone, then executes the hub's operations in order.

    register with the hub -> receive an operation -> execute it (tenants.py) -> answer -> ... -> Shutdown

Ranks wait for the hub without a deadline, and end with it: the launcher starts them again, and the hub then creates its
tenants anew from their saved states. An error that is not one tenant's is reported, and ends the rank.
"""

from __future__ import annotations

import logging
import os
import signal
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING

from stretto.base.errors import EngineError, WireError
from stretto.base.runtime import freeze_objects
from stretto.base.secret import load_secret
from stretto.base.status import is_supervised, report
from stretto.chat.tokenizer import load_tokenizer
from stretto.records.control import Register
from stretto.trainer.learner import find_tokenizer, find_tokens, load_policy
from stretto.trainer.process import StopFlag, prepared_rank
from stretto.trainer.ranks.mesh import build_mesh, num_ranks
from stretto_service.tenants.tenants import Tenants
from stretto_service.wires.operations import BASE_WEIGHTS, RankFailed, Shutdown
from stretto_service.wires.tenants import TenantClient

if TYPE_CHECKING:
    from stretto_service.config import ServeConfig

logger = logging.getLogger(__name__)

ROLE = "tenants"
POLL_S = 0.2
SAVE_GRACE_S = 25
"""The longest that a rank goes on after SIGTERM."""
GROUP_TIMEOUT_S = 1800.0
"""The longest that ranks wait for each other within an operation."""


def main(cfg: ServeConfig) -> int:
    """Execute operations until Shutdown, the hub's end, or the first Ctrl-C; the exit status."""
    with (
        prepared_rank(cfg, ROLE, cfg.trainer, group_timeout_s=GROUP_TIMEOUT_S, reaches=cfg.control.host) as interrupt,
        ExitStack() as stack,
    ):
        tenants = build_tenants(cfg)
        client = TenantClient(cfg.control, cfg.run_name, load_secret(cfg.run_dir))
        stack.callback(client.close)
        client.register(Register(rank=int(os.environ.get("RANK", "0")), world_size=num_ranks()))
        report("ready", is_early=True)
        freeze_objects()
        if is_supervised():
            signal.signal(signal.SIGTERM, _wait_for_hub)
        run(tenants, client, interrupt)
    return 0


def _wait_for_hub(number: int, frame: FrameType | None) -> None:
    """On SIGTERM, let the hub save its runs here and end this rank; a timer ends it if the hub does not."""
    signal.alarm(SAVE_GRACE_S)


def build_tenants(cfg: ServeConfig) -> Tenants:
    """The backbone of [model] on this rank, without tenants."""
    model = cfg.model.model_copy(update={"ep": 1})
    directory = find_tokenizer(model, cfg.tokenizer, cfg.run_dir)
    policy = load_policy(model, may_be_meta=True, **find_tokens(load_tokenizer(directory)))
    logger.info("%d parameters, %d ranks", sum(p.numel() for p in policy.parameters()), num_ranks())
    folder = cfg.run_dir.path / "service" / "waiting"
    for left in folder.glob(f"*.{os.environ.get('RANK', '0')}.safetensors"):
        left.unlink()
    tenants = Tenants(
        policy,
        model=model,
        mesh=build_mesh(model, policy.config),
        max_rank=cfg.service.max_lora_rank,
        max_resident=cfg.trainer.max_resident,
        swap_folder=folder,
        trains_all=cfg.service.full_finetuning,
        tokenizer_dir=directory,
    )
    if cfg.service.full_finetuning:  # engines come back to these weights
        tenants.export_model(cfg.run_dir.path / "service" / BASE_WEIGHTS)
    return tenants


def run(tenants: Tenants, client: TenantClient, interrupt: StopFlag) -> None:
    """Execute the hub's operations until Shutdown.

    Raises: EngineError or WireError when the hub has ended; any error that is not one tenant's.
    """
    try:
        while not interrupt.is_set:
            operation = client.receive(POLL_S)
            if operation is None:
                continue
            done = tenants.execute(operation)
            if isinstance(operation, Shutdown):
                client.flush(done)
                logger.info("the hub ends this rank: %s", operation.reason)
                return
            client.answer(done)
        client.flush(RankFailed(reason="stopped by a signal"))
    except Exception as error:  # the hub learns why, whatever it is
        try:
            client.flush(RankFailed(reason=f"{type(error).__name__}: {error}"), timeout_s=2.0)
        except (EngineError, WireError) as also:
            logger.debug("could not report the failure to the hub: %s", also)
        raise
