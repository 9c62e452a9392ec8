"""The wire between the policy's ranks and those of a critic of its own; both ends.

Ranks that receive batches (batch leads) talk; the policy's i-th to the critic's i % C-th, where C divides the policy's
number. A step:

    policy                                   critic
    Batch(micro batches)         ->          values under the weights of the last step
      meanwhile: its own and the reference's log-probabilities
                                 <-          Values
    Targets(returns)             ->          its updates
      meanwhile: the policy's updates
                                 <-          Trained(metrics, checkpoints that are written); from lead to lead

Between steps the policy says Save, Export, Flush (answered by Flushed) and, last, End. Whoever waits does so as long as
ranks wait for a batch; a process that has ended closes its sockets, and is named at once. The group is gloo's, and has
no authentication, like those of the ranks themselves: for private networks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from stretto.base.errors import ENDED_FIRST, ConfigError, EngineError, WireError
from stretto.config.root import TrainerConfig
from stretto.config.sections.trainer import CriticPlacement, CriticSection
from stretto.records.codec import decode_blob, encode_blob
from stretto.records.sample import MicroBatch
from stretto.trainer.parallel.mesh import Mesh
from stretto.transports.weights.store import connect_store, create_store, new_gloo_group

if TYPE_CHECKING:
    from jaxtyping import Float

TITLE = "trainer.critic.placement"
JOIN_TIMEOUT_S = 600.0
NUM_POLICY = "num_policy"  # of batch leads, in the store
POLL_S = 0.05


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The critic has its weights, those after this step."""

    step: int


class Batch(msgspec.Struct, frozen=True, tag=True):
    """The batch of a step, of one of the policy's data-parallel ranks."""

    step: int
    micro_batches: tuple[MicroBatch, ...]


class Values(msgspec.Struct, frozen=True, tag=True):
    """Per micro batch, float32 [tokens]: the value before each rl token, 0 elsewhere."""

    values: tuple[np.ndarray, ...]


class Targets(msgspec.Struct, frozen=True, tag=True):
    """Per micro batch, float32 [tokens]: the returns; and the updates of each epoch."""

    returns: tuple[np.ndarray, ...]
    num_updates: int
    loss_masks: tuple[np.ndarray, ...] | None = None
    """Per micro batch, bool [tokens]: if the user's functions have changed those of the batch."""


class Trained(msgspec.Struct, frozen=True, tag=True):
    """The critic has trained the step."""

    step: int
    metrics: dict[str, float]
    saved: tuple[int, ...]
    """Steps whose checkpoints are on the disk since the last message."""


class Save(msgspec.Struct, frozen=True, tag=True):
    """Write a checkpoint of the critic after this step, while training goes on."""

    step: int


class Export(msgspec.Struct, frozen=True, tag=True):
    """Export the critic after this step."""

    step: int


class Flush(msgspec.Struct, frozen=True, tag=True):
    """Finish all that is being written."""


class Flushed(msgspec.Struct, frozen=True, tag=True):
    """The answer to Flush."""

    saved: tuple[int, ...]


class End(msgspec.Struct, frozen=True, tag=True):
    """The run is over."""


Command = Batch | Save | Export | Flush | End


@dataclass(frozen=True)
class Roles:
    """Data-parallel ranks of both roles, and the processes (cp x tp) of each."""

    num_policy: int
    num_critic: int
    num_sharing: int

    def name(self, index: int) -> str:
        """The process with this number in the group: the policy's batch leads, then the critic's."""
        is_critic = index >= self.num_policy
        count, rank = (self.num_critic, index - self.num_policy) if is_critic else (self.num_policy, index)
        role = "critic" if is_critic else "trainer"
        return role if count * self.num_sharing == 1 else f"{role}_{rank * self.num_sharing}"

    def critic_of(self, dp_rank: int) -> int:
        """The number in the group of the critic's rank that has the batches of one of the policy's."""
        return self.num_policy + dp_rank % self.num_critic

    def policies_of(self, dp_rank: int) -> list[int]:
        """The policy's ranks whose batches one of the critic's has."""
        return list(range(dp_rank, self.num_policy, self.num_critic))


class CriticWire:
    """One batch lead's end: typed values to and from others, by their numbers in the group."""

    def __init__(self, group: Any, roles: Roles, index: int) -> None:
        self._group, self.roles, self.index = group, roles, index

    @classmethod
    def open(cls, placement: CriticPlacement, mesh: Mesh, *, is_critic: bool, timeout_s: float) -> CriticWire:
        """Meet the others; the policy's first rank listens.

        Raises: WireError that names who did not come in time.
        """
        host, port, join_timeout_s = placement.host, placement.port, JOIN_TIMEOUT_S
        if mesh.is_lead and not is_critic:
            store = create_store(host, port, join_timeout_s, TITLE)
            store.set(NUM_POLICY, str(mesh.degrees.dp))
        else:
            store = connect_store(host, port, timeout_s, TITLE)
        roles = Roles(int(store.get(NUM_POLICY)), placement.num_workers, mesh.degrees.cp * mesh.degrees.tp)
        index = roles.num_policy * is_critic + mesh.dp_rank
        count = roles.num_policy + roles.num_critic
        if store.add(f"here/{index}", 1) > 1:
            raise WireError(f"{TITLE}: {roles.name(index)} was here before; start the run's processes anew")
        store.add("num_here", 1)
        deadline = time.monotonic() + join_timeout_s
        while store.add("num_here", 0) < count:
            if time.monotonic() > deadline:
                missing = [roles.name(each) for each in range(count) if not store.check([f"here/{each}"])]
                raise WireError(
                    f"{TITLE}: {', '.join(missing)} did not come to {host}:{port} within {join_timeout_s:g} s; "
                    "see its log"
                )
            time.sleep(POLL_S)
        return cls(new_gloo_group(store, "critic", index, count, timeout_s), roles, index)

    def send(self, value: Any, to: int) -> None:
        """Send a value; returns once the other has it.

        Raises: EngineError that names the other if it has ended.
        """
        message = torch.from_numpy(np.frombuffer(bytearray(encode_blob(value)), np.uint8))
        for tensor in (torch.tensor([len(message)]), message):
            self._wait("send", tensor, to)

    def receive(self, kind: Any, source: int) -> Any:
        """The next value of another, of this type.

        Raises: EngineError that names the other if it has ended.
        """
        size = torch.zeros(1, dtype=torch.int64)
        self._wait("recv", size, source)
        message = torch.empty(int(size), dtype=torch.uint8)
        self._wait("recv", message, source)
        return decode_blob(message.numpy().data, kind, where=f"the message of {self.roles.name(source)}")

    def close(self) -> None:
        with suppress(RuntimeError):
            self._group.shutdown()

    def _wait(self, verb: str, tensor: Tensor, other: int) -> None:
        try:
            getattr(self._group, verb)([tensor], other, 0).wait()
        except RuntimeError as cause:
            first = (str(cause).splitlines() or [""])[0]
            name = self.roles.name(other)
            if "imed out" in first:
                raise EngineError(f"{name} said nothing for too long ({first}); see its log") from cause
            raise EngineError(f"{name} {ENDED_FIRST}; see its log") from cause


