"""The wire between the policy's ranks and those of a critic of its own; both ends.

Ranks that receive batches (batch leads) exchange messages: the policy's i-th with the critic's i % C-th, where C
divides the number of the policy's. A step:

    policy                                   critic
    Batch(micro batches)         ->          computes values under the weights of the last step
      meanwhile: its own and the reference's log-probabilities
                                 <-          Values
    Targets(returns)             ->          its updates
      meanwhile: the policy's updates
                                 <-          Trained(metrics, written checkpoints); from lead to lead

Between steps the policy sends Commands. A wait lasts at most as long as ranks wait for a batch; a process that has
ended closes its sockets, and the error then names it at once. The group is gloo's and has no authentication, like those
of the ranks themselves: use it in private networks only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from stretto.base.errors import ENDED_FIRST, ConfigError, EngineError, WireError
from stretto.config.root import TrainerConfig
from stretto.records.codec import decode_blob, encode_blob
from stretto.records.sample import MicroBatch
from stretto.trainer.process import find_group_timeout_s
from stretto.trainer.ranks.mesh import Mesh, join_group
from stretto.trainer.valuer import Valuer
from stretto.transports.weights.store import connect_store, create_store, new_gloo_group

if TYPE_CHECKING:
    from jaxtyping import Float

TITLE = "trainer.critic.placement"
JOIN_TIMEOUT_S = 600.0
NUM_POLICY = "num_policy"  # key of the store: the policy's batch leads


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The critic has loaded its weights."""

    step: int
    """The step after which it continues."""


class Batch(msgspec.Struct, frozen=True, tag=True):
    """The batch of a step that one of the policy's data-parallel ranks received."""

    step: int
    micro_batches: tuple[MicroBatch, ...]


class Values(msgspec.Struct, frozen=True, tag=True):
    """Per micro batch, float32 [tokens]: the value before each rl token, 0 elsewhere."""

    values: tuple[np.ndarray, ...]


class Targets(msgspec.Struct, frozen=True, tag=True):
    """What the critic trains on, in addition to the batch."""

    returns: tuple[np.ndarray, ...]
    """Per micro batch, float32 [tokens]."""
    num_updates: int
    """Updates per epoch."""
    loss_masks: tuple[np.ndarray, ...] | None = None
    """Per micro batch, bool [tokens]; None if the user's functions have left those of the batch as they were."""


class Trained(msgspec.Struct, frozen=True, tag=True):
    """The critic has trained the step."""

    step: int
    metrics: dict[str, float]
    saved: tuple[int, ...]
    """Steps whose checkpoints have been written since the last message."""


class Command(msgspec.Struct, frozen=True, tag=True):
    """What the critic does after a step.

    save: write a checkpoint while training goes on. export: write a model directory. flush: wait until all files are
    written, and answer with Flushed. end: end the process, because the run is over.
    """

    verb: Literal["save", "export", "flush", "end"]


class Flushed(msgspec.Struct, frozen=True, tag=True):
    """The answer to the command `flush`."""

    saved: tuple[int, ...]
    """As in Trained."""


@dataclass(frozen=True)
class Roles:
    """How many data-parallel ranks both roles have, and of how many processes each consists.

    num_sharing: cp x tp processes, whose numbers follow each other. num_stages: as many times these.
    """

    num_policy: int
    num_critic: int
    num_sharing: int
    num_stages: int = 1

    def name(self, index: int) -> str:
        """The process name of a member of the group, which are the policy's batch leads, then the critic's."""
        is_critic = index >= self.num_policy
        count, rank = (self.num_critic, index - self.num_policy) if is_critic else (self.num_policy, index)
        role = "critic" if is_critic else "trainer"
        return role if count * self.num_sharing * self.num_stages == 1 else f"{role}_{rank * self.num_sharing}"

    def critic_of(self, dp_rank: int) -> int:
        """The number in the group of the critic's rank that gets the batches of this rank of the policy."""
        return self.num_policy + dp_rank % self.num_critic

    def policies_of(self, dp_rank: int) -> list[int]:
        """The policy's ranks whose batches this rank of the critic gets."""
        return list(range(dp_rank, self.num_policy, self.num_critic))


class CriticWire:
    """One batch lead's end: sends typed values to members of the group, by their numbers, and receives them."""

    def __init__(self, group: Any, roles: Roles) -> None:
        self._group, self.roles = group, roles

    def send(self, value: Any, to: int) -> None:
        """Send a value; returns once it is received.

        Raises: EngineError that names the receiver if it has ended.
        """
        message = torch.from_numpy(np.frombuffer(bytearray(encode_blob(value)), np.uint8))
        for tensor in (torch.tensor([len(message)]), message):
            self._wait("send", tensor, to)

    def receive(self, kind: Any, source: int) -> Any:
        """The next value from a member of the group.

        Raises: EngineError that names the sender if it has ended.
        """
        size = torch.zeros(1, dtype=torch.int64)
        self._wait("recv", size, source)
        message = torch.empty(int(size), dtype=torch.uint8)
        self._wait("recv", message, source)
        return decode_blob(message.numpy().data, kind, where=f"the message of {self.roles.name(source)}")

    def _wait(self, verb: str, tensor: Tensor, other: int) -> None:
        try:
            getattr(self._group, verb)([tensor], other, 0).wait()
        except RuntimeError as cause:
            first = (str(cause).splitlines() or [""])[0]
            name = self.roles.name(other)
            if "imed out" in first:
                raise EngineError(f"{name} sent nothing for too long ({first}); see its log") from cause
            raise EngineError(f"{name} {ENDED_FIRST}; see its log") from cause


