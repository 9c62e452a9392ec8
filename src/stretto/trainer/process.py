"""The process of a rank: how it begins, and the signals that end it.

The first Ctrl-C ends training after the current step, the second one stops it at once. SIGUSR2, which a batch job may
send to a process more than once, always ends training after the current step.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch

from stretto.base import log, rundir
from stretto.base.runtime import keep_freed_memory
from stretto.base.status import is_supervised, stop_signals
from stretto.config.root import TrainerConfig
from stretto.trainer.ranks.mesh import choose_threads, process_group, rank_name

logger = logging.getLogger(__name__)

GROUP_MARGIN_S = 600.0  # how much longer ranks wait for the lead than the lead for a batch or engines


class StopFlag:
    """Set by the first signal; a second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.is_set = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_set and number == signal.SIGUSR2:
            return
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
        logger.warning("%s: finishing this step; send it again to stop now", signal.Signals(number).name)


@contextmanager
def stop_on_signal(*signals: signal.Signals) -> Iterator[StopFlag]:
    """A context in which signals (default: SIGINT, SIGTERM) set a StopFlag."""
    stop = StopFlag()
    numbers = signals or (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, stop.on_signal) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def rank_process(cfg: TrainerConfig, role: str, *, reaches: str | None = None) -> Iterator[StopFlag]:
    """A rank of the trainer or of a critic: as `prepared_rank`, with its seed; yields the stop flag.

    The first rank claims its part of the run directory if no launcher has claimed the whole.
    reaches: ranks listen on the network on which this address is reached; None: MASTER_ADDR.
    """
    with ExitStack() as stack:
        if not is_supervised() and os.environ.get("RANK", "0") == "0":
            is_new = cfg.resume is None or cfg.resume.dir is not None
            stack.enter_context(rundir.claim_part(cfg.run_dir, role, is_new=is_new, clean=cfg.clean))
        timeout_s = find_group_timeout_s(cfg)
        stop = stack.enter_context(prepared_rank(cfg, role, cfg, group_timeout_s=timeout_s, reaches=reaches))
        torch.manual_seed(cfg.seed)
        yield stop


def choose_kernels(trainer: Any) -> None:
    """Products and sums as `matmul_precision` and `is_deterministic` say; before the GPU is used."""
    torch.set_float32_matmul_precision(trainer.matmul_precision)
    if trainer.is_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # filled anyway


@contextmanager
def prepared_rank(
    cfg: Any, role: str, trainer: Any, *, group_timeout_s: float, reaches: str | None = None
) -> Iterator[StopFlag]:
    """A rank of any role: log, threads, signals and its group; yields the stop flag.

    cfg: any root with run_dir and log. trainer: the section with num_threads, matmul_precision and is_deterministic.
    """
    log.setup(rank_name(role), cfg.run_dir, cfg.log.level, cfg.log.json_logging)
    torch.set_num_threads(choose_threads(trainer.num_threads))
    choose_kernels(trainer)
    keep_freed_memory()
    signal.signal(signal.SIGTERM, _exit_cleanly)
    with (
        stop_on_signal(*stop_signals()) as stop,
        process_group(group_timeout_s, reaches=reaches, title=f"the {role}'s ranks"),
    ):
        yield stop


def find_group_timeout_s(cfg: TrainerConfig) -> float:
    """The longest that ranks wait for each other, while the lead waits for a batch or for engines."""
    return max(cfg.batch_timeout_s, 2 * cfg.weight_broadcast.timeout_s) + GROUP_MARGIN_S


def _exit_cleanly(number: int, frame: FrameType | None) -> None:
    """On SIGTERM, exit through every `finally`, so that shared memory and sockets are freed."""
    sys.exit(128 + number)
