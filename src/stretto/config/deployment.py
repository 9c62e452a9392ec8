"""[deployment], [run], [resume]: where processes run, and what the run is called."""

from __future__ import annotations

from typing import Annotated, Literal

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


Deployment = Annotated[SingleNodeDeployment, Field()]


class RunSection(Section):
    """The run directory is <output_dir>/<run.name>."""

    name: str | None = None
    """Name of the run; None: <environment>-<model>."""


class ResumeSection(Section):
    """Continue a run from one of its checkpoints."""

    step: int | None = Field(None, ge=1)
    """Step to resume from; None: the latest complete checkpoint."""
