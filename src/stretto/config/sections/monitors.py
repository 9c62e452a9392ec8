"""[monitors.*] and [log]: where metrics and log lines go. metrics.jsonl is always written."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stretto.config.section import Section


class WandbSection(Section):
    """Weights & Biases (extra `wandb`)."""

    project: str = "stretto"
    """Project name."""
    name: str | None = None
    """Name of the run there; None: the run's name."""
    entity: str | None = None
    """Team or user; None: the default of the login."""
    tags: list[str] = Field([])
    """Tags of the run."""
    offline: bool = False
    """Write to RUN/wandb without a network; `wandb sync` uploads later."""


class TensorboardSection(Section):
    """TensorBoard event files under RUN/tensorboard (extra `tensorboard`)."""


class TrackioSection(Section):
    """trackio, a local tracker (extra `trackio`)."""

    project: str = "stretto"
    """Project name."""


class MonitorsSection(Section):
    """A section that is present is a monitor that is on."""

    wandb: WandbSection | None = None
    tensorboard: TensorboardSection | None = None
    trackio: TrackioSection | None = None


class LogSection(Section):
    """Log files are RUN/logs/<role>.log; the console shows one line per step."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe line written."""
    json_logging: bool = Field(False)
    """Write JSON lines instead of text."""
