"""What a config asks for, as numbers: ranks and their mesh, engines and their devices, types, rows.

In: a checked config of `rl` or `sft`. Out: a `Setup`, from which memory.py, costs.py and simulation/ compute. Its
notes have one sentence per assumption.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from stretto.base import process
from stretto.base.errors import ConfigError
from stretto.check.degrees import Degrees, Shape, find_degrees
from stretto.config.root import RLConfig, SFTConfig
from stretto.config.sections.inference import InferenceSection
from stretto.config.sections.model import ModelSection, dtype_on
from stretto.config.sections.trainer import Optim
from stretto.families.shape import ModelConfig
from stretto.launch.plan.engines import plan_replicas
from stretto.launch.plan.specs import Role
from stretto_bench.hardware import Hardware, find_hardware
from stretto_plan.network import NetworkSize
from stretto_plan.shapes import find_shape, named_shape

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float8": 1.0}


@dataclass(frozen=True)
class EngineSetup:
    """Engines of one role, all alike."""

    role: Role
    count: int
    devices: int
    """Devices per engine."""
    tp: int
    experts_over: int
    """Devices that share the experts of an engine."""
    kind: Literal["embedded", "vllm"]
    dtype: str
    """Type of its products: float32, bfloat16 or float8."""
    cache_dtype: str
    section: InferenceSection

    @property
    def num_devices(self) -> int:
        return self.count * self.devices

    @property
    def groups(self) -> int:
        """Data-parallel groups of one engine, each with whole attention weights and a cache of its own."""
        return max(1, self.devices // self.tp)


@dataclass(frozen=True)
class Setup:
    """A run of `rl` or `sft` before it starts."""

    cfg: RLConfig | SFTConfig
    size: NetworkSize
    hardware: Hardware
    degrees: Degrees
    engines: tuple[EngineSetup, ...]
    """Empty for `sft`."""
    train_dtype: str
    """Type of forward and backward passes: float32, bfloat16 or float8."""
    is_colocated: bool
    """Trainer and engines share their devices."""
    notes: tuple[str, ...]
    devices_per_node: int = 8

    @property
    def shape(self) -> ModelConfig:
        return self.size.shape

    @property
    def rl(self) -> RLConfig:
        """The config of a run of `rl`."""
        assert isinstance(self.cfg, RLConfig)
        return self.cfg

    @property
    def model(self) -> ModelSection:
        return self.cfg.model

    @property
    def row_tokens(self) -> int:
        """The longest row of the trainer."""
        return self.cfg.seq_len if isinstance(self.cfg, SFTConfig) else max(self.cfg.row_tokens, self.cfg.seq_len)

    @property
    def optim(self) -> Optim:
        return self.cfg.optim if isinstance(self.cfg, SFTConfig) else self.cfg.trainer.optim

    @property
    def has_critic(self) -> bool:
        """Whether a rank of the trainer has a critic beside the policy."""
        return isinstance(self.cfg, RLConfig) and self.cfg.trainer.critic is not None and not self.num_critic_ranks

    @property
    def num_critic_ranks(self) -> int:
        """Processes of a critic on ranks of its own."""
        return self.cfg.num_critic_ranks if isinstance(self.cfg, RLConfig) else 0

    @property
    def has_reference(self) -> bool:
        return isinstance(self.cfg, RLConfig) and self.cfg.trainer.loss.reference_kl is not None

    @property
    def num_ranks(self) -> int:
        return self.degrees.world_size

    @property
    def is_cpu(self) -> bool:
        return self.hardware.is_cpu

    @property
    def num_devices(self) -> int:
        """GPUs of the run; 0 on CPUs."""
        if self.is_cpu:
            return 0
        engines, trained = sum(engine.num_devices for engine in self.engines), self.num_ranks + self.num_critic_ranks
        return max(trained, engines) if self.is_colocated else trained + engines


def build_setup(
    cfg: RLConfig | SFTConfig,
    *,
    gpu: str | None = None,
    model_config: Path | None = None,
    hardware: Hardware | None = None,
) -> Setup:
    """Read what a config asks for.

    gpu: a name of the table; None: the CPU, or H100 for a config that asks for GPUs.

    Raises: ConfigError if the model's shape cannot be had, a degree does not divide it, or Megatron trains it.
    """
    if isinstance(cfg, RLConfig) and cfg.trainer.backend != "fsdp":
        raise ConfigError(
            f'trainer.backend = "{cfg.trainer.backend}": memory and time of its ranks are not foreseen; leave '
            "trainer.backend and [trainer.megatron] out to plan for stretto's own trainer"
        )
    found = find_shape(cfg.model, model_config)
    size = NetworkSize.of(found.shape)
    notes = [f"shape of the model: {found.source}"]
    is_wide = cfg.deployment.type == "multi_node"
    wants_gpus = is_wide or bool(process.visible_gpus())
    if isinstance(cfg, RLConfig):
        wants_gpus |= cfg.model_copy(update={"dry_run": True}).asks_for_gpus
    hardware = hardware or find_hardware(gpu, int(wants_gpus))
    if gpu is None and not hardware.is_cpu:
        notes.append(f"GPUs are {hardware.name}; another kind: --gpu {{H100,H200,B200,A100,L40S}}")
    has_gpu = not hardware.is_cpu
    degrees = find_degrees(cfg.model, _num_ranks(cfg), mesh_shape(found.shape))
    train_dtype: str = dtype_on(cfg.model.dtype, is_gpu=has_gpu)
    engines: tuple[EngineSetup, ...] = ()
    shared = False
    if isinstance(cfg, RLConfig):
        engines = _engines(cfg, size, has_gpu=has_gpu, notes=notes)
        shared = cfg.deployment.type == "single_node" and _shares_devices(cfg, engines) and has_gpu
    per_node = cfg.deployment.gpus_per_node if cfg.deployment.type == "multi_node" else 8
    return Setup(cfg, size, hardware, degrees, engines, train_dtype, shared, tuple(notes), max(per_node, 1))


def mesh_shape(shape: ModelConfig) -> Shape:
    """The sizes that the degrees of the mesh must divide."""
    return Shape(
        shape.num_heads,
        shape.num_kv_heads,
        shape.intermediate_size,
        shape.num_experts,
        shape.family,
        shape.num_state_heads,
    )


def _num_ranks(cfg: RLConfig | SFTConfig) -> int:
    return cfg.num_ranks if isinstance(cfg, SFTConfig) else cfg.num_train_ranks


def with_config(setup: Setup, cfg: RLConfig | SFTConfig) -> Setup:
    """The same model and hardware with another config, such as a proposal.

    Raises: ConfigError if a degree does not divide.
    """
    notes: list[str] = []
    degrees = find_degrees(cfg.model, _num_ranks(cfg), mesh_shape(setup.shape))
    engines: tuple[EngineSetup, ...] = ()
    if isinstance(cfg, RLConfig):
        engines = _engines(cfg, setup.size, has_gpu=not setup.is_cpu, notes=notes)
    return replace(setup, cfg=cfg, degrees=degrees, engines=engines)


def critic_setup(setup: Setup) -> Setup:
    """A critic on ranks of its own, as the setup of a policy that is trained as it is.

    Raises: ConfigError if a degree does not divide its ranks.
    """
    cfg = setup.rl
    critic = cfg.trainer.critic
    assert critic is not None, "the caller has looked"
    model = cfg.model if critic.ac is None else cfg.model.model_copy(update={"ac": critic.ac})
    trainer = cfg.trainer.model_copy(update={"critic": None, "optim": critic.optim or cfg.trainer.optim})
    degrees = find_degrees(model, setup.num_critic_ranks, mesh_shape(setup.shape))
    return replace(setup, cfg=cfg.model_copy(update={"model": model, "trainer": trainer}), degrees=degrees)


def _shares_devices(cfg: RLConfig, engines: tuple[EngineSetup, ...]) -> bool:
    """Whether a node's GPUs are named for both, or too few for both."""
    named = (cfg.trainer_gpu_ids, cfg.inference_gpu_ids)
    if named[0] is not None and named[1] is not None:
        return bool(set(named[0]) & set(named[1]))
    visible = len(process.visible_gpus())
    return 0 < visible < cfg.num_train_ranks + cfg.num_critic_ranks + sum(engine.num_devices for engine in engines)


