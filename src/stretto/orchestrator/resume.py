"""Where a life of a run begins: from nothing, at a checkpoint of its own, or at one of another run."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from stretto.base import rundir
from stretto.base.errors import ConfigError, DataError
from stretto.base.status import report
from stretto.config.roots import OrchestratorConfig
from stretto.envs.base import Environment, tasks_of
from stretto.ledger.writer import Ledger
from stretto.orchestrator import checkpoint
from stretto.orchestrator.batch_hooks import BatchHooks
from stretto.orchestrator.buffer import Buffer
from stretto.orchestrator.checkpoint import Progress
from stretto.orchestrator.draws import Cursor
from stretto.orchestrator.filters import settle
from stretto.orchestrator.scores import recall
from stretto.orchestrator.tasks import TaskMix

logger = logging.getLogger(__name__)


def starting_point(cfg: OrchestratorConfig) -> Progress:
    """Where this life of the run begins.

    Raises: ConfigError when there is nothing to resume from, or it is beyond the end of the run.
    """
    if cfg.resume is None:
        return Progress()
    run, step = rundir.find_checkpoint(cfg.run_dir, cfg.resume.step, cfg.resume.dir)
    if cfg.resume.dir is not None and not checkpoint.is_there(run, step):
        raise ConfigError(
            f"resume.dir: {run.checkpoint(step)} is of an `sft` run, whose optimizer learned another loss; start "
            f'from its weights instead, model.name = "{run.weights_step(step)}"'
        )
    rundir.check_max_steps(cfg.max_steps, step)
    progress = checkpoint.load(run, step)
    if cfg.resume.dir is not None:
        progress.origin = str(run.checkpoint(step))
        return progress
    progress.num_resumes += 1
    # A version is often evaluated after its checkpoint is saved: what was done is not done again.
    done = recall(cfg.run_dir, step)
    if cfg.eval is not None and cfg.eval.retrigger_on_resume:
        progress.sampled.pop(step, None)
        progress.greedy.pop(step, None)
    elif done is not None:
        for means, mode in ((progress.sampled, "sampled"), (progress.greedy, "greedy")):
            if mode in done:
                means.setdefault(step, done[mode])
    return progress


def with_data_of(cfg: OrchestratorConfig, progress: Progress, envs: Sequence[Environment]) -> Progress:
    """The same progress, which notes the records and ratios of the environments.

    Raises: DataError where a run goes on with other records than before.
    """
    ratios = {env.name: section.ratio for env, section in zip(envs, cfg.env, strict=True)}
    if progress.origin is not None and _is_first_life(cfg):
        data = {env.name: tasks_of(env, "train").fingerprint for env in envs}
        progress = checkpoint.begun_at(progress, data, ratios)
    progress.ratios = ratios
    same_data(envs, progress)
    return progress


def same_data(envs: Sequence[Environment], progress: Progress) -> None:
    """Note what tasks are made from, so that a resumed run goes on with the same.

    Raises: DataError where it has changed since the run began: the cursor would point at other records.
    """
    for env in envs:
        now = tasks_of(env, "train").fingerprint
        before = progress.data.get(env.name, now)
        if now != before:
            raise DataError(
                f"environment {env.name}: its records are not those that this run began with, and the place where it "
                "stopped means nothing in others; put the old files and arguments back, or begin a new run"
            )
        if now is not None:
            progress.data[env.name] = now


def first_cursor(
    cfg: OrchestratorConfig,
    ledger: Ledger,
    buffer: Buffer,
    mix: TaskMix,
    progress: Progress,
    *,
    vocab_size: int | None,
    hooks: BatchHooks | None,
) -> Cursor:
    """What is drawn next, with the ledger and the buffer brought to where this life begins."""
    info = {"pid": os.getpid(), "seed": cfg.seed, "max_off_policy_steps": cfg.max_off_policy_steps}
    if _is_first_life(cfg):
        return _begin(ledger, buffer, mix, progress, info)
    cursor = _take_over(ledger, buffer, cfg, progress, vocab_size, hooks)
    ledger.run_started(info, resumed_step=progress.step)
    return cursor


def _is_first_life(cfg: OrchestratorConfig) -> bool:
    return cfg.resume is None or cfg.resume.dir is not None


def _begin(
    ledger: Ledger, buffer: Buffer, mix: TaskMix, progress: Progress, info: Mapping[str, Any]
) -> Cursor:
    """The first life of a run: from nothing, or from a checkpoint of another run.

    Draws that were under way there are made again under their numbers.
    """
    if progress.origin is None:
        ledger.run_started(info)
        return Cursor(ledger.next_draw(), deque())
    ledger.began_at(progress.step)
    with ledger.transaction():
        ledger.run_started({**info, "first_draw": progress.next_draw}, resumed_step=progress.step)
        redraws = [(number, mix.draw(number)) for number in progress.open_draws]
        for number, task in redraws:
            ledger.task_drawn(number, task)
    buffer.owe(number for number, _ in redraws)
    text = f"begins at {progress.origin}: draws go on from number {progress.next_draw}, {len(redraws)} are made again"
    logger.info("%s", text)
    report("note", text=text)
    return Cursor(progress.next_draw, deque(redraws))


def _take_over(
    ledger: Ledger,
    buffer: Buffer,
    cfg: OrchestratorConfig,
    progress: Progress,
    vocab_size: int | None,
    hooks: BatchHooks | None,
) -> Cursor:
    """Forget what came after the checkpoint, take over finished groups that are fresh, list what must run again."""
    step = progress.step
    rewound = ledger.rewind(step)
    groups = ledger.resumable(step, buffer.bounds.oldest_version(step + 1))
    reused = 0
    for group in groups:
        settled = settle(group, cfg, vocab_size, hooks)
        if not settled.has_failed:
            rejected = settled.verdict.rejected
            buffer.restore(settled.group, has_signal=settled.has_signal, rejected=rejected)
            reused += len(group.rollouts)
    redraws = ledger.unfinished_draws()
    buffer.owe(group_id for group_id, _ in redraws)
    kept = ledger.kept_rollouts(step, buffer.bounds.oldest_version(step + 1)) if cfg.partial_rollout else {}
    text = (
        f"resumed from step {step}: {reused} finished rollouts reused, "
        f"{len(redraws)} groups run again ({rewound.rollouts_lost} rollouts were unfinished or too new)"
    )
    if kept:
        num_tokens = sum(each.num_tokens for each in kept.values())
        text += f"; {len(kept)} rollouts go on from {num_tokens} tokens that they have"
    logger.info("%s", text)
    report("note", text=text)
    return Cursor(max(ledger.next_draw(), progress.next_draw), deque(redraws), kept)
