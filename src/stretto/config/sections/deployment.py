"""[deployment], [slurm], [ray], [run], [resume]: machines of a run, its name, its start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from stretto.config.section import Section

RAY_HEAD = re.compile(r"[^\s/]+:\d+")
"""An address of a Ray cluster's head; not a URL, which leads to the dashboard or to a server for Ray clients."""


class SingleNodeDeployment(Section):
    """Everything on this machine."""

    type: Literal["single_node"] = "single_node"
    num_train_gpus: int | None = Field(None, ge=0)
    """GPUs of the trainer; None: 1 where there are GPUs, else the CPU."""
    num_infer_gpus: int | None = Field(None, ge=0)
    """GPUs of inference; None: 1 where there are GPUs, else the CPU. Without inference.deployment and parallel.dp they
    are ranks of one engine, or as many embedded engines."""
    gpus_per_node: int | None = Field(None, gt=0)
    """GPUs of this machine that the run may use in all; None: all that it shows."""
    num_teacher_gpus: int | None = Field(None, ge=0)
    """GPUs of the teacher's engine, where `rl` starts one; None: 1 where there are GPUs, else the CPU."""
    num_critic_gpus: int | None = Field(None, ge=0)
    """GPUs of a critic on ranks of its own; None: one per rank where there are GPUs, else the CPU."""


class NodesDeployment(Section):
    """Ranks over several machines: the same command is started on each, and each starts its own ranks."""

    type: Literal["multi_node"] = "multi_node"
    num_train_nodes: int = Field(1, gt=0)
    """Nodes of the trainer; the first one leads."""
    gpus_per_node: int = Field(8, ge=0)
    """GPUs of a node of the trainer; 0: nodes without GPUs, one rank each."""
    nodes_per_fsdp_group: int | None = Field(None, gt=0)
    """Nodes that share one copy of the weights, a divisor of num_train_nodes; sets model.dp_replicate. None: all."""
    hosts: list[str] | None = None
    """Addresses of the nodes as the others reach them, the trainer's first; None: only a dry run does without."""
    node_rank: int | None = Field(None, ge=0)
    """Which of the hosts this machine is, from 0; None: the one whose address is this machine's."""
    rendezvous_port: int = Field(29500, ge=1, le=65535)
    """Port on the first node where the trainer's ranks meet; those of a critic of its own meet at the next port."""
    lost_after_s: float = Field(45.0, ge=3)
    """Seconds without a sign of life after which a node of the trainer counts as lost, and the run ends, or is started
    again by Slurm or Ray. A node whose processes are busy or stopped is not lost."""

    @property
    def num_ranks(self) -> int:
        """Processes of the trainer."""
        return self.num_train_nodes * max(1, self.gpus_per_node)

    num_train_gpus: ClassVar[None] = None  # counted per machine with one node


class MultiNodeDeployment(NodesDeployment):
    """A run over several machines: the same command is started on each, and each starts its own processes."""

    num_critic_nodes: int | None = Field(None, gt=0)
    """Nodes of a critic on ranks of its own, after the trainer's; None: it is on the trainer's nodes, on the GPUs after
    those of the trainer."""
    critic_gpus_per_node: int | None = Field(None, ge=0)
    """GPUs of the critic on each of its nodes; None: as many as the trainer has, gpus_per_node."""
    num_infer_nodes: int | None = Field(None, gt=0)
    """Nodes of one replica of inference; None: as many as inference.deployment takes."""
    infer_gpus_per_node: int | None = Field(None, gt=0)
    """GPUs of a node of inference; None: as many as a node of the trainer gives it, gpus_per_node."""
    num_infer_replicas: int = Field(1, gt=0)
    """Copies of the whole [inference], each with nodes and a router of its own."""
    model_gpus_per_node: int | None = Field(None, gt=0)
    """GPUs of the nodes of [models], which come after those of inference, as many as the models that the run starts
    need; None: as many as a node of inference."""

    # Counted per machine with one node, too.
    num_infer_gpus: ClassVar[None] = None
    num_teacher_gpus: ClassVar[None] = None
    num_critic_gpus: ClassVar[None] = None

    @property
    def gpus_of_models(self) -> int:
        """GPUs of a node of frozen models."""
        return self.model_gpus_per_node or self.infer_gpus_per_node or self.gpus_per_node

    @property
    def num_learning_nodes(self) -> int:
        """Nodes of trainer and critic; those of inference follow."""
        return self.num_train_nodes + (self.num_critic_nodes or 0)


