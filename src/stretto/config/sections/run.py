"""Keys that both trainer and orchestrator need: each stands once, at the root of the run."""

from __future__ import annotations

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
    control: ControlSection = ControlSection()
    monitors: MonitorsSection = MonitorsSection()
    log: LogSection = LogSection()
