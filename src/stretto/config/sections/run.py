"""Keys that both trainer and orchestrator need: each stands once, at the root of the run."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from stretto.config.section import Section
from stretto.config.sections.model import ModelSection, TokenizerSection
from stretto.config.sections.monitors import LogSection, MonitorsSection
from stretto.config.sections.transport import ControlSection, RolloutTransport, ShmWeights, WeightBroadcast, ZmqRollouts


class ColocateSection(Section):
    """Present: trainer and engines take turns on the same devices: one frees its memory before the other allocates its
    own. Steps are synchronous."""

    offload_train: bool = True
    """The trainer puts weights and optimizer state into the memory of the host, on a CPU into a file, while engines
    sample."""
    offload_rollout: bool = True
    """Engines sleep while the trainer trains."""
    sleep_level: Literal[1, 2] = 2
    """How sleeping engines treat their weights: 1 keeps them in the memory of the host; 2 drops them, because the next
    version brings all. A version that is an adapter or a delta does not bring all."""


class PricesSection(Section):
    """What a run pays for, in any one currency. Frozen models have prices of their own, which count too."""

    hour: float = Field(0.0, ge=0)
    """Price of an hour of everything that the run holds: all its machines together."""
    sampled_tokens: float = Field(0.0, ge=0)
    """Price of a million sampled tokens, of all rollouts that were played, trained or not."""
    trained_tokens: float = Field(0.0, ge=0)
    """Price of a million trained tokens, prompts included."""

    @property
    def is_any(self) -> bool:
        """Whether anything has a price."""
        return bool(self.hour or self.sampled_tokens or self.trained_tokens)


class BudgetSection(Section):
    """Present: what the run may use, over all its starts. At the first bound that it reaches it saves a checkpoint and
    ends, at most one step later; `--resume` with a larger bound goes on."""

    max_hours: float | None = Field(None, gt=0)
    """Hours of the run's processes, without the time between two starts; None: no bound."""
    max_tokens: int | None = Field(None, gt=0)
    """Trained tokens, prompts included; None: no bound."""
    max_cost: float | None = Field(None, gt=0)
    """Cost, in the currency of the prices; None: no bound."""
    prices: PricesSection = PricesSection()

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds that are given, by key."""
        keys = ("max_hours", "max_tokens", "max_cost")
        return {key: float(value) for key in keys if (value := getattr(self, key)) is not None}


class ServiceRunSection(Section):
    """Present (`--service URL`): a training service trains this run's adapter and samples from it (`stretto serve`);
    only the orchestrator and a stand-in for the trainer run here."""

    SHORT: ClassVar[str] = "url"
    """The key that a text in place of the table sets."""

    url: str = "http://127.0.0.1:8700"
    """Address of the service."""
    token_var: str = Field("STRETTO_SERVICE_TOKEN", pattern=r"^[A-Za-z_]\w*$")
    """Environment variable that holds your token of the service."""
    max_bytes: int = Field(64 << 20, gt=0)
    """Micro batches of a step are sent in requests of about so many bytes; the service takes up to 256 MiB."""

    def engine_url(self, run_name: str) -> str:
        """The address at which the service offers an engine's API for a run."""
        return f"{self.url.rstrip('/')}/runs/{name_at_service(run_name)}/engine"


def name_at_service(run_name: str) -> str:
    """A run's name in a service: letters, digits, dots, `_` and `-`."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", run_name)


def _as_table(value: Any) -> Any:
    """`service = URL` is short for `service.url = URL`."""
    return {ServiceRunSection.SHORT: value} if isinstance(value, str) and value != "None" else value


ServiceOfRun = Annotated[ServiceRunSection | None, BeforeValidator(_as_table)]


class RunKeys(Section):
    """Keys of the whole run."""

    model: ModelSection = ModelSection()
    tokenizer: TokenizerSection = TokenizerSection()
    max_steps: int | None = Field(None, gt=0)
    """Steps to train; None: until stopped."""
    budget: BudgetSection | None = None
    seq_len: int = Field(2048, gt=1)
    """Longest prompt plus reply, tokens; also the size of a packed row."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of everything random."""
    deterministic: bool = False
    """What is played, by which weights and in which batch follows from draws and steps alone, never from the clock: a
    run with the same seed has the same bits, whatever the load and the delays of environments. Each batch is played by
    one version as a whole, and new weights wait for it."""
    rollout_transport: RolloutTransport = ZmqRollouts()
    weight_broadcast: WeightBroadcast = ShmWeights()
    colocate: ColocateSection | None = None
    control: ControlSection = ControlSection()
    service: ServiceOfRun = None
    monitors: MonitorsSection = MonitorsSection()
    log: LogSection = LogSection()