Deployment = Annotated[SingleNodeDeployment | MultiNodeDeployment, Field(discriminator="type")]


class RanksDeployment(Section):
    """`sft` on this machine."""

    type: Literal["single_node"] = "single_node"
    num_train_gpus: int | None = Field(None, ge=1)
    """GPUs, one rank each; without GPUs, ranks on the CPU. None: one rank, or what torchrun has started."""


SFTDeployment = Annotated[RanksDeployment | NodesDeployment, Field(discriminator="type")]


class SlurmSection(Section):
    """Present: the command submits itself to Slurm and returns; the job runs it on every node."""

    job_name: str | None = None
    """Name of the job; None: the run's name."""
    partition: str | None = None
    """Partition; None: the cluster's default."""
    account: str | None = None
    """Account that is charged; None: the user's default."""
    qos: str | None = None
    """Quality of service; None: the default."""
    time: str | None = None
    """Time limit in Slurm's notation, such as 24:00:00 or 2-12:00:00; None: the partition's."""
    nodelist: str | None = None
    """Nodes that the job must have, in Slurm's notation, such as node[0-3,7]; None: any."""
    exclude: str | None = None
    """Nodes that the job must not have."""
    reservation: str | None = None
    """Reservation to run in; None: none."""
    gres: str | None = None
    """Generic resources of each node, such as gpu:h200:8; None: gpu:N, where a node's processes take N GPUs."""
    exclusive: bool = True
    """Whether the job has its nodes, with all their memory, to itself."""
    requeue: bool = True
    """Whether the job is queued again when a node is lost, its time is over or it is preempted; it then resumes from
    its latest checkpoint."""
    finish_within_s: int = Field(600, ge=60)
    """Seconds before the end of the job's time at which it finishes its step, saves a checkpoint and is queued again.
    Slurm may be up to a minute early or late. Not for `inference`, whose servers have nothing to save."""
    extra: dict[str, bool | int | str] = Field(default_factory=dict)
    """Further options of sbatch by their long names, such as {"constraint" = "h200"}; true: an option without value."""
    project_dir: Path | None = None
    """Directory in which every node runs its commands; None: that in which the job is submitted."""
    pre_run_command: str | None = None
    """Shell commands that every node runs first, such as "module load cuda"; what they export is kept."""
    template_path: Path | None = None
    """Template of the job's script; None: the built-in one, which a --dry-run shows."""


class RaySection(Section):
    """Present: machines of a Ray cluster run the command, one per node of the plan; this process waits for it."""

    address: str | None = None
    """Address of the cluster's head, such as 10.0.0.1:6379; None: RAY_ADDRESS, else the cluster of this machine."""
    strategy: Literal["STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK"] = "STRICT_SPREAD"
    """Ray's strategy for the placement group. STRICT_SPREAD: each node of the plan has a machine of its own;
    STRICT_PACK: all are on one machine, at loopback addresses; SPREAD and PACK: the former or the latter,
    whatever fits."""
    cpus_per_node: int | None = Field(None, ge=1)
    """CPUs that each node of the plan claims; None: one per process that it starts."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Further resources of the cluster that each node claims, such as {"h200" = 1}."""
    wait_s: float = Field(600.0, gt=0)
    """Longest wait for free resources, seconds; the console says what is missing."""
    max_restarts: int = Field(10, ge=0)
    """Times that the run is started again, from its latest checkpoint, after a machine was lost, and once more per hour
    that it ran since; 0: a lost one ends it."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the processes on all nodes."""
    pass_env: list[str] = Field(default_factory=list)
    """Variables that processes get with the value they have where the command is started, such as HF_TOKEN; the values
    are written nowhere."""


class RunSection(Section):
    """The run directory is <output_dir>/<run.name>."""

    name: str | None = None
    """Name of the run; None: <environment>-<model> of `rl`, sft-<model>, eval-<model>, rl-<model> of one process."""


class ResumeSection(Section):
    """Continue a run from one of its checkpoints, or begin a new one at a checkpoint of another."""

    step: int | None = Field(None, ge=1)
    """Step to resume from; None: the latest complete checkpoint."""
    dir: Path | None = None
    """Directory of another run, or of one of its checkpoints (`RUN/checkpoints/step_N`): this run begins where
    that one stood, as a run of its own; the other is only read. None: continue the run of this name."""
    skip_progress: bool = False
    """With `dir`: begin with the weights, the optimizer's state and the critic of that checkpoint, and with everything
    else anew: steps are counted from 1, and schedule, data and draws begin at their start."""
