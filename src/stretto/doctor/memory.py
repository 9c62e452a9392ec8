"""Whether the processes of a config fit into memory, as `stretto plan` foresees it, and an edit that helps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from stretto.base.errors import ConfigError
from stretto.base.process import visible_gpus
from stretto.config.load import load
from stretto.config.root import RLConfig, SFTConfig
from stretto.data.hub_model import is_hub_name
from stretto.doctor.finding import Finding, State
from stretto.doctor.machine import gib, output_of
from stretto.foresee.command import all_memory
from stretto.foresee.hardware import GPUS, find_hardware
from stretto.foresee.memory import Memory
from stretto.foresee.setup import build_setup


def check_memory(cfg: RLConfig | SFTConfig, words: Sequence[str]) -> Iterator[Finding]:
    """One line per kind of process; for one that does not fit, the smallest edit that helps."""
    gpu = _gpu()
    if gpu == "":
        yield Finding(
            "memory", State.NOTE, "of this GPU is not in the table; `stretto plan --gpu NAME` takes another"
        )
        return
    name = cfg.model.name
    if cfg.model.scratch is None and not is_hub_name(name) and not Path(name).expanduser().is_dir():
        yield Finding("memory", State.NOTE, "is not foreseen: the model is not here")
        return
    try:
        foreseen = memories(cfg, gpu)
    except ConfigError as error:  # the model is not here; its own line says so
        yield Finding("memory", State.NOTE, f"is not foreseen: {error}")
        return
    for memory in foreseen:
        text = f"{memory.who}: {gib(memory.peak.total)} of {gib(memory.capacity_bytes)} at most, foreseen"
        if memory.fits:
            yield Finding("memory", State.GOOD, text)
        else:
            fix = (
                saving_edit(cfg, words, gpu, memory.who)
                or "`stretto plan` shows what takes it; more GPUs, or a smaller model"
            )
            yield Finding("memory", State.BAD, f"{text}, while: {memory.peak.name}", fix)


def memories(cfg: RLConfig | SFTConfig, gpu: str | None) -> list[Memory]:
    """What each kind of process will take."""
    hardware = None if gpu is None else find_hardware(gpu, 1)
    return all_memory(build_setup(cfg, hardware=hardware))


def saving_edit(cfg: RLConfig | SFTConfig, words: Sequence[str], gpu: str | None, who: str) -> str | None:
    """The first edit with which this process fits, as it would be typed; None if none of them suffices.

    The smallest change to what is learned comes first.
    """
    verb, optim = ("sft", "--optim.type") if isinstance(cfg, SFTConfig) else ("rl", "--trainer.optim.type")
    shorter = [("--seq-len", str(cfg.seq_len // by)) for by in (2, 4) if cfg.seq_len // by >= 256]
    for flag, value in (("--model.ac.mode", "full"), *shorter, (optim, "sgd"), ("--model.lora.rank", "16")):
        try:
            changed = load(type(cfg), [*words, flag, value], verb=verb)
            found = {memory.who: memory for memory in memories(changed, gpu)}
        except ConfigError:
            continue
        if who in found and found[who].fits:
            return f"{flag} {value}"
    return None


def _gpu() -> str | None:
    """The table's name of this machine's GPUs; None without GPUs; "" for one that is not in the table."""
    if not visible_gpus():
        return None
    listing = output_of(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]) or ""
    return next((name for name in GPUS if name in listing), "")
