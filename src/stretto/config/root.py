"""The roots, one per verb: the sections that it loads, and the run's directory.

`RLConfig` holds every key of a run once; `trainer_config()`, `orchestrator_config()` and `inference_config()` are the
parts of the three processes. Roots know no rules: load.py reads files and flags, validates, and checks the root against
rules/.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.config.derived import DERIVED, comma_list, derive_copies, derive_remote_wire, derive_template
from stretto.config.section import Section
from stretto.config.sections.deployment import (
    Deployment,
    RanksDeployment,
    RaySection,
    ResumeSection,
    RunSection,
    SFTDeployment,
    SingleNodeDeployment,
    SlurmSection,
)
from stretto.config.sections.distill import FrozenModelPlace, ModelClientSection
from stretto.config.sections.inference import InferenceSection
from stretto.config.sections.model import LoRASection, ModelSection, RendererSection, TokenizerSection
from stretto.config.sections.monitors import LogSection, MonitorsSection
from stretto.config.sections.orchestrator import ClientSection, EvalSection, OrchestratorKeys, OrchestratorSection
from stretto.config.sections.run import BudgetSection, RunKeys
from stretto.config.sections.sft import (
    Data,
    DpoSection,
    LossMaskSection,
    OnlineEvalSection,
    PairLoss,
    RewardSection,
    ValSection,
)
from stretto.config.sections.trainer import (
    AdamWOptim,
    CkptSection,
    ConstantScheduler,
    CriticPlacement,
    MatmulPrecision,
    Optim,
    Scheduler,
    TrainerKeys,
    TrainerSection,
)


class RunRoot(Section):
    """Where a run is stored, and how it starts; at the root of every verb."""

    output_dir: Path = Path("outputs")
    """Directory of all runs; a run's own is <output_dir>/<run.name>. A text that begins with `{output_dir}/` names
    something in it, as in model.name = "{output_dir}/warm-up/weights/latest"."""
    run: RunSection = RunSection()
    resume: ResumeSection | None = None
    """Present: continue the run of this name. The flag `--resume` is refused where there is none; with a table of a
    file that names no step, a run without a checkpoint begins anew, so that one file starts and continues it."""
    clean: bool = False
    """Delete the run directory of this name first."""
    dry_run: bool = False
    """Check configuration, code and data, show the first task and the processes on one screen; start nothing."""
    env_vars: dict[str, str] = Field({})
    """Environment variables of this process and of all that it starts; those in a process's section take precedence."""
    print_config: bool = False
    """Print the resolved config, every default included, as TOML that `@` reads again; start nothing."""

    @property
    def run_name(self) -> str:
        """The run's name: the given one, or one of the model and what it is trained on."""
        return self.run.name or self._default_name()

    @property
    def run_path(self) -> Path:
        """The run's directory."""
        return self.output_dir / self.run_name

    @property
    def run_dir(self) -> RunDir:
        """Every file name of the run."""
        return RunDir(self.run_path)

    @property
    def start_options(self) -> dict[str, Any]:
        """Arguments of base/rundir.py's `check` and `claim`: how the run starts."""
        step, origin = (None, None) if self.resume is None else (self.resume.step, self.resume.dir)
        return {"resume": self.resume is not None, "step": step, "clean": self.clean, "origin": origin}

    def _process_data(self, section: Section, *shared: str) -> dict[str, Any]:
        """The data of a process's root: its section, the shared keys, and those of every root."""
        own = {key: getattr(section, key) for key in type(section).model_fields}
        env_vars = {"env_vars": self.env_vars | own["env_vars"]}
        own |= {key: getattr(self, key) for key in (*shared, *RunRoot.model_fields)}
        return own | {"run": RunSection(name=self.run_name)} | env_vars

    def _default_name(self) -> str:
        """The name for a process alone; made of the model, which all processes of a run know."""
        model = getattr(self, "model", None)
        return f"rl-{short_name(getattr(model, 'name', model) or ModelSection().name)}"


