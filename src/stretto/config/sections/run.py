"""Keys that both trainer and orchestrator need: each stands once, at the root of the run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stretto.config.section import Section
from stretto.config.sections.model import ModelSection, TokenizerSection
from stretto.config.sections.monitors import LogSection, MonitorsSection
from stretto.config.sections.transport import (
    ControlSection,
    RolloutTransport,
    ShmWeights,
    WeightBroadcast,
    ZmqRollouts,
)


class ColocateSection(Section):
    """Present: trainer and engines take turns on the same devices: one puts its memory away before the other takes its
    own. Steps are synchronous."""

    offload_train: bool = True
    """The trainer puts weights and optimizer state into the memory of the host, on a CPU into a file, while engines
    sample."""
    offload_rollout: bool = True
    """Engines sleep while the trainer trains."""
    sleep_level: Literal[1, 2] = 2
    """How sleeping engines treat their weights: 1 keeps them in the memory of the host; 2 drops them, because the next
    version brings all. A version that is an adapter or a delta does not bring all."""


class RunKeys(Section):
    """Keys of the whole run."""

    model: ModelSection = ModelSection()
    tokenizer: TokenizerSection = TokenizerSection()
    max_steps: int | None = Field(None, gt=0)
    """Steps to train; None: until stopped."""
    seq_len: int = Field(2048, gt=1)
    """Longest prompt plus reply, tokens; also the size of a packed row."""
    seed: int = 0
    """Seed of everything random."""
    rollout_transport: RolloutTransport = ZmqRollouts()
    weight_broadcast: WeightBroadcast = ShmWeights()
    colocate: ColocateSection | None = None
    control: ControlSection = ControlSection()
    monitors: MonitorsSection = MonitorsSection()
    log: LogSection = LogSection()
