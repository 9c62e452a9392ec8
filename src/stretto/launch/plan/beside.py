"""Engines beside the policy's, as a plan meets them: they serve other models, and never get new weights.

An add-on has them: `plan` of the group `stretto.beside`. A plan whose config names none has `EnginesBeside` itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stretto import addons
from stretto.base.paths import RunDir
from stretto.base.ports import PortClaims
from stretto.base.secret import Secret
from stretto.config.root import RLConfig
from stretto.config.section import Section
from stretto.config.sections.inference import InferenceSection
from stretto.launch.plan.processes import ProcessSpec

GROUP = "stretto.beside"


class EnginesBeside:
    """No engines beside the policy's; the class of an add-on overrides what it has."""

    def sections(self, cfg: RLConfig) -> dict[str, str]:
        """The config's section of each role of process."""
        return {}

    def with_engines(self, cfg: RLConfig) -> RLConfig:
        """The root with the kind of engine that each model needs, where the user left the choice.

        Raises: ConfigError for a model that is not started.
        """
        return cfg

    def with_names(self, cfg: RLConfig) -> RLConfig:
        """The root in which the orchestrator knows every model, at addresses where nobody answers."""
        return cfg

    def with_ports(self, cfg: RLConfig, ports: PortClaims, notes: list[str]) -> RLConfig:
        """The root with free ports of this machine.

        Raises: ConfigError for a port of the user that is taken.
        """
        return cfg

    def with_hosts(self, cfg: RLConfig, hosts: Sequence[str]) -> RLConfig:
        """The root with engines on nodes of their own, which are the last of the run.

        hosts: addresses of these nodes.
        """
        return cfg

    def with_gpus(
        self, cfg: RLConfig, taken: set[str], gpus: Sequence[str], notes: list[str]
    ) -> tuple[RLConfig, dict[str, list[str]]]:
        """The root with shares of the GPUs' memory, and the GPUs of each role.

        taken: those of the policy. gpus: all of this machine. Raises: ConfigError if there are too few.
        """
        return cfg, {}

    def processes(
        self, cfg: RLConfig, run: RunDir, secret: Secret | None, gpus_of: Mapping[str, list[str]],
        keyed: InferenceSection | None, threads: int,
    ) -> tuple[list[ProcessSpec], dict[str, str]]:  # fmt: skip
        """The processes on this machine, and the keys of their engines as the orchestrator's environment.

        gpus_of: by role. keyed: [inference] with its key. threads: those of one of its engines.
        """
        return [], {}

    def node_processes(
        self, cfg: RLConfig, run: RunDir, secret: Secret | None
    ) -> tuple[list[ProcessSpec], dict[str, str]]:
        """The same over several nodes."""
        return [], {}

    def configs(self, cfg: RLConfig, hosts: Sequence[str]) -> dict[str, Section]:
        """The config files of the processes; hosts: addresses of all nodes."""
        return {}


def engines_beside(cfg: RLConfig) -> EnginesBeside:
    """The engines beside the policy's that a config names.

    Raises: ConfigError if no add-on has them.
    """
    return addons.load(GROUP, "plan", cfg.beside) if cfg.beside else EnginesBeside()