class ClusterRoot(RunRoot):
    """A run that may be started on the machines of a cluster."""

    slurm: SlurmSection | None = None
    """Present: submit a job that runs this on a cluster's nodes, and return; None: run it here."""
    ray: RaySection | None = None
    """Present: run this on the machines of a Ray cluster; None: run it here."""


class TrainerConfig(TrainerSection, RunRoot):
    """`trainer`: the learner alone; orchestrator and engines are started elsewhere with the same run name."""


class OrchestratorConfig(OrchestratorSection, RunRoot):
    """`orchestrator`: environments, batches and the ledger alone."""

    @classmethod
    def _derived(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        return derive_remote_wire(values)


class InferenceConfig(InferenceSection, ClusterRoot):
    """`inference`: an engine and its server alone, or several as [deployment] says."""

    model: str | None = ModelSection().name
    """Directory of the model, or its name on the Hugging Face hub."""
    hosts: list[str] | None = None
    """Addresses of the nodes of a deployment over several, as they reach each other; None: one machine."""
    node_rank: int | None = Field(None, ge=0)
    """Which of the hosts this machine is, from 0; None: the one whose address is this machine's."""
    policy_lora: LoRASection | None = None
    """The adapter whose versions this engine gets as weight updates: [model.lora] of its run, which sets it. None: it
    gets whole weights, or no updates."""

    @property
    def num_nodes(self) -> int:
        """Machines that the command is started on."""
        return self.deployment.num_nodes


GpuIds = Annotated[list[int] | None, BeforeValidator(comma_list)]


class FrozenModelSection(InferenceSection):
    """[models.NAME]: a model beside the policy whose weights never change. Environments ask it by
    `ctx.model(NAME).chat(...)`, functions in vime's terms at `get_model_url(args, NAME)`. It has the keys of
    [inference], for engines of its own."""

    base_url: str | None = None
    """Address of engines that serve it already, or of an API such as https://host/v1, where served_model_name is the
    model that is asked for; None: the run starts them."""
    client: ModelClientSection = ModelClientSection()
    gpu_ids: GpuIds = None
    """GPUs of its engines; None: the first that policy, trainer and teacher do not use."""


class RLConfig(RunKeys, ClusterRoot):
    """`rl`: inference, orchestrator and trainer together.

    A key that several processes need is given once, at the root. The tables of the processes may have it too, as in
    their own files; two values that differ are an error that names both.
    """

    view: bool = True
    """Serve a page of this run at 127.0.0.1 while it runs; the first line on the console is its address."""
    trainer: TrainerKeys = TrainerKeys()
    orchestrator: OrchestratorKeys = OrchestratorKeys()
    inference: InferenceSection | None = InferenceSection()
    """None (`--no-inference`): start no engine, use those at orchestrator.client.base_url."""
    teacher_inference: InferenceSection | None = None
    """The engine of a frozen teacher, started and ended with the run; orchestrator.teacher.model without a base_url
    is enough. None: a teacher, if any, runs at orchestrator.teacher.base_url."""
    models: dict[str, FrozenModelSection] = Field({})
    """By name: frozen models for a user's functions, each with engines and a router of its own. The policy is called
    `actor`, a teacher `teacher`."""
    deployment: Deployment = SingleNodeDeployment()
    trainer_gpu_ids: GpuIds = None
    """GPUs of the trainer, one rank each; None: the first after inference's."""
    inference_gpu_ids: GpuIds = None
    """GPUs of inference; None: the first ones."""
    teacher_gpu_ids: GpuIds = None
    """GPUs of the teacher's engine; None: the first after the trainer's."""
    critic_gpu_ids: GpuIds = None
    """GPUs of a critic on ranks of its own, one rank each; None: the first after the trainer's."""
    ckpt: CkptSection | None = CkptSection()

    @classmethod
    def _derived(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        derived = {path: value for derive in DERIVED for path, value in derive(values).items()}
        return derived | derive_template(values, "orchestrator.renderer")

    @property
    def gpu_ids(self) -> list[list[int] | None]:
        """The GPU ids that are named for trainer, inference, teacher and critic."""
        return [self.trainer_gpu_ids, self.inference_gpu_ids, self.teacher_gpu_ids, self.critic_gpu_ids]

    @property
    def gpu_counts(self) -> list[int | None]:
        """The number of GPUs that [deployment] gives each of them."""
        shape = self.deployment
        return [shape.num_train_gpus, shape.num_infer_gpus, shape.num_teacher_gpus, shape.num_critic_gpus]

    @property
    def beside(self) -> str:
        """A key that asks for models beside the policy, for messages; "": there are none."""
        if self.models:
            return f"[models.{next(iter(self.models))}]"
        return "[teacher_inference]" if self.teacher_inference is not None else self.orchestrator.beside

    @property
    def asks_for_gpus(self) -> bool:
        """Whether this is a dry run whose config names or counts GPUs, which is planned as if they were there."""
        needs_cuda = self.inference is not None and self.inference.device == "cuda"
        return self.dry_run and (any(self.gpu_counts) or any(self.gpu_ids) or needs_cuda)

    @property
    def trains_here(self) -> bool:
        """Whether the trainer's ranks are on the machine of the command, and no GPUs are assumed."""
        is_one = self.deployment.type == "single_node" and self.slurm is None and self.ray is None
        return is_one and not self.asks_for_gpus

    @property
    def num_train_ranks(self) -> int:
        """Processes of the trainer: a data-parallel rank is cp x tp of them, of each pipeline stage."""
        return self.orchestrator.num_train_workers * self.ranks_per_worker

    @property
    def ranks_per_worker(self) -> int:
        """Processes of the trainer, or of a critic of its own, that train on the same micro batches."""
        stages = self.trainer.megatron.pp if self.trainer.megatron is not None else 1
        return self.model.cp * self.model.tp * stages

    @property
    def critic_placement(self) -> CriticPlacement | None:
        """Placement of a critic on ranks of its own; None without such a critic."""
        return None if self.trainer.critic is None else self.trainer.critic.placement

    @property
    def num_critic_ranks(self) -> int:
        """Processes of a critic on ranks of its own."""
        placement = self.critic_placement
        return 0 if placement is None else placement.num_workers * self.ranks_per_worker

    @property
    def num_nodes(self) -> int:
        """Machines that the command is started on."""
        if self.deployment.type != "multi_node":
            return 1
        engines = 0 if self.inference is None else self.inference.deployment.num_nodes
        last = self.first_infer_node + self.deployment.num_infer_replicas * engines
        return max(self.deployment.num_learning_nodes, last) + self.num_model_nodes

    @property
    def num_model_nodes(self) -> int:
        """Machines of frozen models, the last ones."""
        places = self.model_places.items()
        return max((node + self.models[name].deployment.num_nodes for name, (node, _) in places), default=0)

    @property
    def model_places(self) -> dict[str, tuple[int, int]]:
        """Over several nodes: the node and the first GPU of every frozen model that the run starts.

        Nodes are counted from the first that policy and trainer do not use. Each model is on the first node where it
        fits; one that is larger than a node has nodes of its own.
        """
        shape = self.deployment
        if shape.type != "multi_node":
            return {}
        places: dict[str, tuple[int, int]] = {}
        used: list[int] = []  # GPUs of each node
        for name, section in self.models.items():
            if section.base_url is not None:
                continue
            if (own := section.deployment.num_nodes) > 1:
                places[name] = (len(used), 0)
                used += [shape.gpus_of_models] * own
                continue
            gpus = section.gpus_with_idle if section.device != "cpu" and shape.gpus_per_node else 0
            fits = (node for node, num in enumerate(used) if num + gpus <= shape.gpus_of_models)
            if (node := next(fits, len(used))) == len(used):
                used.append(0)
            places[name] = (node, used[node])
            used[node] += gpus
        return places

    @property
    def trainer_waits_for_devices(self) -> bool:
        """Whether engines must sleep before the trainer is started."""
        is_on = self.colocate is not None and self.colocate.offload_rollout
        return is_on and self.orchestrator.debug is None

    @property
    def first_infer_node(self) -> int:
        """The first node of inference: after the trainer's nodes, or node 0 with [colocate]."""
        shape = self.deployment
        return shape.num_learning_nodes if shape.type == "multi_node" and self.colocate is None else 0

    @property
    def row_tokens(self) -> int:
        """Tokens of a packed row of the trainer; a longer sample, of up to seq_len, has a row of its own."""
        return self.orchestrator.row_tokens or self.seq_len

    def trainer_config(self) -> TrainerConfig:
        """The root of the trainer process."""
        return TrainerConfig.model_validate(self._process_data(self.trainer, *RunKeys.model_fields, "ckpt"))

    def orchestrator_config(self) -> OrchestratorConfig:
        """The root of the orchestrator process."""
        return OrchestratorConfig.model_validate(self._process_data(self.orchestrator, *RunKeys.model_fields))

    def inference_config(self) -> InferenceConfig:
        """The root of the inference process.

        Raises: ConfigError if the run has none.
        """
        if self.inference is None:
            raise ConfigError("inference = None: this run uses engines that run already, and has none to start")
        return InferenceConfig.model_validate(self._process_data(self.inference) | {"policy_lora": self.model.lora})

    def teacher_config(self) -> InferenceConfig:
        """The root of the teacher's engine, which must exist."""
        assert self.teacher_inference is not None, "no [teacher_inference] section: nothing to start"
        # Without the run's name it writes no log file of its own, which would be inference's.
        return InferenceConfig.model_validate(self._process_data(self.teacher_inference) | {"run": {}})

    def model_config_of(self, name: str) -> InferenceConfig:
        """The root of the engines of a frozen model."""
        data = self._process_data(self.models[name]) | {"run": {}}
        return InferenceConfig.model_validate(
            {k: v for k, v in data.items() if k not in ("base_url", "gpu_ids", "client")}
        )

    def _default_name(self) -> str:
        envs = "+".join(env.name or re.split("[:/]", env.id)[-1] for env in self.orchestrator.env)
        return f"{_file_name(envs)}-{short_name(self.model.name)}"


class SFTConfig(ClusterRoot):
    """`sft`: supervised fine-tuning."""

    model: ModelSection = ModelSection()
    tokenizer: TokenizerSection = TokenizerSection()
    renderer: RendererSection = RendererSection()
    data: Data
    val: ValSection | None = None
    """Present: validate on rows of its own."""
    eval: OnlineEvalSection | None = None
    loss_mask: LossMaskSection = LossMaskSection()
    loss: PairLoss | None = Field(None, json_schema_extra={"type": "dpo"})
    """What is learned from pairs, [data] type = "preference"; None: `dpo`, and from other rows their log-likelihood."""
    optim: Optim = AdamWOptim()
    scheduler: Scheduler = ConstantScheduler()
    ckpt: CkptSection | None = CkptSection()
    batch_size: int = Field(64, gt=0)
    """Examples, or pairs, in one step; they are packed into as few rows of seq_len tokens as they need."""
    seq_len: int = Field(2048, gt=1)
    """Tokens in one packed row; longer examples are cut. A row holds both replies of a pair, each with the prompt."""
    max_steps: int | None = Field(None, gt=0)
    """Steps to train; None: by max_epochs."""
    max_epochs: int | None = Field(None, gt=0)
    """Passes over the data; None: by max_steps."""
    budget: BudgetSection | None = None
    matmul_precision: MatmulPrecision = "highest"
    """Precision of products of float32 matrices: `high` is TF32 on a GPU; on a CPU it changes nothing or little."""
    is_deterministic: bool = False
    """The same rows give the same weights, bit for bit, by kernels that always sum in one order; it takes time."""
    memory_profiler_path: Path | None = None
    """Directory for snapshots of the GPU's memory, a file per step and rank, which https://pytorch.org/memory_viz
    draws; steps become slower, and files have up to 40 MB. None: nothing is recorded."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the order of examples and of everything else random."""
    num_threads: int | None = Field(None, gt=0)
    """CPU threads of a rank; None: OMP_NUM_THREADS, else the cores divided by the ranks, fewer for a small model."""
    deployment: SFTDeployment = RanksDeployment()
    trainer_gpu_ids: GpuIds = Field(None, min_length=1)
    """GPUs, one rank each; None: the first ones, as many as deployment.num_train_gpus says."""
    monitors: MonitorsSection = MonitorsSection()
    log: LogSection = LogSection()

    @property
    def pair_loss(self) -> DpoSection | RewardSection | None:
        """The loss of pairs; None if [data] has none."""
        return (self.loss or DpoSection()) if self.data.type == "preference" else None

    @property
    def num_nodes(self) -> int:
        """Machines that the command is started on."""
        return self.deployment.num_train_nodes if self.deployment.type == "multi_node" else 1

    @classmethod
    def _derived(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        return derive_copies(values) | derive_template(values, "renderer")

    @property
    def num_ranks(self) -> int:
        """Processes that the command starts on all nodes; 1 also if torchrun starts more."""
        if self.deployment.type == "multi_node":
            return self.deployment.num_ranks
        ids = self.trainer_gpu_ids
        return self.deployment.num_train_gpus or 1 if ids is None else len(ids)

    def _default_name(self) -> str:
        return f"sft-{'scratch' if self.model.scratch else short_name(self.model.name)}"


class AskedModelSection(Section):
    """[models.NAME] of `eval`: a model that environments ask, and that runs already."""

    base_url: str
    """Address of its engine, or of an API such as https://host/v1."""
    served_model_name: str | None = None
    """The model that is asked for; None: the first one that the server lists."""
    client: ModelClientSection = ModelClientSection()

    @property
    def place(self) -> FrozenModelPlace:
        """Where it runs, and how it is asked."""
        asked = {key: value for key, value in self.client.model_dump().items() if value is not None}
        return FrozenModelPlace(base_url=self.base_url, model=self.served_model_name, **asked)


class EvalConfig(RunRoot):
    """`eval`: environments' held-out tasks against running engines, or against one started for `model`."""

    model: str | None = None
    """Hugging Face directory to start an embedded engine for; None: use the engines at client.base_url."""
    client: ClientSection = ClientSection()
    eval: EvalSection = EvalSection()
    inference: InferenceSection = InferenceSection()
    """The engine started for `model`."""
    models: dict[str, AskedModelSection] = Field({})
    """By name: models that environments ask by `ctx.model(NAME).chat(...)`; they run already."""
    tokenizer: TokenizerSection = TokenizerSection()
    renderer: RendererSection = RendererSection()
    seq_len: int = Field(2048, gt=1)
    """Longest prompt plus reply, tokens."""
    max_inflight_rollouts: int = Field(256, gt=0)
    """Rollouts running at once."""
    rollout_timeout_s: float | None = Field(600.0, gt=0)
    """Deadline of one rollout; None: no deadline."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of sampling."""
    monitors: MonitorsSection = MonitorsSection()
    log: LogSection = LogSection()

    @property
    def beside(self) -> str:
        """A key that asks for models beside the one that is evaluated, for messages; "": there are none."""
        return f"[models.{next(iter(self.models))}]" if self.models else ""

    def _default_name(self) -> str:
        return f"eval-{short_name(self.model)}" if self.model else "eval"


class EvalsConfig(EvalConfig):
    """`evals`: the process that evaluates the versions an `sft` run publishes; started by it."""

    watch: Path
    """Directory of the published versions."""
    max_steps: int | None = Field(None, gt=0)
    """The last version, which is evaluated whatever the interval."""


def short_name(model: str) -> str:
    """The short name of a model: sort-sft for `outputs/sort-sft/weights/step_40`."""
    parts = [part for part in re.split(r"[/\\]", model) if part not in ("", ".", "..", "~")]
    while len(parts) > 1 and re.fullmatch(r"latest|weights|checkpoints|trainer|hf|step_\d+", parts[-1]):
        parts.pop()
    return _file_name(parts[-1]) if parts else "model"


def _file_name(text: str) -> str:
    """The text with - in place of characters that a run's name may not have."""
    return re.sub(r"[^A-Za-z0-9._+=@-]+", "-", text).strip("-.") or "run"
