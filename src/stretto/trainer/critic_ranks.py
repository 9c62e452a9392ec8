"""The process of a critic on ranks of its own: `stretto critic`, started by `rl`.

It trains a `Critic` on a mesh of its own with the policy's batches, and follows the policy step by step
(critic_wire.py), so that both are always at the same step and a checkpoint of a step has the files of both. Its updates
are those of a critic on the policy's ranks: the same samples, values and returns.
"""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path

import msgspec
import numpy as np
import torch

from stretto.base import rundir
from stretto.base.errors import ConfigError, WireError
from stretto.base.runtime import freeze_objects
from stretto.config.root import TrainerConfig
from stretto.records.sample import MicroBatch
from stretto.trainer.build import build_critic_alone
from stretto.trainer.critic import Critic
from stretto.trainer.critic_wire import (
    Batch,
    Command,
    CriticWire,
    End,
    Export,
    Flush,
    Flushed,
    Ready,
    Save,
    Targets,
    Trained,
    Values,
    find_placement,
    open_wire,
)
from stretto.trainer.process import find_group_timeout_s, rank_process
from stretto.trainer.state import checkpoint
from stretto.trainer.state.export import export_critic
from stretto.trainer.state.learner_state import LearnerState, StateSource, add_prefix, select_prefix
from stretto.trainer.updates import parts_of_step

logger = logging.getLogger(__name__)

ROLE = "critic"


def main(cfg: TrainerConfig) -> int:
    """Train the critic until the policy's ranks end; the exit status."""
    if find_placement(cfg) is None:
        raise ConfigError(
            "trainer.critic.placement is missing: without it the critic is on the trainer's ranks, and has no process"
        )
    with rank_process(cfg, ROLE):  # a signal to finish is the policy's to follow: it says End
        critic, tokenizer_dir = build_critic_alone(cfg)
        process = CriticProcess(cfg, critic, tokenizer_dir)
        process.resume()
        process.run(open_wire(cfg, critic.mesh, is_critic=True, timeout_s=find_group_timeout_s(cfg)))
    return 0


