"""What a run asks about engines before they start: an `Engine` describes each, our own here and others in add-ons."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stretto import addons
from stretto.base.errors import ConfigError
from stretto.config.root import InferenceConfig, RLConfig
from stretto.config.sections.inference import InferenceSection
from stretto.data.model_file import ModelFile
from stretto.families.table import check_installed

GROUP = "stretto.engines"
Fault = tuple[str, str]
"""A key with its value, below its section, and why a CPU does not do it, with what to do."""


class Engine:
    """An engine; what it says here is that of one with which everything goes."""

    title = ""
    planner: Any = None
    """A `launch.plan.engines.Planner`, for deployments and options that are its own."""

    def missing(self) -> str | None:
        """How to install it, if it is not installed here."""
        return None

    def check_model(self, section: InferenceSection, model: ModelFile, name: str, *, is_cpu: bool) -> None:
        """Check that it computes a model, whose name is for messages, and drafts for it as the section says.

        Raises: ConfigError with what to do instead.
        """

    def check_adapter(self, cfg: RLConfig, *, is_cpu: bool) -> None:
        """Raises: ConfigError if the run serves with it and tells it to compute an adapter that it cannot."""

    def check_drafts(self, section: InferenceSection, path: str, cfg: RLConfig | None = None) -> None:
        """Raises: ConfigError if it drafts, and is to return, or in this run to sample, what it cannot then."""

    def faults_on_cpu(self, section: InferenceSection) -> Iterable[Fault]:
        """Settings that need a GPU."""
        return ()

    def notes(self, cfg: RLConfig, *, is_on_gpu: bool) -> Iterable[str]:
        """What it does in this run that its user should know, one sentence each; also where another engine serves."""
        return ()

    def serve(self, cfg: InferenceConfig, directory: Path) -> int:
        """Serve a model until it is stopped; the exit status. Our own is served by inference/server.py."""
        raise NotImplementedError


class _Embedded(Engine):
    title = "the embedded engine"

    def check_model(self, section: InferenceSection, model: ModelFile, name: str, *, is_cpu: bool) -> None:
        if not model.is_own:
            check_installed(model.family, f'{name}, of family {model.family}, with inference.engine = "embedded"')
            raise ConfigError(
                f'{name}: inference.engine = "embedded" has no {model.family}; set "vllm", or leave it out'
            )
        if section.speculation is not None:
            check_drafter("inference")


EMBEDDED = _Embedded()


def check_drafter(path: str) -> None:
    """Raises: MissingError if the section at this path drafts in the embedded engine, and no add-on does."""
    addons.check("stretto.inference", "drafts", f"[{path}.speculation] of the embedded engine")


def engine_of(section: InferenceSection, needed_by: str = "", *, has_gpu: bool, is_own: bool = True) -> Engine:
    """The engine that serves a section; is_own: whether the embedded one has the model's family.

    needed_by: what needs it, for the message. Raises: ConfigError if its add-on is not installed.
    """
    name = section.chosen_engine(has_gpu=has_gpu, is_own=is_own)
    if name == "embedded":
        return EMBEDDED
    found: Engine = addons.load(GROUP, name, needed_by or f'inference.engine = "{name}"')
    return found


def all_engines() -> list[Engine]:
    """Our own and those of the add-ons that are installed."""
    return [EMBEDDED, *addons.load_all(GROUP).values()]
