"""The config of `serve`: the hub of a training service, its users and their shares, its trainer, its engines."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from stretto.config.root import GpuIds, InferenceConfig, RunRoot, short_name
from stretto.config.section import Section
from stretto.config.sections.algorithm import DefaultLoss, Loss
from stretto.config.sections.inference import InferenceSection
from stretto.config.sections.model import ModelSection, TokenizerSection
from stretto.config.sections.monitors import LogSection
from stretto.config.sections.trainer import RankKeys
from stretto.config.sections.transport import ControlSection


class UserSection(Section):
    """A person who may train, and who sees and changes only their own runs."""

    token: str | None = Field(None, min_length=16)
    """Value of X-API-Key in requests; clients of Tinker accept those that begin with `tml-`. None: one is generated. It
    is kept in RUN/tokens.json, which only the service's owner can read, and in no config."""
    weight: float = Field(1.0, gt=0)
    """Share of trainer and engines, relative to the weights of the other active users."""
    priority: int = 0
    """Runs of a higher priority are trained first, whatever the weights."""
    tokens_per_minute: float | None = Field(None, gt=0)
    """Most tokens that each run of the user trains on per minute, averaged; None: no limit."""
    max_runs: int | None = Field(None, gt=0)
    """Most runs of the user at a time; None: as many as leave one place for each of the users who have no run."""
    max_samples: int = Field(64, gt=0)
    """Most sequences that the engines generate for the user at a time."""


class ServiceSection(Section):
    """The hub: its HTTP API, its limits, its users."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(8700, ge=1, le=65535)
    """TCP port."""
    public_url: str | None = None
    """Address by which users reach the hub if it is behind a proxy, `https://tinker.example`; links to files begin with
    it. None: with `http://` and what a request has in its Host header."""
    users: dict[str, UserSection] = Field({"user": UserSection()}, min_length=1)
    """By name. The admin is none of these and has another token."""
    runs_dir: Path | None = None
    """Directory that is watched: RUNS_DIR/run_*/control/orch.toml, the file of `rl`, registers a run. None: none is."""
    runs_user: str | None = None
    """User that runs of runs_dir belong to; None: the only user."""
    max_concurrent_runs: int = Field(8, gt=0)
    """Runs with an adapter in the trainer at a time."""
    full_finetuning: bool = False
    """Train all weights instead of an adapter, on one rank. There is one run at a time, whatever max_concurrent_runs
    says, and the next one starts with the model's own weights again. Engines have one version at a time."""
    max_lora_rank: int = Field(32, gt=0)
    """Largest rank of an adapter."""
    max_tokens_per_pass: int | None = Field(None, gt=0)
    """Most tokens of one pass, which several runs share; None: seq_len."""
    max_tokens_per_turn: int = Field(16384, gt=0)
    """Most tokens that the trainer computes before another run has its turn."""
    max_waiting_requests: int = Field(256, gt=0)
    """Most requests of one run that wait for the trainer; one more is refused with 429, and clients send it again."""
    max_waiting_bytes: int = Field(1 << 30, gt=0)
    """Most bytes of one user's requests that are read or wait for the trainer; one more is refused with 429."""
    max_checkpoint_bytes: int = Field(256 << 30, gt=0)
    """Most bytes of one user's checkpoints on the disk; a save beyond is refused with 413 until some are deleted."""
    max_samples: int = Field(256, gt=0)
    """Sequences that the engines generate at a time, of all users."""
    max_waiting_samples: int = Field(1024, gt=0)
    """Most requests for samples of one user that wait; one more is refused with 429, and clients send it again."""
    max_adapters: int = Field(8, gt=0)
    """Versions of adapters loaded in each engine at a time; others are loaded when they are requested."""
    save_steps: int = Field(10, gt=0)
    """A run's state is saved after so many of its steps. Requests since are kept beside it and computed again after a
    crash, so that nothing is lost."""
    kept_versions: int = Field(4, gt=0)
    """Published versions of a run's adapter that stay on disk; requests may still use the older ones of them."""
    sampler_timeout_s: float | None = Field(3600.0, gt=0)
    """Weights that are only a sampler's, saved without a name or saved over since, are deleted when nobody has sampled
    from them for so long; None: never."""
    idle_timeout_s: float | None = Field(1800.0, gt=0)
    """A run whose client is silent for so long is saved and gives its place back; None: never."""
    max_failures: int = Field(3, gt=0)
    """After so many failed requests in a row a run is frozen: it gets nothing until it is resumed or evicted."""
    engine_urls: list[str] = Field([])
    """Addresses of engines; `serve` fills in those that it starts. Given: it starts none, and uses these."""
    router_url: str | None = None
    """Address of a router before these engines, which spreads the requests for samples; adapters are loaded in each
    engine. `serve` fills in the one that `[inference.router]` starts. None: each goes to the engine with the fewest."""
    max_audit_bytes: int = Field(256 << 20, gt=0)
    """Most bytes of the audit log, RUN/service/audit.jsonl and audit.1.jsonl; what is oldest is deleted."""
    gap_timeout_s: float = Field(120.0, gt=0)
    """Longest wait for a request whose number was skipped; then the later ones fail."""

    @property
    def num_places(self) -> int:
        """Runs in the trainer at a time."""
        return 1 if self.full_finetuning else self.max_concurrent_runs


class ServeTrainerSection(RankKeys):
    """The trainer of a service: one frozen model, and an adapter per run."""

    num_ranks: int = Field(1, gt=0)
    """Processes; each computes a part of every batch."""
    loss: Loss = DefaultLoss()
    """The loss of runs that send none."""
    max_resident: int | None = Field(None, gt=0)
    """Runs whose adapters and optimizer states are in the memory of the device; those of others wait in the host's and
    are brought back when their turn comes. None: all."""
    max_restarts: int = Field(10, ge=0)
    """Restarts of each rank that ends, and one more per hour that it ran since; runs go on where they were."""


class ServeConfig(RunRoot):
    """`serve`: one trainer and its engines for many runs, each with an adapter of its own, behind one HTTP API."""

    model: ModelSection = ModelSection()
    tokenizer: TokenizerSection = TokenizerSection()
    seq_len: int = Field(2048, gt=1)
    """Longest sequence that a run may train on, tokens."""
    trainer: ServeTrainerSection = ServeTrainerSection()
    inference: InferenceSection = InferenceSection(router=None)
    service: ServiceSection = ServiceSection()
    control: ControlSection = ControlSection()
    trainer_gpu_ids: GpuIds = None
    """GPUs of the trainer, one rank each; None: the first after inference's."""
    inference_gpu_ids: GpuIds = None
    """GPUs of inference; None: the first ones."""
    log: LogSection = LogSection()

    def _default_name(self) -> str:
        return f"service-{short_name(self.model.name)}"

    def inference_config(self) -> InferenceConfig:
        """The root of the engines."""
        model = {"model": self.inference.model or self.model.name}
        return InferenceConfig.model_validate(self._process_data(self.inference) | model)
