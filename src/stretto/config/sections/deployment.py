"""[deployment], [run], [resume]: where processes run, and what the run is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from stretto.config.section import Section


class SingleNodeDeployment(Section):
    """Everything on this machine."""

    type: Literal["single_node"] = "single_node"
    num_train_gpus: int | None = Field(None, ge=0)
    """GPUs of the trainer; None: 1 where there are GPUs, else the CPU."""
    num_infer_gpus: int | None = Field(None, ge=0)
    """GPUs of inference; None: 1 where there are GPUs, else the CPU."""
    num_teacher_gpus: int | None = Field(None, ge=0)
    """GPUs of the teacher's engine, where `rl` starts one; None: 1 where there are GPUs, else the CPU."""


class MultiNodeDeployment(Section):
    """A run over several machines: the same command is started on each, and each starts its own processes."""

    type: Literal["multi_node"] = "multi_node"
    num_train_nodes: int = Field(1, gt=0)
    """Nodes of the trainer; the first also has the orchestrator and the console."""
    num_infer_nodes: int | None = Field(None, gt=0)
    """Nodes of one replica of inference; None: as many as inference.deployment takes."""
    num_infer_replicas: int = Field(1, gt=0)
    """Times [inference] as a whole is there, each with nodes and a router of its own."""
    gpus_per_node: int = Field(8, ge=0)
    """GPUs of a node of the trainer; 0: nodes without GPUs, one rank each."""
    hosts: list[str] | None = None
    """Addresses of the nodes as the others reach them, the trainer's first; None: only a dry run does without."""
    node_rank: int | None = Field(None, ge=0)
    """Which of the hosts this machine is, from 0; None: the one whose address is this machine's."""
    rendezvous_port: int = Field(29500, ge=1, le=65535)
    """Port on the first node where the trainer's ranks meet."""

    @property
    def num_ranks(self) -> int:
        """Processes of the trainer."""
        return self.num_train_nodes * max(1, self.gpus_per_node)

    # What is counted machine by machine with one node.
    num_train_gpus: ClassVar[None] = None
    num_infer_gpus: ClassVar[None] = None
    num_teacher_gpus: ClassVar[None] = None


Deployment = Annotated[SingleNodeDeployment | MultiNodeDeployment, Field(discriminator="type")]


class RanksDeployment(Section):
    """Where `sft` runs: on this machine. On several, torchrun starts it."""

    type: Literal["single_node"] = "single_node"
    num_train_gpus: int | None = Field(None, ge=1)
    """GPUs, one rank each; on a machine without GPUs, ranks on its CPU. None: one rank, or what torchrun has
    started."""


class RunSection(Section):
    """The run directory is <output_dir>/<run.name>."""

    name: str | None = None
    """Name of the run; None: <environment>-<model>."""


class ResumeSection(Section):
    """Continue a run from one of its checkpoints, or begin a new one at a checkpoint of another."""

    step: int | None = Field(None, ge=1)
    """Step to resume from; None: the latest complete checkpoint."""
    dir: Path | None = None
    """Directory of another run, or of one of its checkpoints (`RUN/checkpoints/step_N`): this run begins where
    that one stood, as a run of its own; the other is only read. None: continue the run of this name."""
