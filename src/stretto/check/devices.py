"""Checks that the devices of a plan can do what the config asks for, before a process starts.

A plan judges by the devices that it gives to each process, not by this machine: a dry run that names or counts GPUs is
planned with them. What only shows where a process runs (the kind of a GPU, a package) is checked there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from stretto.base.errors import ConfigError
from stretto.check.engines import EMBEDDED, Fault, check_drafter, engine_of
from stretto.config.root import RLConfig
from stretto.config.sections.inference import InferenceSection
from stretto.config.sections.model import ModelSection

OFFLOADS = "moves tensors from a GPU's memory into the machine's, and here they are there already; leave it out"


def check_devices(cfg: RLConfig, on_cpu: Collection[str]) -> None:
    """Check what processes of `rl` are asked to do that have no GPU; on_cpu: the names of their parts.

    Raises: ConfigError for a setting that needs a GPU, if the plan gives the process none.
    """
    shape = cfg.deployment
    if shape.type == "single_node" and (cfg.slurm is not None or cfg.ray is not None):
        return  # the job's GPUs are not known here
    counts = "deployment.num_train_gpus and num_infer_gpus"
    more = counts if shape.type == "single_node" else "deployment.gpus_per_node"
    for role in ("trainer", "critic"):
        if role in on_cpu:
            check_trained_on_cpu(cfg.model, "trainer.model", more)
    engines = {"inference": cfg.inference, "teacher_inference": cfg.teacher_inference}
    engines |= {f"models.{name}": section for name, section in cfg.models.items()}
    for path, section in engines.items():
        if path in on_cpu and section is not None:
            check_served_on_cpu(section, f"{path}.", more)


def check_drafts(cfg: RLConfig, *, is_on_gpu: bool) -> None:
    """Check what does not go with drafts in the engine that `auto` means for this plan.

    Raises: ConfigError if vLLM drafts, and is to return or to sample what it cannot then; or if a deterministic run
    would get other bits from drafts, whose lengths follow the clock; or if no add-on drafts in the embedded engine.
    """
    engines = {"inference": cfg.inference, "teacher_inference": cfg.teacher_inference}
    engines |= {f"models.{name}": each for name, each in cfg.models.items()}
    for path, each in engines.items():
        if each is not None and each.speculation is not None and each.chosen_engine(has_gpu=is_on_gpu) == "embedded":
            check_drafter(path)
    section = cfg.inference
    if section is None or section.drafting_key is None:
        return
    engine = engine_of(section, has_gpu=is_on_gpu)
    engine.check_drafts(section, "inference", cfg)
    if cfg.deterministic and (engine is not EMBEDDED or is_on_gpu):
        raise ConfigError(
            f"[inference.{section.drafting_key}] with deterministic = true: only the embedded engine on a CPU gives "
            "the same bits with drafts and without; leave one of them out"
        )


def check_trained_on_cpu(model: ModelSection, path: str, counts: str | None = None) -> None:
    """Check [model] for ranks on the CPU.

    path: the section, as the user names it. counts: keys that count the GPUs of another machine.

    Raises: ConfigError for a setting with which no CPU trains.
    """
    for setting, why in _trained_faults(model):
        raise ConfigError(f"[{path}{setting} {why}. {_where('trains', counts)}")


def check_served_on_cpu(section: InferenceSection, prefix: str, counts: str | None = None) -> None:
    """Check the section of an engine on the CPU.

    prefix: of its keys, as the user names them. counts: keys that count the GPUs of another machine.

    Raises: ConfigError for a setting that needs a GPU.
    """
    for setting, why in engine_of(section, has_gpu=False).faults_on_cpu(section):
        raise ConfigError(f"{prefix}{setting}: {why}. {_where('samples', counts)}")


def _where(does: str, counts: str | None) -> str:
    """Where the plan computes, and how to plan for another machine than this one."""
    others = f" (a dry run plans for a machine with GPUs if {counts} count them)" if counts else ""
    return f"This plan {does} on the CPU{others}"


def _trained_faults(model: ModelSection) -> Iterator[Fault]:
    if model.fp8 is True:
        yield (
            "] fp8 = true",
            "needs a GPU of compute capability 9.0 or newer (H100, H200, B200); leave it out, or set "
            'fp8 = "reference", which computes the same rounding on any machine, slowly',
        )
    if model.ep_comm_backend == "deepep":
        yield '] ep_comm_backend = "deepep"', 'needs GPUs; use "torch"'
    for key in ("optim_cpu_offload", "fsdp_cpu_offload"):
        if getattr(model, key):
            yield f"] {key} = true", OFFLOADS
    if model.ac_offloading is not None:
        yield ".ac_offloading]", OFFLOADS