def open_wire(cfg: TrainerConfig, mesh: Mesh, *, is_critic: bool) -> CriticWire | None:
    """This rank's end of the wire, once all are connected; None on ranks that receive no batches.

    The policy's first rank listens.

    Raises: WireError that names the processes that did not connect in time.
    """
    if not mesh.is_batch_lead:
        return None
    assert cfg.critic is not None and cfg.critic.placement is not None, "checked by the caller"
    placement, timeout_s = cfg.critic.placement, find_group_timeout_s(cfg)
    host, port = placement.host, placement.port
    if mesh.is_lead and not is_critic:
        store = create_store(host, port, JOIN_TIMEOUT_S, TITLE)
        store.set(NUM_POLICY, str(mesh.degrees.dp))
    else:
        store = connect_store(host, port, timeout_s, TITLE)
    degrees = mesh.degrees
    roles = Roles(int(store.get(NUM_POLICY)), placement.num_workers, degrees.cp * degrees.tp, degrees.pp)
    index = roles.num_policy * is_critic + mesh.dp_rank
    count = roles.num_policy + roles.num_critic
    if absent := join_group(store, index, count, JOIN_TIMEOUT_S, name=roles.name(index)):
        raise WireError(
            f"{TITLE}: {', '.join(map(roles.name, absent))} did not connect to {host}:{port} within "
            f"{JOIN_TIMEOUT_S:g} s; see its log"
        )
    return CriticWire(new_gloo_group(store, "critic", index, count, timeout_s), roles)


class RemoteCritic(Valuer):
    """Takes the critic's place on a rank of the policy; all ranks must make the same calls."""

    network = None

    def __init__(self, cfg: TrainerConfig, mesh: Mesh) -> None:
        assert cfg.critic is not None, "the caller has looked"
        self._cfg, self._mesh, self.section = cfg, mesh, cfg.critic
        self._wire: CriticWire | None = None  # stays so on ranks that are not batch leads
        self._peer = -1
        self._loss_masks: list[np.ndarray] = []  # those that the critic has received
        self._waits = {"time/wait_for_values": 0.0, "time/wait_for_critic": 0.0}
        self._saved: set[int] = set()  # on the lead: steps for which the critic has written its part of the checkpoint

    def connect(self) -> None:
        self._wire = open_wire(self._cfg, self._mesh, is_critic=False)
        if self._wire is not None:
            self._peer = self._wire.roles.critic_of(self._mesh.dp_rank)

    def begin(self, step: int) -> None:
        """Wait until the critic has loaded its weights, which must be those after `step`.

        Raises: ConfigError if it continues from another step.
        """
        if self._mesh.is_lead:
            assert self._wire is not None, "the lead is a batch lead"
            ready = self._wire.receive(Ready, self._peer)
            if ready.step != step:
                raise ConfigError(
                    f"the critic continues after step {ready.step}, this trainer after step {step}; start both with "
                    "the same --resume"
                )

    def start_step(self, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Send the critic the batch; it computes values while this rank goes on."""
        if self._wire is not None:
            self._loss_masks = [mb.loss_mask for mb in micro_batches]
            self._wire.send(Batch(step, tuple(micro_batches)), self._peer)

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[Float[np.ndarray, " _"]]:
        """Per micro batch, float32 [tokens]: the value before each rl token, 0 elsewhere."""
        start = time.perf_counter()
        values = None if self._wire is None else self._wire.receive(Values, self._peer)
        values = self._mesh.broadcast_batch(values, Values | None)
        assert values is not None, "the batch lead has received them"
        self._waits["time/wait_for_values"] = time.perf_counter() - start
        return list(values.values)

    def start_updates(self, micro_batches: Sequence[MicroBatch], num_updates: int) -> None:
        """Send the critic the returns; it trains while this rank goes on."""
        if self._wire is not None:
            returns = [mb.returns for mb in micro_batches if mb.returns is not None]
            assert len(returns) == len(micro_batches), "estimate returns first"
            masks = tuple(mb.loss_mask for mb in micro_batches)
            are_known = all(map(np.array_equal, masks, self._loss_masks))
            targets = Targets(tuple(returns), num_updates, None if are_known else masks)
            self._wire.send(targets, self._peer)

    def pop_metrics(self) -> dict[str, float]:
        """Wait until the critic has trained the step; its metrics, on the lead."""
        if not self._mesh.is_lead:
            return {}
        assert self._wire is not None, "the lead is a batch lead"
        start = time.perf_counter()
        trained = self._wire.receive(Trained, self._peer)
        self._saved |= set(trained.saved)
        self._waits["time/wait_for_critic"] = time.perf_counter() - start
        return trained.metrics | self._waits

    def save(self) -> None:
        self._command("save")

    def has_saved(self, step: int) -> bool:
        return step in self._saved

    def export(self, cfg: TrainerConfig, step: int, tokenizer_dir: Path) -> None:
        self._command("export")

    def end(self) -> None:
        self._command("end")

    def _command(self, verb: Literal["save", "export", "flush", "end"]) -> None:
        if self._wire is not None:
            self._wire.send(Command(verb), self._peer)

    def flush(self) -> None:
        """Wait until all files of the critic are written."""
        self._command("flush")
        if self._mesh.is_lead:
            assert self._wire is not None, "the lead is a batch lead"
            self._saved |= set(self._wire.receive(Flushed, self._peer).saved)
