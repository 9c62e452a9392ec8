"""The roots, what each verb loads: sections, where the run lives, and every check (checks.py, cross.py).

`RLConfig` is the whole; `trainer_config()`, `orchestrator_config()` and `inference_config()` cut it into what
the three processes are started with. Shared keys are filled in by shared.py; reading files and flags is
load.py.
"""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator, model_validator

from stretto.base.paths import RunDir
from stretto.config import checks
from stretto.config.cross import check_rl
from stretto.config.deployment import (
    Deployment,
    MultiNodeDeployment,
    RanksDeployment,
    ResumeSection,
    RunSection,
    SingleNodeDeployment,
)
from stretto.config.inference import InferenceSection
from stretto.config.model import ModelSection, RendererSection, TokenizerSection
from stretto.config.monitors import LogSection, MonitorsSection
from stretto.config.orchestrator import ClientSection, EvalSection, OrchestratorSection
from stretto.config.schema import canonical
from stretto.config.section import Section
from stretto.config.sft import Data, LossMaskSection, OnlineEvalSection, ValSection
from stretto.config.shared import MISSING, ConfigProblems, Problem, as_raw, get, propagate, put
from stretto.config.trainer import (
    AdamWOptim,
    CkptSection,
    ConstantScheduler,
    Optim,
    Scheduler,
    TrainerSection,
)
from stretto.config.transport import (
    ControlSection,
    RolloutTransport,
    ShmWeights,
    WeightBroadcast,
    ZmqRollouts,
)


class RunRoot(Section):
    """Where a run lives, and how it starts; at the root of every verb."""

    output_dir: Path = Path("outputs")
    """Directory of all runs; a run's own is <output_dir>/<run.name>."""
    run: RunSection = RunSection()
    resume: ResumeSection | None = None
    """Present (`--resume`): continue the run of this name; an error where there is none."""
    clean: bool = False
    """Delete the run directory of this name first."""
    dry_run: bool = False
    """Check, print and write the resolved config and the process plan, start nothing."""

    @property
    def run_name(self) -> str:
        """The run's name, given or made from what is trained."""
        return self.run.name or self._default_name()

    @property
    def run_path(self) -> Path:
        """The run's directory."""
        return self.output_dir / self.run_name

    @property
    def run_dir(self) -> RunDir:
        """Every file name of the run."""
        return RunDir(self.run_path)

    def _default_name(self) -> str:
        raise NotImplementedError

    def _problems(self) -> list[Problem]:
        return []

    @model_validator(mode="after")
    def _check(self) -> Any:
        if problems := self._problems():
            raise ConfigProblems(problems)
        return self


class TrainerConfig(TrainerSection, RunRoot):
    """`trainer`: the learner alone; orchestrator and engines are started elsewhere with the same run name."""

    def _default_name(self) -> str:
        return f"rl-{short_name(self.model.name)}"

    def _problems(self) -> list[Problem]:
        return checks.check_run(self) + checks.check_trainer(self, "")


class OrchestratorConfig(OrchestratorSection, RunRoot):
    """`orchestrator`: environments, batches and the ledger alone."""

    def _default_name(self) -> str:
        return f"rl-{short_name(self.model.name)}"

    def _problems(self) -> list[Problem]:
        return checks.check_run(self) + checks.check_orchestrator(self, "")


class InferenceConfig(InferenceSection, RunRoot):
    """`inference`: an engine and its server alone, or several as [deployment] says."""

    hosts: list[str] | None = None
    """Addresses of the nodes of a deployment over several, as they reach each other; None: one machine."""
    node_rank: int | None = Field(None, ge=0)
    """Which of the hosts this machine is, from 0; None: the one whose address is this machine's."""

    def _default_name(self) -> str:
        return f"rl-{short_name(self.model or ModelSection().name)}"

    def _problems(self) -> list[Problem]:
        problems = checks.check_run(self) + checks.check_inference(self, "")
        if self.model is None:
            problems.append(
                Problem(("model",), "model: no model to serve; give its directory, `--model <directory>`")
            )
        return problems