def _engines(cfg: RLConfig, size: NetworkSize, *, has_gpu: bool, notes: list[str]) -> tuple[EngineSetup, ...]:
    section = cfg.inference
    if section is None:
        notes.append("engines run elsewhere: their time and memory are taken as those of one engine on one device")
        section = InferenceSection()
    replicas = cfg.deployment.num_infer_replicas if cfg.deployment.type == "multi_node" else 1
    hosts = [f"node{i}" for i in range(section.deployment.num_nodes * replicas)]
    specs = plan_replicas(section, hosts, replicas, is_cpu=not has_gpu).engines
    found = []
    quantized = _is_quantized(section, cfg)
    for role in ("engine", "prefill", "decode"):
        engines = [spec for spec in specs if spec.role == role]
        if not engines:
            continue
        wide = max(engines, key=lambda spec: spec.section.parallel.num_gpus).section.parallel
        if any(spec.section.parallel != wide for spec in engines):
            notes.append(
                f"engines have different numbers of GPUs; all are counted with {wide.num_gpus}, like the largest"
            )
        devices = wide.num_gpus
        count = max(1, sum(spec.num_gpus for spec in engines) // devices)
        is_spread = section.enable_expert_parallel
        if is_spread is None:
            is_spread = section.deployment.type == "disaggregated" and devices > wide.gpus_per_rank
        kind = section.chosen_engine(has_gpu=has_gpu)
        if has_gpu and section.engine == "auto":
            kind = "vllm"
        plain: str = dtype_on(section.dtype, is_gpu=has_gpu)
        dtype = "float8" if quantized and has_gpu else plain
        cache = "float8" if "fp8" in str(section.vllm_extra.get("kv_cache_dtype", "")) else plain
        experts_over = devices if is_spread and size.experts else wide.tp
        found.append(EngineSetup(role, count, devices, wide.gpus_per_rank, experts_over, kind, dtype, cache, section))
    return tuple(found)


def _is_quantized(section: InferenceSection, cfg: RLConfig) -> bool:
    name = section.model
    if name is None or name == cfg.model.name or cfg.model.scratch is not None:
        return False
    return named_shape(name).is_quantized
