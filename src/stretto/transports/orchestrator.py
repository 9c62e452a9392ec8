"""A trainer rank's connections to the orchestrator; a run on a training service has a process that uses them too.

    register -> each step: a batch, with messages between -> wait until the last checkpoint and version are done

One rank per data-parallel group registers and receives batches; only the lead listens to messages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack

from stretto.base.errors import ConfigError, EngineError, WireError
from stretto.base.secret import load_secret
from stretto.config.root import TrainerConfig
from stretto.records.control import CheckpointComplete, Failed, Message, Register, StepDone, Stop, VersionLoaded
from stretto.records.sample import TrainBatch
from stretto.transports.control import ControlClient
from stretto.transports.rollouts import build_receiver

logger = logging.getLogger(__name__)

POLL_S = 0.1
"""Seconds between two looks at the messages while this rank waits for a batch."""
FAILURE_TIMEOUT_S = 2.0


class Orchestrator:
    """The connections to the orchestrator, and the state that its last messages tell; `stack` closes the connections.

    `on_loaded` is called with a version that all engines have loaded, `on_complete` with the step of a checkpoint that
    is complete. `step` is the number of steps done so far; its checkpoint, if there is one, is complete.
    """

    def __init__(
        self,
        cfg: TrainerConfig,
        stack: ExitStack,
        step: int,
        *,
        on_loaded: Callable[[int], None],
        on_complete: Callable[[int], None],
    ) -> None:
        self._cfg, self._stack = cfg, stack
        self._control = ControlClient(cfg.control, cfg.run_name, load_secret(cfg.run_dir))
        stack.callback(self._control.close)
        self._on_loaded, self._on_complete = on_loaded, on_complete
        self.send, self.post = self._control.send, self._control.post
        self.stop: Stop | None = None
        self.loaded_version, self.wants_canary = -1, True
        self.complete_step = step

    def register(self, info: Register) -> None:
        """Register, then open the connection for batches, so that a rank that is refused never receives one.

        Raises: ConfigError when the orchestrator continues from another step.
        """
        theirs = self._control.register(info).resume_step or 0
        if theirs != info.version:
            raise ConfigError(
                f"the orchestrator continues after step {theirs}, this trainer after step {info.version}; start both "
                "with the same --resume"
            )
        self._rank, self._world_size = info.rank, info.world_size
        self._receiver = build_receiver(
            self._cfg.rollout_transport, self._cfg.run_dir, info.rank, self._control.session
        )
        self._stack.callback(self._receiver.close)
        logger.info("registered with the orchestrator; starting at step %d", info.version + 1)

    def receive(self, step: int, should_stop: Callable[[], bool]) -> TrainBatch | None:
        """This rank's batch of a step; None once should_stop() is true.

        Raises: EngineError when none comes in batch_timeout_s, WireError for the batch of another step or rank.
        """
        timeout_s = self._cfg.batch_timeout_s
        deadline = time.monotonic() + timeout_s
        while not should_stop():
            batch = self._receiver.receive(POLL_S)
            if batch is not None:
                check_batch(batch, step, self._rank, self._world_size)
                return batch
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the orchestrator sent no batch for step {step} within batch_timeout_s = {timeout_s:g}; see its "
                    "log for what it waits for"
                )
        return None

    def poll(self) -> None:
        """Handle the messages that have come, without waiting."""
        for message in self._control.poll():
            self._handle(message)

    def wait_until(self, is_done: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Handle messages until is_done().

        Raises: EngineError after timeout_s, naming `what`.
        """
        deadline = time.monotonic() + timeout_s
        while not is_done():
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineError(f"waited {timeout_s:g} s for {what}; see the orchestrator's log")
            for message in self._control.wait(left):
                self._handle(message)

    def wait_complete(self, *, saved_step: int, version: int) -> None:
        """Wait until the last checkpoint is complete and all engines have loaded the last version.

        Raises: EngineError after weight_broadcast.timeout_s for either.
        """
        timeout_s = self._cfg.weight_broadcast.timeout_s
        what = f"the orchestrator to complete the checkpoint of step {saved_step}"
        self.wait_until(lambda: self.complete_step == saved_step, timeout_s, what)
        what = f"the engines to load the last version, {version}"
        self.wait_until(lambda: self.loaded_version == version, timeout_s, what)

    def report_step(self, step: int, metrics: dict[str, float]) -> None:
        """Report a trained step; metrics: with those of monitors/steps.py."""
        done = StepDone(
            step=step,
            metrics=metrics,
            num_tokens=int(metrics["batch/tokens"]),
            time_s=metrics["time/step"],
            wait_s=metrics["time/wait_for_batch"],
        )
        self.post(done)

    def report_failure(self, error: Exception) -> None:
        """Report the error that ends this process to the orchestrator, if it can be reached."""
        try:
            self.send(Failed(reason=f"{type(error).__name__}: {error}"), timeout_s=FAILURE_TIMEOUT_S)
        except (EngineError, WireError) as also:
            logger.debug("could not report the failure to the orchestrator: %s", also)

    def _handle(self, message: Message) -> None:
        match message:
            case Stop():
                logger.info("the orchestrator requests a stop: %s", message.reason)
                self.stop = message
            case VersionLoaded(version=version, wants_canary=wants_canary):
                self.loaded_version, self.wants_canary = version, wants_canary
                self._on_loaded(version)
            case CheckpointComplete(step=step):
                self.complete_step = step
                self._on_complete(step)
            case _:
                raise WireError(f"the orchestrator sent {type(message).__name__}, which only a trainer may send")


def check_batch(batch: TrainBatch, step: int, rank: int, world_size: int) -> None:
    """Raises: WireError when it is not the batch of this step for this data-parallel rank."""
    if (batch.step, batch.rank, batch.world_size) != (step, rank, world_size):
        raise WireError(
            f"got the batch of step {batch.step} for rank {batch.rank} of {batch.world_size}; "
            f"expected step {step} for rank {rank} of {world_size}"
        )
