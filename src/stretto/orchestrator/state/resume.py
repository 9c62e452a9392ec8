"""Starts an incarnation of a run: new, or from its own or another run's checkpoint."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from stretto.base import rundir
from stretto.base.errors import ConfigError, DataError
from stretto.base.paths import RunDir
from stretto.base.status import report
from stretto.config.root import OrchestratorConfig
from stretto.envs.base import Environment, tasks_of
from stretto.ledger.reader import LedgerReader
from stretto.ledger.writer import USED, Ledger
from stretto.monitors.purse import Used
from stretto.orchestrator.eval.results import load_mean_rewards
from stretto.orchestrator.groups.buffer import Buffer
from stretto.orchestrator.groups.filters import assess_group
from stretto.orchestrator.groups.hooks import BatchHooks
from stretto.orchestrator.state import run_checkpoint
from stretto.orchestrator.state.run_checkpoint import Progress
from stretto.orchestrator.tasks.order import Cursor, TaskMix

logger = logging.getLogger(__name__)


def starting_point(cfg: OrchestratorConfig) -> Progress:
    """The progress from which this incarnation of the run starts.

    Raises: ConfigError if there is nothing to resume from, or it is beyond max_steps.
    """
    if cfg.resume is None:
        return Progress()
    run, step = rundir.find_checkpoint(cfg.run_dir, cfg.resume.step, cfg.resume.dir)
    if cfg.resume.dir is not None and not run_checkpoint.has_orchestrator_half(run, step):
        raise ConfigError(
            f"resume.dir: {run.checkpoint(step)} is of an `sft` run, whose optimizer learned another loss; start "
            f'from its weights instead, model.name = "{run.weights_step(step)}"'
        )
    if cfg.resume.skip_progress:
        return Progress(origin=str(run.checkpoint(step)))
    rundir.check_max_steps(cfg.max_steps, step)
    progress = run_checkpoint.load(run, step)
    if cfg.resume.dir is not None:
        progress.origin = str(run.checkpoint(step))
        return progress
    progress.num_resumes += 1
    # A version is often evaluated after its checkpoint is saved: do not repeat that eval.
    means_of_eval = load_mean_rewards(cfg.run_dir, step)
    is_damaged = means_of_eval is None and cfg.run_dir.eval_results(step).exists()
    if is_damaged:
        logger.warning("%s is damaged: that eval is done again", cfg.run_dir.eval_results(step))
    if cfg.eval is not None and (cfg.eval.retrigger_on_resume or is_damaged):
        progress.sampled.pop(step, None)
        progress.greedy.pop(step, None)
    elif means_of_eval is not None:
        for means, mode in ((progress.sampled, "sampled"), (progress.greedy, "greedy")):
            if mode in means_of_eval:
                means.setdefault(step, means_of_eval[mode])
    return progress


def used_before(run_dir: RunDir, progress: Progress) -> Used:
    """What a run has used in its earlier starts, also in those steps that a resume takes back.

    progress: of the checkpoint, which knows the time of a run whose ledger does not.
    """
    if run_dir.ledger.exists():
        with LedgerReader(run_dir) as reader:
            if events := reader.events(USED):
                return Used.of(events[-1]["data"])
    return Used(seconds=progress.wall_s)


def with_fingerprints(cfg: OrchestratorConfig, progress: Progress, envs: Sequence[Environment]) -> Progress:
    """The progress with the ratios and data fingerprints of the environments.

    Raises: DataError if a run continues with other records than before.
    """
    ratios = {env.name: section.ratio for env, section in zip(envs, cfg.env, strict=True)}
    if progress.origin is not None and _is_new_run(cfg):
        data = {env.name: tasks_of(env, "train").fingerprint for env in envs}
        progress = run_checkpoint.carry_over(progress, data, ratios)
    progress.ratios = ratios
    check_fingerprints(envs, progress)
    return progress


def check_fingerprints(envs: Sequence[Environment], progress: Progress) -> None:
    """Store the fingerprints of the tasks' files, so that a resumed run uses the same.

    Raises: DataError if one has changed since the run began: the cursor would point to other records.
    """
    for env in envs:
        now = tasks_of(env, "train").fingerprint
        before = progress.data.get(env.name, now)
        if now != before:
            raise DataError(
                f"environment {env.name}: its records are not those that this run began with, so the position where it "
                "stopped is not valid; restore the old files and arguments, or start a new run"
            )
        if now is not None:
            progress.data[env.name] = now


def prepare_cursor(
    cfg: OrchestratorConfig,
    ledger: Ledger,
    buffer: Buffer,
    mix: TaskMix,
    progress: Progress,
    *,
    vocab_size: int | None,
    hooks: BatchHooks | None,
) -> Cursor:
    """Bring ledger and buffer to the start of this incarnation; returns the cursor of its draws."""
    info = {
        "pid": os.getpid(),
        "seed": cfg.seed,
        "max_off_policy_steps": cfg.max_off_policy_steps,
        "update_interval": max(cfg.weight_broadcast.interval, cfg.most_update_interval),
    }
    if not _is_new_run(cfg) and (undone := rundir.go_back(cfg.run_dir, progress.step)):
        report("note", text=f"checkpoints of steps {', '.join(map(str, undone))} are undone")
    if ledger.is_new:
        return _begin_ledger(ledger, buffer, mix, progress, info, cfg.run_dir)
    if _is_new_run(cfg):
        ledger.begin_after(progress.step)  # raises: the ledger is not new
    num_lost = ledger.rewind(progress.step)
    _restore_lost_draws(ledger, mix, progress, cfg.run_dir)
    oldest_version = buffer.oldest_version
    num_reused = 0
    for group in ledger.resumable(progress.step, oldest_version):
        verdict = assess_group(group, cfg, vocab_size, hooks)
        if not verdict.has_failed:
            buffer.restore(verdict.group, has_signal=verdict.has_signal, rejected=verdict.rejected)
            num_reused += len(group.rollouts)
    redraws = [(group_id, mix.playable(task)) for group_id, task in ledger.unfinished_draws()]
    buffer.expect_redraws(group_id for group_id, _ in redraws)
    partials = ledger.partial_rollouts(progress.step, oldest_version) if cfg.partial_rollout else {}
    text = (
        f"resumed from step {progress.step}: {num_reused} finished rollouts reused, "
        f"{len(redraws)} groups run again ({num_lost} rollouts were unfinished or too new)"
    )
    if partials:
        num_tokens = sum(each.num_tokens for each in partials.values())
        text += f"; {len(partials)} rollouts continue from {num_tokens} saved tokens"
    logger.info("%s", text)
    report("note", text=text)
    cursor = Cursor(max(ledger.next_draw(), progress.next_draw), deque(redraws), partials)
    ledger.run_started(info, resumed_step=progress.step)
    return cursor


def _is_new_run(cfg: OrchestratorConfig) -> bool:
    return cfg.resume is None or cfg.resume.dir is not None


def _begin_ledger(
    ledger: Ledger, buffer: Buffer, mix: TaskMix, progress: Progress, info: Mapping[str, Any], run_dir: RunDir
) -> Cursor:
    """Start with a new ledger.

    The run is new, starts from another run's checkpoint, or continues from its own after its ledger was lost. Draws
    that were open in the checkpoint are made again under their numbers.
    """
    if progress.step == 0:
        ledger.run_started(info)
        return Cursor(0, deque())
    _check_draws(progress, run_dir)
    ledger.begin_after(progress.step)
    with ledger.transaction():
        ledger.run_started({**info, "first_draw": progress.next_draw}, resumed_step=progress.step)
        redraws = [(number, mix.draw(number)) for number in progress.open_draws]
        for number, task in redraws:
            ledger.task_drawn(number, task)
    buffer.expect_redraws(number for number, _ in redraws)
    start = f"begins at {progress.origin}"
    if progress.origin is None:
        start = f"{run_dir.ledger} is missing: continues without it from step {progress.step}"
        logger.warning("%s; draws up to it count as trained", start)
    text = f"{start}: draws continue from number {progress.next_draw}, {len(redraws)} are made again"
    logger.info("%s", text)
    report("note", text=text)
    return Cursor(progress.next_draw, deque(redraws))


def _restore_lost_draws(ledger: Ledger, mix: TaskMix, progress: Progress, run_dir: RunDir) -> None:
    """If the ledger ends before the checkpoint, add the decisions that it has lost.

    A power cut can lose the end of a ledger, or an older copy was restored. Every draw that the checkpoint does not
    name as open counts as trained; draws that are open and lost are made again.
    """
    steps, missing = ledger.lost_steps(progress.step), ledger.missing_draws(progress.next_draw)
    if not steps and not missing:
        return
    _check_draws(progress, run_dir)
    is_open = set(progress.open_draws)
    # If no batch is lost, a draw that is open in the ledger is in no batch.
    decided = [number for number in ledger.open_draws() if number < progress.next_draw] if steps else []
    decided = [number for number in (*decided, *missing) if number not in is_open]
    with ledger.transaction():
        for number in missing:
            ledger.task_drawn(number, mix.draw(number))
        ledger.give_up(progress.step, decided, steps)
    defect = f"ends before step {steps[0]}" if steps else "lacks draws"
    text = (
        f"{run_dir.ledger} {defect}, though the checkpoint of step {progress.step} is complete: its end was lost. "
        f"{len(decided)} draws that the checkpoint does not name as open count as trained"
    )
    logger.warning("%s", text)
    report("note", text=text)


def _check_draws(progress: Progress, run_dir: RunDir) -> None:
    """Raises: DataError if neither ledger nor checkpoint knows what was drawn up to its step."""
    if progress.origin is None and progress.next_draw == 0:
        raise DataError(
            f"{run_dir.ledger} does not reach step {progress.step}, and the checkpoint of that step does not say "
            f"which draws were trained; begin a new run with the weights in {run_dir.weights_step(progress.step)}"
        )