class RLConfig(RunRoot):
    """`rl`: inference, orchestrator and trainer together.

    Keys that also stand in sections fill them; a value given in two places that disagree is an error
    naming both.
    """

    trainer: TrainerSection = TrainerSection()
    orchestrator: OrchestratorSection = OrchestratorSection()
    inference: InferenceSection | None = InferenceSection()
    """None (`--no-inference`): start no engine, use those at orchestrator.client.base_url."""
    teacher_inference: InferenceSection | None = None
    """The engine of a frozen teacher, started and ended with the run; orchestrator.teacher.model without a base_url
    is enough. None: the teacher, if there is one, runs at orchestrator.teacher.base_url."""
    model: ModelSection = ModelSection()
    tokenizer: TokenizerSection = TokenizerSection()
    max_steps: int | None = Field(None, gt=0)
    """Steps to train; None: until stopped."""
    seq_len: int = Field(2048, gt=1)
    """Longest prompt plus reply, tokens."""
    seed: int = 0
    """Seed of everything random."""
    deployment: Deployment = SingleNodeDeployment()
    trainer_gpu_ids: list[int] | None = None
    """GPUs of the trainer, one rank each; None: the first after inference's."""
    inference_gpu_ids: list[int] | None = None
    """GPUs of inference; None: the first ones."""
    teacher_gpu_ids: list[int] | None = None
    """GPUs of the teacher's engine; None: the first after the trainer's."""
    weight_broadcast: WeightBroadcast = ShmWeights()
    rollout_transport: RolloutTransport = ZmqRollouts()
    control: ControlSection = ControlSection()
    ckpt: CkptSection | None = CkptSection()
    monitors: MonitorsSection = MonitorsSection()
    log: LogSection = LogSection()

    aliases: ClassVar[dict[str, str]] = {"wandb": "monitors.wandb", "ckpt.resume_step": "resume.step"}

    @field_validator("trainer_gpu_ids", "inference_gpu_ids", "teacher_gpu_ids", mode="before")
    @classmethod
    def _comma_list(cls, value: Any) -> Any:
        return comma_list(value)

    @model_validator(mode="before")
    @classmethod
    def _fill_shared(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = as_raw(data)
        conflicts = [Problem((".".join(map(str, at)),), message) for at, message in canonical(cls, data, [])]
        data, problems = propagate(data)
        if conflicts or problems:
            raise ConfigProblems(conflicts + problems)
        _derive_engine_model(data)
        _derive_client_url(data)
        _derive_num_train_workers(data)
        _derive_routed_experts(data)
        _derive_teacher(data)
        _derive_whiten(data)
        return data

    @property
    def num_train_ranks(self) -> int:
        """Processes of the trainer: a data-parallel rank is cp x tp of them."""
        return self.orchestrator.num_train_workers * self.trainer.model.cp * self.trainer.model.tp

    def trainer_config(self) -> TrainerConfig:
        """What the trainer process is started with."""
        return TrainerConfig.model_validate(self._cut(self.trainer))

    def orchestrator_config(self) -> OrchestratorConfig:
        """What the orchestrator process is started with."""
        return OrchestratorConfig.model_validate(self._cut(self.orchestrator))

    def inference_config(self) -> InferenceConfig:
        """What the inference process is started with; the root must have one."""
        assert self.inference is not None, "no [inference] section: nothing to start"
        return InferenceConfig.model_validate(self._cut(self.inference))

    def teacher_config(self) -> InferenceConfig:
        """What the teacher's engine is started with; the root must have one."""
        assert self.teacher_inference is not None, "no [teacher_inference] section: nothing to start"
        # Without the run's name it writes no log file of its own, which would be inference's.
        return InferenceConfig.model_validate(self._cut(self.teacher_inference) | {"run": {}})

    def _cut(self, section: Section) -> dict[str, Any]:
        resume = None if self.resume is None else self.resume.model_dump()
        whereabouts = {"output_dir": self.output_dir, "run": {"name": self.run_name}, "resume": resume}
        return section.model_dump() | whereabouts

    def _default_name(self) -> str:
        return "-".join(
            ["+".join(env.name or env.id for env in self.orchestrator.env), short_name(self.model.name)]
        )

    def _problems(self) -> list[Problem]:
        return checks.check_run(self) + check_rl(self)


class SFTConfig(RunRoot):
    """`sft`: supervised fine-tuning."""

    model: ModelSection = ModelSection()
    tokenizer: TokenizerSection = TokenizerSection()
    renderer: RendererSection = RendererSection()
    data: Data
    val: ValSection | None = None
    """Present: validate on rows of its own."""
    eval: OnlineEvalSection | None = None
    loss_mask: LossMaskSection = LossMaskSection()
    optim: Optim = AdamWOptim()
    scheduler: Scheduler = ConstantScheduler()
    ckpt: CkptSection | None = CkptSection()
    batch_size: int = Field(64, gt=0)
    """Examples in one step; they are packed into as few rows of seq_len tokens as they need."""
    seq_len: int = Field(2048, gt=1)
    """Tokens in one packed row; longer examples are cut."""
    max_steps: int | None = Field(None, gt=0)
    """Steps to train; None: by max_epochs."""
    max_epochs: int | None = Field(None, gt=0)
    """Passes over the data; None: by max_steps."""
    seed: int = 0
    """Seed of the order of examples and of everything else random."""
    num_threads: int | None = Field(None, gt=0)
    """CPU threads of a rank; None: all cores, shared out over the ranks of this machine."""
    deployment: RanksDeployment = RanksDeployment()
    trainer_gpu_ids: list[int] | None = Field(None, min_length=1)
    """GPUs, one rank each; None: the first ones, as many as deployment.num_train_gpus says."""
    monitors: MonitorsSection = MonitorsSection()
    log: LogSection = LogSection()

    aliases: ClassVar[dict[str, str]] = {
        "wandb": "monitors.wandb",
        "data.batch_size": "batch_size",
        "data.seq_len": "seq_len",
        "data.loss_mask": "loss_mask",
        "model.seq_len": "seq_len",
        "ckpt.resume_step": "resume.step",
    }

    @field_validator("trainer_gpu_ids", mode="before")
    @classmethod
    def _comma_list(cls, value: Any) -> Any:
        return comma_list(value)

    @property
    def num_ranks(self) -> int:
        """Processes that the command starts; 1 says nothing about torchrun's."""
        ids = self.trainer_gpu_ids
        return self.deployment.num_train_gpus or 1 if ids is None else len(ids)

    def _default_name(self) -> str:
        return f"sft-{'scratch' if self.model.scratch else short_name(self.model.name)}"

    def _problems(self) -> list[Problem]:
        return checks.check_run(self) + checks.check_sft(self)


class EvalConfig(RunRoot):
    """`eval`: environments' held-out tasks against running engines, or against one started for `model`."""

    model: str | None = None
    """Hugging Face directory to start an embedded engine for; None: use the engines at client.base_url."""
    client: ClientSection = ClientSection()
    eval: EvalSection = EvalSection()
    inference: InferenceSection = InferenceSection()
    """The engine started for `model`."""
    tokenizer: TokenizerSection = TokenizerSection()
    renderer: RendererSection = RendererSection()
    seq_len: int = Field(2048, gt=1)
    """Longest prompt plus reply, tokens."""
    max_inflight_rollouts: int = Field(256, gt=0)
    """Rollouts running at once."""
    rollout_timeout_s: float | None = Field(600.0, gt=0)
    """Deadline of one rollout; None: none."""
    seed: int = 0
    """Seed of sampling."""
    monitors: MonitorsSection = MonitorsSection()
    log: LogSection = LogSection()

    aliases: ClassVar[dict[str, str]] = {"model.name": "model", "env": "eval.env"}

    def _default_name(self) -> str:
        return f"eval-{short_name(self.model)}" if self.model else "eval"

    def _problems(self) -> list[Problem]:
        return checks.check_run(self) + checks.check_eval(self) + checks.check_once(self.eval)


class EvalsConfig(EvalConfig):
    """`evals`: the process that evaluates the versions an `sft` run publishes; started by it."""

    watch: Path
    """Directory of the published versions."""
    max_steps: int | None = Field(None, gt=0)
    """The version that is evaluated whatever its interval."""

    def _problems(self) -> list[Problem]:
        return checks.check_run(self) + checks.check_eval(self)


def comma_list(value: Any) -> Any:
    """Accepts `0,1,2` and a single id besides a list."""
    if isinstance(value, str) and re.fullmatch(r"\d+(,\d+)*", value := value.replace(" ", "")):
        return [int(item) for item in value.split(",")]
    return [value] if isinstance(value, int) else value


def short_name(model: str) -> str:
    """What a person calls a model: `outputs/sort-sft/weights/step_40` is sort-sft, `Qwen/Qwen3` is Qwen3."""
    parts = [part for part in re.split(r"[/\\]", model) if part not in ("", ".", "..", "~")]
    while len(parts) > 1 and re.fullmatch(r"latest|weights|checkpoints|trainer|hf|step_\d+", parts[-1]):
        parts.pop()
    return parts[-1] if parts else "model"


def _derive_engine_model(data: dict[str, Any]) -> None:
    """The engine serves the model that is trained."""
    if get(data, "inference") is not None and get(data, "inference.model") in (None, MISSING):
        name = get(data, "model.name")
        put(data, "inference.model", ModelSection().name if name is MISSING else name)


def _derive_client_url(data: dict[str, Any]) -> None:
    """The engine this run starts is the one its orchestrator talks to, unless another address is given."""
    if get(data, "inference") is None or get(data, "orchestrator.client.base_url") is not MISSING:
        return
    host, port = get(data, "inference.server.host"), get(data, "inference.server.port")
    if host is MISSING and port is MISSING:
        return
    host = "127.0.0.1" if host in (MISSING, "0.0.0.0", "::") else host
    put(data, "orchestrator.client.base_url", f"http://{host}:{8000 if port is MISSING else port}/v1")


def _derive_routed_experts(data: dict[str, Any]) -> None:
    """An engine returns its choices where the trainer replays them."""
    path = "inference.enable_return_routed_experts"
    if get(data, "trainer.enable_router_replay") not in (True, "true") or get(data, path) is not MISSING:
        return
    if get(data, "inference") is not None:
        put(data, path, True)


def _derive_whiten(data: dict[str, Any]) -> None:
    """Scores stay as they are where the trainer makes advantages of them."""
    if not isinstance(get(data, "trainer.advantages"), dict):
        return
    envs = get(data, "orchestrator.env")
    for algo in [
        get(data, "orchestrator.algo"),
        *(get(env, "algo") for env in envs or () if isinstance(env, dict)),
    ]:
        if isinstance(algo, dict) and str(algo.get("type")).startswith("reinforce_plus_plus"):
            algo.setdefault("whiten", False)


def _derive_teacher(data: dict[str, Any]) -> None:
    """A teacher that is named and runs nowhere is served by this run, under the name it is asked for."""
    teacher, engine = get(data, "orchestrator.teacher"), get(data, "teacher_inference")
    if isinstance(teacher, dict) and engine in (None, MISSING):
        name = get(data, "orchestrator.teacher.model")
        if get(data, "orchestrator.teacher.base_url") in (None, MISSING) and name not in (None, MISSING):
            put(data, "teacher_inference.model", name)
    elif isinstance(teacher, dict) and isinstance(engine, dict) and engine.get("model") in (None, MISSING):
        if (name := get(data, "orchestrator.teacher.model")) not in (None, MISSING):
            put(data, "teacher_inference.model", name)
    elif teacher in (None, MISSING) and isinstance(engine, dict):
        put(data, "orchestrator.teacher.model", engine.get("served_model_name") or engine.get("model"))


def _derive_num_train_workers(data: dict[str, Any]) -> None:
    """One rank a trainer GPU, where the GPUs are named; ranks of the axes cp and tp share their batches."""
    if get(data, "orchestrator.num_train_workers") is not MISSING:
        return
    ids, count = get(data, "trainer_gpu_ids"), get(data, "deployment.num_train_gpus")
    if isinstance(ids, str):
        ids = ids.split(",")
    if isinstance(ids, list) and ids:
        put(data, "orchestrator.num_train_workers", max(1, len(ids) // _sharing(data)))
    elif isinstance(count, int) and count > 0:
        put(data, "orchestrator.num_train_workers", max(1, count // _sharing(data)))
    elif get(data, "deployment.type") == "multi_node":
        with contextlib.suppress(ValueError):  # what is wrong with it is said by whoever checks the section
            deployment = MultiNodeDeployment.model_validate(get(data, "deployment"))
            put(data, "orchestrator.num_train_workers", max(1, deployment.num_ranks // _sharing(data)))


def _sharing(data: dict[str, Any]) -> int:
    """Ranks that train on the same micro batches: cp x tp."""
    degrees = (get(data, f"trainer.model.{axis}") for axis in ("cp", "tp"))
    return math.prod(d if isinstance(d, int) and d > 0 else 1 for d in degrees)
