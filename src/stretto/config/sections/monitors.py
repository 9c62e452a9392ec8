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
    group: str | None = None
    """Group of the run there; None: the name."""
    entity: str | None = None
    """Team or user; None: the default of the login."""
    tags: list[str] = Field([])
    """Tags of the run."""
    offline: bool | None = None
    """Write to RUN/wandb without a network; `wandb sync` uploads later. None: as WANDB_MODE or `wandb offline` says,
    else online."""


class TensorboardSection(Section):
    """TensorBoard event files under RUN/tensorboard (extra `tensorboard`)."""


class TrackioSection(Section):
    """trackio, a local tracker (extra `trackio`)."""

    project: str = "stretto"
    """Project name."""


class MlflowSection(Section):
    """MLflow (extra `mlflow`)."""

    experiment: str = "stretto"
    """Name of the experiment."""
    name: str | None = None
    """Name of the run there; None: the run's name."""
    uri: str | None = None
    """Address of a server, or of a database such as `sqlite:///runs.db`. None: as MLFLOW_TRACKING_URI says, else a
    database in RUN/mlflow."""


class SwanlabSection(Section):
    """SwanLab (extra `swanlab`)."""

    project: str = "stretto"
    """Project name."""
    name: str | None = None
    """Name of the experiment there; None: the run's name."""
    workspace: str | None = None
    """Team or user; None: the default of the login."""
    offline: bool | None = None
    """Write to RUN/swanlab without a network; `swanlab sync` uploads later. None: as SWANLAB_MODE says, else online."""


class HeartbeatSection(Section):
    """A request after every step, to a service that raises an alarm when none comes."""

    url: str
    """Address of the request, `https://...`."""
    min_interval_s: float = Field(10.0, ge=0)
    """Least seconds between two requests."""


class PrometheusSection(Section):
    """The latest metrics of trainer and orchestrator for Prometheus, at /metrics; /health answers 200."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(9400, ge=1, le=65534)
    """TCP port of the trainer's metrics; the orchestrator's are at the next one."""


class MonitorsSection(Section):
    """Each section that is present turns on a monitor."""

    samples_interval: int | None = Field(10, gt=0)
    """Steps between two tables of trained rollouts with histograms of their rewards and lengths, for trackers; None:
    none. The ledger has all rollouts."""
    wandb: WandbSection | None = None
    tensorboard: TensorboardSection | None = None
    trackio: TrackioSection | None = None
    mlflow: MlflowSection | None = None
    swanlab: SwanlabSection | None = None
    heartbeat: HeartbeatSection | None = None
    prometheus: PrometheusSection | None = None


class LogSection(Section):
    """Log files are RUN/logs/<role>.log; the console shows one line per step."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe line written."""
    json_logging: bool = Field(False)
    """Write JSON lines instead of text."""