def find_placement(cfg: TrainerConfig) -> CriticPlacement | None:
    """Where the critic is, if it has ranks of its own."""
    return None if cfg.critic is None else cfg.critic.placement


def open_wire(cfg: TrainerConfig, mesh: Mesh, *, is_critic: bool, timeout_s: float) -> CriticWire | None:
    """This rank's end of the wire; None on ranks that receive no batches."""
    placement = find_placement(cfg)
    assert placement is not None and cfg.critic is not None, "checked by the caller"
    if not mesh.is_batch_lead:
        return None
    return CriticWire.open(placement, mesh, is_critic=is_critic, timeout_s=timeout_s)


class RemoteCritic:
    """Stands for the critic on a rank of the policy; all ranks must call it alike."""

    def __init__(self, wire: CriticWire | None, mesh: Mesh, section: CriticSection) -> None:
        """wire: on batch leads."""
        self._wire, self._mesh, self.section = wire, mesh, section
        self._peer = -1 if wire is None else wire.roles.critic_of(mesh.dp_rank)
        self._loss_masks: list[np.ndarray] = []  # as the critic has them
        self._waits = {"time/wait_for_values": 0.0, "time/wait_for_critic": 0.0}
        self.saved: set[int] = set()
        """Steps whose checkpoints of the critic are written; on the lead."""

    def wait_ready(self, step: int) -> None:
        """Wait until the critic has its weights, those after `step`.

        Raises: ConfigError if it continues from another step.
        """
        if self._mesh.is_lead and self._wire is not None:
            ready = self._wire.receive(Ready, self._peer)
            if ready.step != step:
                raise ConfigError(
                    f"the critic continues after step {ready.step}, this trainer after step {step}; start both with "
                    "the same --resume"
                )

    def start_step(self, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Give the critic the batch; it computes its values meanwhile."""
        if self._wire is not None:
            self._loss_masks = [mb.loss_mask for mb in micro_batches]
            self._wire.send(Batch(step, tuple(micro_batches)), self._peer)

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[Float[np.ndarray, " _"]]:
        """Per micro batch, float32 [tokens]: the value before each rl token, 0 elsewhere."""
        start = time.perf_counter()
        found = None if self._wire is None else self._wire.receive(Values, self._peer)
        found = self._mesh.broadcast_to_cp_tp(found, Values | None)
        assert found is not None, "the batch lead has it"
        self._waits["time/wait_for_values"] = time.perf_counter() - start
        return list(found.values)

    def start_updates(self, micro_batches: Sequence[MicroBatch], num_updates: int) -> None:
        """Give the critic the returns; it trains meanwhile."""
        if self._wire is not None:
            returns = [mb.returns for mb in micro_batches if mb.returns is not None]
            assert len(returns) == len(micro_batches), "estimate returns first"
            masks = tuple(mb.loss_mask for mb in micro_batches)
            are_known = all(map(np.array_equal, masks, self._loss_masks))
            targets = Targets(tuple(returns), num_updates, None if are_known else masks)
            self._wire.send(targets, self._peer)

    def train(self, part: Sequence[MicroBatch], step: int) -> None:
        """Nothing: the critic's own ranks do so."""

    def pop_metrics(self) -> dict[str, float]:
        """Wait until the critic has trained the step; its metrics, on the lead."""
        if not self._mesh.is_lead or self._wire is None:
            return {}
        start = time.perf_counter()
        trained = self._wire.receive(Trained, self._peer)
        self.saved |= set(trained.saved)
        self._waits["time/wait_for_critic"] = time.perf_counter() - start
        return trained.metrics | self._waits

    def save(self, step: int) -> None:
        """Have the critic write its part of the checkpoint of `step`."""
        self._command(Save(step))

    def export(self, step: int) -> None:
        """Have the critic export itself."""
        self._command(Export(step))

    def flush(self) -> None:
        """Wait until all that the critic writes is on the disk."""
        self._command(Flush())
        if self._mesh.is_lead and self._wire is not None:
            self.saved |= set(self._wire.receive(Flushed, self._peer).saved)

    def end(self) -> None:
        """Let the critic's processes end."""
        self._command(End())

    def _command(self, command: Command) -> None:
        if self._wire is not None:
            self._wire.send(command, self._peer)
