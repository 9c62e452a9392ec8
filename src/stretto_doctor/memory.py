"""Whether the processes of a config fit into memory, as `stretto plan` predicts it, and edits that help."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from stretto.base.errors import ConfigError
from stretto.base.process import output_of, visible_gpus
from stretto.config.load import load
from stretto.config.root import RLConfig, SFTConfig
from stretto.data.hub_model import is_hub_name
from stretto_bench.hardware import GPUS, find_hardware
from stretto_doctor.edits import MOST_OFFERED, Edit, written
from stretto_doctor.finding import Finding, bad, good, note
from stretto_doctor.machine import gib
from stretto_plan.memory import Memory, all_memory
from stretto_plan.setup import build_setup

NO_EDIT = "`stretto plan` shows what takes it; more GPUs, or a smaller model"


def check_memory(cfg: RLConfig | SFTConfig, words: Sequence[str]) -> Iterator[Finding]:
    """A finding per kind of process; for one that does not fit, with the smallest edit that helps."""
    gpu = _gpu()
    if gpu == "":
        yield note("memory", "of this GPU is not in the table; `stretto plan --gpu NAME` takes another")
        return
    name = cfg.model.name
    if cfg.model.scratch is None and not is_hub_name(name) and not Path(name).expanduser().is_dir():
        yield note("memory", "is not foreseen: the model is not here")
        return
    try:
        foreseen = memories(cfg, gpu)
    except ConfigError as error:  # the model is not here, which another finding says
        yield note("memory", f"is not foreseen: {error}")
        return
    for memory in foreseen:
        text = f"{memory.who}: {gib(memory.peak.total)} of {gib(memory.capacity_bytes)} at most, foreseen"
        if memory.fits:
            yield good("memory", text)
        else:
            edits = saving_edits(cfg, words, [memory.who])
            fix = written(edits[0]) if edits else NO_EDIT
            yield bad("memory", f"{text}, while: {memory.peak.name}", fix)


def memories(cfg: RLConfig | SFTConfig, gpu: str | None) -> list[Memory]:
    """The predicted memory of each kind of process."""
    hardware = None if gpu is None else find_hardware(gpu, 1)
    return all_memory(build_setup(cfg, hardware=hardware))


def saving_edits(
    cfg: RLConfig | SFTConfig, words: Sequence[str], whos: Collection[str] | None = None
) -> list[list[Edit]]:
    """Sets of edits with which these processes fit, the smallest change to training first; [] if none is enough.

    whos: names of processes; None: all of them. Two edits are offered only if no single one is enough.
    """
    gpu = _gpu()
    single = [[edit] for edit in _savings(cfg)]
    pairs = [[*one, *two] for one, two in itertools.combinations(single, 2) if one[0][0] != two[0][0]]
    for sets in (single, pairs):
        fitting = (edits for edits in sets if _fits(cfg, [*words, *itertools.chain(*edits)], gpu, whos))
        if found := list(itertools.islice(fitting, MOST_OFFERED)):
            return found
    return []


def _savings(cfg: RLConfig | SFTConfig) -> list[Edit]:
    """Edits that save memory, the smallest change to training first."""
    optim = "--optim.type" if isinstance(cfg, SFTConfig) else "--trainer.optim.type"
    shorter = [("--seq-len", str(cfg.seq_len // by)) for by in (2, 4) if cfg.seq_len // by >= 256]
    return [("--model.ac.mode", "full"), *shorter, (optim, "sgd"), ("--model.lora.rank", "16")]


def _fits(cfg: RLConfig | SFTConfig, words: Sequence[str], gpu: str | None, whos: Collection[str] | None) -> bool:
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # warnings about configs that are only tried
    try:
        changed = load(type(cfg), list(words), verb="sft" if isinstance(cfg, SFTConfig) else "rl")
        return all(memory.fits for memory in memories(changed, gpu) if whos is None or memory.who in whos)
    except ConfigError:
        return False
    finally:
        logging.disable(level)


def _gpu() -> str | None:
    """This machine's GPUs by their name in foresee's table; None without GPUs, "" if the table does not have them."""
    if not visible_gpus():
        return None
    listing = output_of(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]) or ""
    return next((name for name in GPUS if name in listing), "")