class CriticProcess:
    """The critic's loop on one of its ranks."""

    def __init__(self, cfg: TrainerConfig, critic: Critic, tokenizer_dir: Path) -> None:
        """tokenizer_dir: of its exports."""
        self.cfg, self.section = cfg, critic.section
        self.critic, self.tokenizer_dir = critic, tokenizer_dir
        self.mesh = critic.mesh
        self.learner = CriticLearner(critic)
        self.wire: CriticWire | None = None
        self.written: deque[int] = deque()
        self.saver: checkpoint.Saver | None = None
        if cfg.ckpt is not None:
            self.saver = checkpoint.Saver(
                cfg.run_dir,
                is_async=cfg.ckpt.is_async,
                on_written=self.written.append,
                part=ROLE,
                skip_optimizer=cfg.ckpt.skip_optimizer,
            )

    def resume(self) -> None:
        """Load the checkpoint that [resume] names, if it names one."""
        if self.cfg.resume is not None:
            run, step = rundir.find_checkpoint(self.cfg.run_dir, self.cfg.resume.step, self.cfg.resume.dir)
            skip = self.cfg.ckpt is not None and self.cfg.ckpt.skip_optimizer
            checkpoint.load(run, self.learner, step, skip_optimizer=skip)
            if self.cfg.resume.skip_progress:
                self.learner.step = 0
            logger.info("resumed after step %d", step)

    def run(self, wire: CriticWire | None) -> None:
        """Follow the policy until it says End; wire: on batch leads."""
        self.wire = wire
        if self.mesh.is_lead and self.wire is not None:
            self.wire.send(Ready(self.learner.step), 0)
        freeze_objects()
        while not isinstance(command := self.receive(), End):
            match command:
                case list():
                    self.train(command)
                case Save():
                    assert self.saver is not None, "the policy saves only with [ckpt]"
                    self.saver.save(self.learner)
                case Export(step):
                    folder = self.section.save or self.cfg.run_dir.critic
                    self.learner.check_finite()
                    export_critic(self.critic, folder / f"step_{step}", self.tokenizer_dir)
                case Flush():
                    if self.saver is not None:
                        self.saver.wait()
                    if self.mesh.is_lead and self.wire is not None:
                        self.wire.send(Flushed(self.pop_written()), 0)
        if self.saver is not None:
            self.saver.wait()
        logger.info("done at step %d", self.learner.step)

    def receive(self) -> Command | list[Batch]:
        """What the policy says; the batches of all its ranks that this one follows."""
        found: list[Command] | None = None
        if self.wire is not None:
            found = [
                self.wire.receive(Command, peer) for peer in self.wire.roles.policies_of(self.mesh.dp_rank)
            ]
        found = self.mesh.broadcast_to_cp_tp(found, list[Command] | None)
        assert found, "the batch lead has it"
        batches = [each for each in found if isinstance(each, Batch)]
        if len(batches) not in (0, len(found)) or len({type(each) for each in found}) > 1:
            raise WireError(f"the policy's ranks say different things: {found}")
        return batches or found[0]

    def train(self, batches: list[Batch]) -> None:
        """One step on the batches of the policy's ranks."""
        step = batches[0].step
        if {batch.step for batch in batches} != {self.learner.step + 1}:
            raise WireError(
                f"got the batch of step {step} after step {self.learner.step}; start policy and critic together"
            )
        sizes = [len(batch.micro_batches) for batch in batches]
        flat = [mb for batch in batches for mb in batch.micro_batches]
        values = self.critic.values(flat)
        targets = self._exchange(values, sizes)
        done = 0
        by_policy: list[list[MicroBatch]] = []
        for batch, target in zip(batches, targets):
            own = values[done : done + len(batch.micro_batches)]
            done += len(own)
            masks = target.loss_masks or [mb.loss_mask for mb in batch.micro_batches]
            by_policy.append(
                [
                    msgspec.structs.replace(mb, values=value, returns=returns, loss_mask=mask)
                    for mb, value, returns, mask in zip(batch.micro_batches, own, target.returns, masks)
                ]
            )
        # Every policy rank cuts its own samples, so that an update is the same one wherever the critic is.
        parts = [parts_of_step(own, self.cfg, step, targets[0].num_updates) for own in by_policy]
        for of_each in zip(*parts):
            self.critic.train([mb for part in of_each for mb in part], step)
        self.learner.step = step
        if self.saver is not None:
            self.saver.check()
        metrics = self.critic.pop_metrics()
        if self.mesh.is_lead and self.wire is not None:
            self.wire.send(Trained(step, metrics, self.pop_written()), 0)

    def _exchange(self, values: list[np.ndarray], sizes: list[int]) -> list[Targets]:
        """Send the policy's ranks their values; the returns of each."""
        found: list[Targets] | None = None
        if self.wire is not None:
            peers, done = self.wire.roles.policies_of(self.mesh.dp_rank), 0
            for peer, size in zip(peers, sizes):
                self.wire.send(Values(tuple(values[done : done + size])), peer)
                done += size
            found = [self.wire.receive(Targets, peer) for peer in peers]
        found = self.mesh.broadcast_to_cp_tp(found, list[Targets] | None)
        assert found is not None, "the batch lead has it"
        return found

    def pop_written(self) -> tuple[int, ...]:
        steps = []
        while self.written:
            steps.append(self.written.popleft())
        return tuple(steps)


class CriticLearner:
    """What a checkpoint has of a critic on its own ranks; its names are those in a learner's state."""

    def __init__(self, critic: Critic) -> None:
        self.critic, self.step = critic, 0

    def check_finite(self) -> None:
        """Raises: EngineError when a weight is NaN or infinite."""
        self.critic.network.check_finite(self.step)

    def state(self) -> LearnerState:
        """This rank's slices of weights and optimizer state."""
        optim = self.critic.network.optim.type
        return LearnerState(
            add_prefix("critic", self.critic.network.state()), {"step": self.step, "optim": optim}
        )

    @torch.no_grad()
    def load_state(self, source: StateSource) -> None:
        """Load the state that `state`, or a learner with this critic, returned.

        Raises: DataError when it belongs to another model or optimizer.
        """
        saved = select_prefix("critic", source.tensors)
        source.read(add_prefix("critic", self.critic.saved_targets(saved)))
        self.step = source.values["step"]
        self.critic.network.weights.copy_to_model()
