"""The process of a critic on ranks of its own: `stretto critic`, started by `rl`.

It trains a `Critic` on a mesh of its own with the policy's batches, and follows the policy step by step
(wire.py): both are always at the same step, and a checkpoint of a step has the files of both. It is updated with
the same samples, values and returns as a critic on the policy's ranks.
"""

from __future__ import annotations

import logging
from collections import deque
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np

from stretto.base import rundir
from stretto.base.errors import WireError
from stretto.base.runtime import freeze_objects
from stretto.config.root import TrainerConfig
from stretto.records.sample import MicroBatch
from stretto.trainer.process import rank_process
from stretto.trainer.state import checkpoint
from stretto.trainer.updates import parts_of_step
from stretto.trainer.valuer import NAME
from stretto_critic.build import build_alone
from stretto_critic.check import check_is_alone
from stretto_critic.critic import Critic
from stretto_critic.wire import Batch, Command, CriticWire, Flushed, Ready, Targets, Trained, Values, open_wire

logger = logging.getLogger(__name__)


def main(cfg: TrainerConfig) -> int:
    """Train the critic until the policy's ranks end; the exit status."""
    check_is_alone(cfg)
    with rank_process(cfg, NAME):  # a signal to finish reaches the policy's ranks, which then end this process
        critic, tokenizer_dir = build_alone(cfg)
        process = CriticProcess(cfg, critic, tokenizer_dir)
        process.resume()
        process.run(open_wire(cfg, critic.mesh, is_critic=True))
    return 0


class CriticProcess:
    """The critic's loop on one of its ranks."""

    def __init__(self, cfg: TrainerConfig, critic: Critic, tokenizer_dir: Path) -> None:
        """tokenizer_dir: exports get a copy of this tokenizer."""
        self.cfg, self.critic, self.tokenizer_dir = cfg, critic, tokenizer_dir
        self.mesh = critic.mesh
        self.wire: CriticWire | None = None
        self.written: deque[int] = deque()
        self.saver = checkpoint.build_saver(cfg, self.written.append, part=NAME)

    def resume(self) -> None:
        """Load the checkpoint that [resume] names, if there is a [resume]."""
        if self.cfg.resume is not None:
            run, step = rundir.find_checkpoint(self.cfg.run_dir, self.cfg.resume.step, self.cfg.resume.dir)
            checkpoint.resume(self.cfg, self.critic, run, step)

    def run(self, wire: CriticWire | None) -> None:
        """Train and follow commands until the run is over; wire: None on ranks that are not batch leads."""
        self.wire = wire
        if self.mesh.is_lead:
            self._lead_wire.send(Ready(self.critic.step), 0)
        freeze_objects()
        while (message := self.receive()) != Command("end"):
            if isinstance(message, Command):
                self.execute(message)
            else:
                self.train(message)
        if self.saver is not None:
            self.saver.wait()
        logger.info("done at step %d", self.critic.step)

    @property
    def _lead_wire(self) -> CriticWire:
        assert self.wire is not None, "the lead is a batch lead"
        return self.wire

    def receive(self) -> Command | list[Batch]:
        """The next command, or the next batches of all ranks of the policy that this rank follows."""
        messages: list[Batch | Command] | None = None
        if self.wire is not None:
            peers = self.wire.roles.policies_of(self.mesh.dp_rank)
            messages = [self.wire.receive(Batch | Command, peer) for peer in peers]
        messages = self.mesh.broadcast_batch(messages, list[Batch | Command] | None)
        assert messages, "the batch lead has received them"
        batches = [message for message in messages if isinstance(message, Batch)]
        if len(batches) == len(messages):
            return batches
        command = messages[0]
        if isinstance(command, Batch) or any(message != command for message in messages):
            raise WireError(f"the policy's ranks sent different commands: {messages}")
        return command

    def execute(self, command: Command) -> None:
        """Execute a command other than `end`."""
        match command.verb:
            case "save":
                assert self.saver is not None, "the policy saves only with [ckpt]"
                self.saver.save(self.critic)
            case "export":
                self.critic.check_finite()
                self.critic.export(self.cfg, self.critic.step, self.tokenizer_dir)
            case "flush":
                if self.saver is not None:
                    self.saver.wait()
                if self.mesh.is_lead:
                    self._lead_wire.send(Flushed(self.pop_written()), 0)

    def train(self, batches: list[Batch]) -> None:
        """One step on the batches of the policy's ranks."""
        step = batches[0].step
        if {batch.step for batch in batches} != {self.critic.step + 1}:
            raise WireError(
                f"got the batch of step {step} after step {self.critic.step}; start policy and critic together"
            )
        flat = iter(self.critic.values([mb for batch in batches for mb in batch.micro_batches]))
        values = [list(islice(flat, len(batch.micro_batches))) for batch in batches]
        targets = self._exchange(values)
        by_policy: list[list[MicroBatch]] = []
        for batch, own_values, target in zip(batches, values, targets):
            masks = target.loss_masks or [mb.loss_mask for mb in batch.micro_batches]
            by_policy.append(
                [
                    msgspec.structs.replace(mb, values=value, returns=returns, loss_mask=mask)
                    for mb, value, returns, mask in zip(batch.micro_batches, own_values, target.returns, masks)
                ]
            )
        # The samples of each policy rank are split separately, as on the policy's ranks: updates are then the same.
        num_updates, shares = targets[0].num_updates, self.critic.network.sharing == "tree"
        parts = [parts_of_step(own, self.cfg, step, num_updates, shares_prefixes=shares) for own in by_policy]
        for of_each in zip(*parts):
            self.critic.train([mb for part in of_each for mb in part], step)
        if self.saver is not None:
            self.saver.check()
        metrics = self.critic.pop_metrics()
        if self.mesh.is_lead:
            self._lead_wire.send(Trained(step, metrics, self.pop_written()), 0)

    def _exchange(self, values: list[list[np.ndarray]]) -> list[Targets]:
        """Send each of the policy's ranks its values; what each of them sends back."""
        targets: list[Targets] | None = None
        if self.wire is not None:
            peers = self.wire.roles.policies_of(self.mesh.dp_rank)
            for peer, values_of_peer in zip(peers, values):
                self.wire.send(Values(tuple(values_of_peer)), peer)
            targets = [self.wire.receive(Targets, peer) for peer in peers]
        targets = self.mesh.broadcast_batch(targets, list[Targets] | None)
        assert targets is not None, "the batch lead has received them"
        return targets

    def pop_written(self) -> tuple[int, ...]:
        """Steps whose checkpoints have been written since the last call."""
        # Another thread may append meanwhile.
        return tuple(self.written.popleft() for _ in range(len(self.written)))
