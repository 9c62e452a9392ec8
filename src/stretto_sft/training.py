"""`sft`: supervised fine-tuning, in one process or on several ranks.

    claim the run directory -> build learner and data (or load a checkpoint)
    -> each step: draw examples, pack, train; validate, checkpoint and export when due
    -> at the end, or at the first Ctrl-C: validate, checkpoint, export

The state of a run is that of the learner (weights, optimizer, step, random state) and the number of examples drawn.
Both are in a checkpoint, so a resumed run continues bit for bit. On several ranks each draws the same examples and
trains on its share of the packed rows; the lead writes files. The learner is trainer/learner.py, examples and their
order are rows.py. Preference pairs are rows of another kind, with a learner of their own: those of an add-on (`pairs`).
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stretto import addons
from stretto.base import log, rundir
from stretto.base.files import read_json, write_atomic
from stretto.base.paths import RunDir
from stretto.base.runtime import freeze_objects
from stretto.base.status import SUPERVISED_VAR, stop_signals, was_asked_to_finish
from stretto.chat.patches import load_image_processor
from stretto.chat.render import Renderer, build_renderer
from stretto.chat.templates import fix_clock
from stretto.chat.tokenizer import load_tokenizer
from stretto.check.checkpoint import check_resumed
from stretto.config.changes import changes
from stretto.config.load import dump, write_json
from stretto.config.root import SFTConfig
from stretto.config.sections.sft import PREFERENCE, Data, PreferenceData, SourceData
from stretto.config.sections.trainer import CkptSection, num_kept
from stretto.launch.run.report import how_to_continue
from stretto.models.hf import Policy
from stretto.models.tracing.snapshots import MemorySnapshots
from stretto.models.tracing.tracer import Tracer
from stretto.monitors.base import Monitors, build_monitors
from stretto.monitors.purse import Purse, Used
from stretto.monitors.steps import Throughput
from stretto.trainer.learner import Learner, find_tokenizer, find_tokens, load_policy
from stretto.trainer.process import StopFlag, choose_kernels, stop_on_signal
from stretto.trainer.publish.export import export_weights, prune_exports
from stretto.trainer.ranks.mesh import (
    build_mesh,
    choose_threads,
    is_lead_process,
    process_group,
    rank_name,
    run_on_lead,
    training_device,
)
from stretto.trainer.state import checkpoint
from stretto_sft.evals import OnlineEvals
from stretto_sft.position import ROLE, ResumePoint, find_data_position, read_position, used_before
from stretto_sft.rows import ExampleOrder, Examples, Rows, check_schedule, find_last_step, load_examples, pack
from stretto_sft.validation import Validation

SCRATCH_POSITIONS = "model.scratch.max_position_embeddings"
logger = logging.getLogger(__name__)

CONSOLE_INTERVAL_S = 0.5  # steps of a tiny model take milliseconds: more lines would not be readable
GROUP_TIMEOUT_S = 1800.0  # the longest that ranks wait for each other
MANY_EPOCHS = 30  # with more epochs rows are memorized
USUAL_EPOCHS = 3
VAL_SEED_OFFSET = 1_000_003  # so that an environment's validation rows are not its training rows


def main(cfg: SFTConfig) -> int:
    """Train until the last step or the first Ctrl-C; the exit status."""
    with process_group(GROUP_TIMEOUT_S), ExitStack() as stack:
        origin, changes_since, moment = run_on_lead(
            lambda: _prepare_run_dir(cfg, stack), tuple[tuple[str, int] | None, list[str], str]
        )
        fix_clock(datetime.fromisoformat(moment))
        stack.callback(fix_clock, None)
        start = None if origin is None else (RunDir(Path(origin[0])), origin[1])
        log.setup(rank_name(ROLE), cfg.run_dir, cfg.log.level, cfg.log.json_logging)
        for line in changes_since if is_lead_process() else []:
            logger.info("changed since the run was last started: %s", line)
        torch.set_num_threads(choose_threads(cfg.num_threads))
        choose_kernels(cfg)
        torch.manual_seed(cfg.seed)
        snapshots = MemorySnapshots(cfg.memory_profiler_path, rank_name(ROLE))
        session = build_session(cfg, start)
        if is_lead_process() and not session.is_new:  # a resume that is refused leaves the run's own
            write_json(cfg.run_dir.config("run"), dump(cfg))
            rundir.go_back(cfg.run_dir, session.saved_step)
        with stop_on_signal(*stop_signals(), signal.SIGUSR2) as stop:
            stop.is_set |= was_asked_to_finish()  # the signal may have come before this handler was set
            try:
                run_steps(session, stop, snapshots)
            except Exception as error:
                _note_how_to_continue(session, error)
                raise
        if session.is_stopped_early and not session.has_begun and session.is_new and is_lead_process():
            rundir.discard(cfg.run_dir)
            if session.budget_reason is not None:  # a resume asks for a larger one
                write_summary(session, {})
        return 0


def _note_how_to_continue(session: Session, error: Exception) -> None:
    """Add to an error how its run goes on, if it has come to something.

    Not where another program has started the ranks: the launcher of `sft` says it, and torchrun's command is not known.
    """
    if "WORLD_SIZE" not in os.environ and (session.has_begun or session.run.latest_complete_checkpoint()):
        error.add_note(how_to_continue(session.run, session.cfg, ROLE))


Packer = Callable[[Sequence[int]], list[Any]]
"""Indices of rows -> the micro batches that hold them, as the run's learner takes them."""


def _prepare_run_dir(cfg: SFTConfig, stack: ExitStack) -> tuple[tuple[str, int] | None, list[str], str]:
    """Claim the run directory until the stack is closed, unless the launcher has claimed it.

    Returns: directory and step to resume from, what has changed in the configuration since, and the moment that
    chat templates get.
    """
    run, resume = cfg.run_dir, cfg.resume
    if not os.environ.get(SUPERVISED_VAR):
        checkpoints = None if cfg.ckpt is None else cfg.ckpt.output_dir
        claim = rundir.claim(run, **cfg.start_options, checkpoints=checkpoints)
        stack.callback(claim.close)
    check_resumed(cfg)
    run.configs.mkdir(parents=True, exist_ok=True)
    changed = changes(run.config("run"), cfg) if resume is not None and resume.dir is None else []
    if resume is None or resume.dir is not None:
        write_json(run.config("run"), dump(cfg))
    if resume is None:
        return None, changed, _keep_moment(run, None)
    origin_run, step = rundir.find_checkpoint(run, resume.step, resume.dir)
    return (str(origin_run), step), changed, _keep_moment(run, origin_run)


def _keep_moment(run: RunDir, origin: RunDir | None) -> str:
    """The moment that chat templates get, local and in ISO format; it is written into the run directory.

    It is that of the run that is resumed: templates that write the date (Llama 3) would make other tokens on another
    day, and the checkpoint's position belongs to the tokens of the first day.
    """
    kept = {} if origin is None else read_json(origin.clock)
    try:
        moment = datetime.fromisoformat(str(kept.get("moment")))
    except ValueError:
        moment = datetime.now()
        if origin is not None:
            logger.info("%s has no moment; templates that write a date get that of today", origin.clock)
    text = moment.isoformat(timespec="seconds")
    if read_json(run.clock).get("moment") != text:
        write_atomic(run.clock, json.dumps({"moment": text}).encode(), is_durable=True)
    return text


def build_session(cfg: SFTConfig, start: ResumePoint | None) -> Session:
    """Build model, data and learner, and load the checkpoint of `start` if there is one."""
    run = cfg.run_dir
    policy, renderer, tokenizer_dir = _load_model(cfg)
    logger.info("messages are rendered by %s", renderer.description)
    longest = min(cfg.seq_len, policy.config.hf.get("max_position_embeddings") or cfg.seq_len)
    positions = "max_position_embeddings of the model" if cfg.model.scratch is None else SCRATCH_POSITIONS
    limit = "seq_len" if longest == cfg.seq_len else positions
    examples = _load_data(cfg, cfg.data, renderer, longest, limit, cfg.seed)
    if cfg.pair_loss is not None:
        pairs().adapt(cfg, policy, renderer.tokenizer, examples)
    order = ExampleOrder(len(examples), cfg.seed, is_shuffled=not isinstance(cfg.data, SourceData) or cfg.data.shuffle)
    step = 0 if start is None else _find_position(cfg, start, examples, order)
    max_steps = find_last_step(cfg, len(examples), step, order.num_drawn)
    if start is None:
        check_schedule(cfg, len(examples), max_steps)
    log_epochs(cfg, len(examples), max_steps, order.num_drawn + (max_steps - step) * cfg.batch_size)
    learner = _build_learner(cfg, policy, max_steps)
    upcoming = order.upcoming(_num_draws(cfg, order, max_steps - step))
    packer = _build_packer(cfg, learner, examples, run.reference_logprobs, upcoming)
    validation = None
    if cfg.val is not None:
        held_out = _load_data(cfg, cfg.val.data, renderer, longest, limit, cfg.seed + VAL_SEED_OFFSET)
        all_rows = range(len(held_out))
        pack_held_out = _build_packer(cfg, learner, held_out, run.val_reference_logprobs, all_rows)
        validation = Validation(cfg.val, pack_held_out(all_rows), learner, run, tokenizer_dir)
    used = run_on_lead(lambda: used_before(run, start).as_dict(), dict[str, float])
    purse = Purse(cfg.budget, Used.of(used))
    purse.check()
    session = Session(cfg, run, learner, examples, order, validation, max_steps, tokenizer_dir, packer, purse)
    if (ckpt := cfg.ckpt) is not None:
        session.saver = checkpoint.build_saver(cfg, lambda step: complete_checkpoint(run, ckpt, step))
    if start is not None:
        session.is_new = start[0] != run
        session.resumed_step = checkpoint.resume(cfg, learner, *start)
        session.saved_step = session.resumed_step or 0
        if validation is not None and not session.is_new:
            validation.load(read_position(start).get("val"), start[1])
    logger.info(
        "%d %s, %d tokens; %d parameters on %s; %s",
        len(examples),
        "examples" if cfg.pair_loss is None else "pairs",
        examples.num_tokens,
        sum(p.numel() for p in policy.parameters()),
        training_device(),
        f"steps {learner.step + 1} to {max_steps}" if learner.step < max_steps else f"all {max_steps} steps are done",
    )
    return session


def pairs() -> Any:
    """The add-on that has rows and learner of [data] type = "preference".

    Raises: ConfigError if it is not installed.
    """
    return addons.load("stretto.sft", "preference", PREFERENCE)


def _load_data(cfg: SFTConfig, data: Data, renderer: Renderer, longest: int, limit: str, seed: int) -> Rows:
    """The rows of a data section as tokens; longest: of one sequence, as the key `limit` says."""
    if isinstance(data, PreferenceData):
        return pairs().load_rows(cfg, data, renderer, longest, limit)
    return load_examples(data, renderer, cfg.loss_mask, longest, seed, limit=limit)


def _build_learner(cfg: SFTConfig, policy: Policy, max_steps: int) -> Learner:
    """The learner of examples or of pairs."""
    common: dict[str, Any] = {"model": cfg.model, "optim": cfg.optim, "scheduler": cfg.scheduler}
    common |= {"max_steps": max_steps, "mesh": build_mesh(cfg.model, policy.config)}
    build = Learner if cfg.pair_loss is None else partial(pairs().build_learner, cfg)
    return build(policy, **common)


def _build_packer(cfg: SFTConfig, learner: Learner, rows: Rows, kept: Path, wanted: Iterable[int]) -> Packer:
    """What packs rows into micro batches, by their indices.

    kept: where the start's log-probabilities of pairs are kept; wanted: the rows that will be asked for.
    """
    if isinstance(rows, Examples):
        return lambda indices: pack([rows[i] for i in indices], cfg.seq_len)
    return pairs().build_packer(cfg, learner, rows, kept, wanted)


def _load_model(cfg: SFTConfig) -> tuple[Policy, Renderer, Path]:
    """The policy, its renderer, and the directory of its tokenizer."""
    tokenizer_dir = find_tokenizer(cfg.model, cfg.tokenizer, cfg.run_dir)
    tokenizer = load_tokenizer(tokenizer_dir)
    tokens = find_tokens(tokenizer)
    if cfg.pair_loss is None:
        policy: Policy = load_policy(cfg.model, may_be_meta=True, **tokens)
    else:
        policy = pairs().load_policy(cfg, **tokens)
    torch.set_num_threads(choose_threads(cfg.num_threads, sum(p.numel() for p in policy.parameters())))
    model_type = policy.config.hf["model_type"]
    model_dir = Path(cfg.model.name) if Path(cfg.model.name).is_dir() else tokenizer_dir
    images = load_image_processor(tokenizer_dir if cfg.model.scratch is not None else model_dir)
    return policy, build_renderer(tokenizer, cfg.renderer, model_type, images), tokenizer_dir


def _find_position(cfg: SFTConfig, start: ResumePoint, examples: Rows, order: ExampleOrder) -> int:
    """The step to continue after, 0 if the run begins anew; sets how many examples have been drawn."""
    cursor = read_position(start)
    if cfg.resume is not None and cfg.resume.skip_progress:
        return 0
    rundir.check_max_steps(cfg.max_steps, start[1])
    if cfg.ckpt is None or not cfg.ckpt.skip_dataloader:
        order.num_drawn = find_data_position(start, cursor, examples, is_own=start[0] == cfg.run_dir)
    return start[1]


def log_epochs(cfg: SFTConfig, num_examples: int, max_steps: int, num_draws: int) -> None:
    """Log how many epochs the run has; a warning if they are many and max_epochs is not set.

    num_draws: examples drawn by the last step, if max_epochs does not end the run earlier.
    """
    epochs = min(num_draws / num_examples, cfg.max_epochs or math.inf)
    text = (
        f"{num_examples:,} row{'s' * (num_examples != 1)}, batches of {cfg.batch_size:,}: "
        f"{max_steps:,} step{'s are' if max_steps != 1 else ' is'} {epochs:,.{0 if epochs >= 10 else 1}f} epochs"
    )
    if epochs <= MANY_EPOCHS or cfg.max_epochs is not None:
        logger.info("%s", text)
        return
    logger.warning(
        "%s: the model will memorize these rows. Set max_epochs = %d beside max_steps, lower max_steps, "
        "or give more rows under [data]",
        text,
        USUAL_EPOCHS,
    )


@dataclass
class Session:
    """The objects and counters of a run, ready for the next step."""

    cfg: SFTConfig
    run: RunDir
    learner: Learner
    examples: Rows
    order: ExampleOrder
    validation: Validation | None
    max_steps: int
    tokenizer_dir: Path
    pack: Packer
    purse: Purse
    budget_reason: str | None = None
    """Why the budget ends the run, once it does."""
    resumed_step: int | None = None
    saved_step: int = 0
    exported_step: int = 0
    saver: checkpoint.Saver | None = None
    evals: OnlineEvals | None = None
    num_tokens: int = 0
    is_new: bool = True
    """True unless the run is resumed; also if it starts from another run's checkpoint."""
    started_at: float = field(default_factory=time.perf_counter)
    throughput: Throughput = field(default_factory=Throughput)

    def __post_init__(self) -> None:
        self.is_checkpoint_due = checkpoint.Due(self.cfg.ckpt, self.learner.mesh)

    @property
    def is_stopped_early(self) -> bool:
        """True if the run has ended before its last step."""
        return self.learner.step < self.max_steps

    @property
    def val_loss(self) -> float | None:
        """The loss of the last validation."""
        return None if self.validation is None else self.validation.newest

    @property
    def stop_reason(self) -> str | None:
        """Why the run ends before its last step, if val.early_stop or its budget ends it."""
        if not self.is_stopped_early:
            return None
        return self.budget_reason or (None if self.validation is None else self.validation.stop_reason)

    @property
    def has_begun(self) -> bool:
        """True once this process has trained a step."""
        return self.learner.step > (self.resumed_step or 0)


def run_steps(session: Session, stop: StopFlag, snapshots: MemorySnapshots) -> None:
    """Train every step until max_steps or a stop, then end the run."""
    cfg, learner, validation = session.cfg, session.learner, session.validation
    monitors = Monitors({})
    if is_lead_process():
        monitors = build_monitors(cfg.monitors, session.run, ROLE, cfg.run_name, resumed_step=session.resumed_step)
    console = ConsoleLog(session)
    tracer = Tracer(session.run, rank_name(ROLE))
    try:
        if cfg.eval is not None:
            session.evals = OnlineEvals(cfg, learner, session.tokenizer_dir, session.max_steps)
            session.evals.evaluate()
        if validation is not None and validation.section.eval_on_start and session.resumed_step is None:
            monitors.log(0, validation.measure())
        freeze_objects()
        session.purse.begin(learner.step)
        while learner.step < session.max_steps and not _should_stop(session, stop):
            step = learner.step + 1
            with tracer.step(step), snapshots.step(step):
                metrics = train_step(session)
            if validation is not None and checkpoint.is_interval_end(learner.step, validation.section.interval):
                metrics |= validation.measure()
            monitors.log(learner.step, metrics)
            console.step(metrics)
            save_if_due(session)
            if session.evals is not None:
                session.evals.evaluate()
        end_run(session, monitors)
    finally:
        if session.evals is not None:
            session.evals.close()
        monitors.close()


def _should_stop(session: Session, stop: StopFlag) -> bool:
    """True if any rank got a stop signal, the loss gets no better, or the budget is used.

    All ranks then stop after the same step; the lead's clock decides about the budget.
    """
    if session.stop_reason is not None:
        return True
    if is_lead_process():
        session.budget_reason = session.purse.excess()
    return any(session.learner.mesh.gather(stop.is_set or session.budget_reason is not None, bool))


def train_step(session: Session) -> dict[str, float]:
    """One optimizer step on the next batch of examples."""
    start = time.perf_counter()
    order, cfg = session.order, session.cfg
    micro_batches = session.pack(order.draw(_num_draws(cfg, order, 1)))
    packed_at = time.perf_counter()
    session.learner.forward_backward(session.learner.mesh.local_items(micro_batches))
    computed_at = time.perf_counter()
    metrics = session.learner.optim_step()
    num_tokens = sum(mb.num_tokens for mb in micro_batches)
    session.num_tokens += num_tokens
    used = session.purse.end_step(session.learner.step, num_tokens)
    time_s = time.perf_counter() - start
    return {
        **metrics,
        "progress/epoch": order.epoch,
        "progress/total_samples": order.num_drawn,
        "batch/tokens": num_tokens,
        "batch/micro_batches": len(micro_batches),
        "time/step": time_s,
        "time/pack": packed_at - start,
        "time/forward_backward": computed_at - packed_at,
        "time/optim": start + time_s - computed_at,
        **used,
        "perf/throughput": session.throughput.add(num_tokens, time_s),
    }


def _num_draws(cfg: SFTConfig, order: ExampleOrder, num_steps: int) -> int:
    """The examples that the next steps draw; the last batch of max_epochs may be smaller than others."""
    count = num_steps * cfg.batch_size
    return count if cfg.max_epochs is None else min(count, cfg.max_epochs * order.num_examples - order.num_drawn)


def save_if_due(session: Session) -> None:
    """Save a checkpoint and export weights if their intervals end.

    Exports without an interval follow checkpoints.
    """
    ckpt, step = session.cfg.ckpt, session.learner.step
    if ckpt is None or session.saver is None:
        return
    session.saver.check()
    if session.is_checkpoint_due(step):
        save_checkpoint(session)
    if ckpt.weights is not None and checkpoint.is_interval_end(step, ckpt.weights.interval or ckpt.interval):
        export(session)


def save_checkpoint(session: Session) -> None:
    """Write checkpoints/step_N, its marker last; training may continue during the writing."""
    step = session.learner.step
    if session.saved_step == step or session.saver is None:
        return
    losses = [] if session.validation is None else session.validation.state()
    cursor = {"num_drawn": session.order.num_drawn, "data": session.examples.fingerprint(), "val": losses}
    cursor["used"] = session.purse.used.as_dict()
    session.saver.save(session.learner, cursor)
    session.saved_step = step


def complete_checkpoint(run: RunDir, ckpt: CkptSection, step: int) -> None:
    """Mark a checkpoint as complete once its files are written, then delete old checkpoints."""
    marker = {"step": step, "time": time.time()}
    write_atomic(run.complete_marker(step), json.dumps(marker).encode(), is_durable=True)
    rundir.prune_checkpoints(run, num_kept(ckpt), ckpt.keep_interval)


def export(session: Session) -> None:
    """Write weights/step_N, unless it is written already."""
    if session.exported_step != session.learner.step:
        ckpt = session.cfg.ckpt
        assert ckpt is not None, "only [ckpt] asks for exports"
        session.learner.check_finite()
        export_weights(
            session.run,
            session.learner.network.weights,
            session.learner.step,
            session.tokenizer_dir,
            session.cfg.model if ckpt.weights is not None and ckpt.weights.save_adapter_separately else None,
        )
        session.exported_step = session.learner.step
        prune_exports(session.run.weights, ckpt, session.learner.step, session.learner.network.weights.mesh)


def end_run(session: Session, monitors: Monitors) -> None:
    """Validate, save, wait for evals, and log where the results are."""
    cfg, learner, run, is_stopped_early = session.cfg, session.learner, session.run, session.is_stopped_early
    if is_stopped_early and not session.has_begun:
        if is_lead_process() and session.budget_reason is None:
            logger.info("stopped before the first step: there was nothing to save")
        elif is_lead_process():
            words = f"{'' if session.is_new else '--resume and '}{session.purse.larger()}"
            logger.info("nothing was trained: %s, before the first step", session.budget_reason)
            logger.info("next: the same command with %s", words)
        return
    validation = session.validation
    if validation is not None and learner.step not in validation.losses and not is_stopped_early:
        monitors.log(learner.step, validation.measure())
        logger.info("step %d: val %.4f", learner.step, session.val_loss)
    if cfg.ckpt is not None and session.saver is not None:
        save_checkpoint(session)
        if cfg.ckpt.weights is not None:
            export(session)
        session.saver.wait()
    evals = {}
    try:
        if session.evals is not None:
            session.evals.evaluate(is_last=not is_stopped_early)
            evals = session.evals.wait_for_results()
    finally:  # the summary is written even if the evals fail
        if is_lead_process():
            write_summary(session, evals)
    if not is_lead_process():
        return
    for version, means in evals.items():
        logger.info("step %d: %s", version, "  ".join(f"{name} {mean:.3f}" for name, mean in means.items()))
    if session.stop_reason is not None:
        logger.info("the run ends early, after step %d: %s", learner.step, session.stop_reason)
        if session.budget_reason is not None and cfg.ckpt is not None:
            logger.info("next: the same command with --resume and %s", session.purse.larger())
    elif is_stopped_early:
        logger.info("stopped at step %d of %d; --resume continues", learner.step, session.max_steps)
    if session.exported_step:
        logger.info("weights: %s", run.latest_weights)
    elif cfg.ckpt is None and (validation is None or not validation.section.keep_best):
        logger.warning("nothing was saved: ckpt = None")
    if validation is not None and validation.section.keep_best and validation.best_step:
        loss = validation.losses[validation.best_step]
        logger.info("best: %s (step %d, val %.4f)", run.best_weights, validation.best_step, loss)


def write_summary(session: Session, evals: dict[int, dict[str, float]]) -> None:
    """Write RUN/summary.json."""
    wall_s = time.perf_counter() - session.started_at
    summary = {
        "steps": session.learner.step,
        "max_steps": session.max_steps,
        "epochs": session.order.epoch,
        "val_loss": session.val_loss,
        "stopped_because": session.stop_reason,
        "used": session.purse.summary(),
        "evals": evals,
        "wall_s": wall_s,
        "tokens_per_s": session.num_tokens / wall_s,
        "resumed": session.resumed_step is not None,
        "weights": str(session.run.latest_weights) if session.exported_step else None,
    }
    session.run.summary.write_text(json.dumps(summary, indent=2) + "\n")


class ConsoleLog:
    """Logs one line per step, or fewer if steps are shorter than CONSOLE_INTERVAL_S."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._first_step = session.learner.step
        self._started_at = time.perf_counter()
        self._written_at = -math.inf

    def step(self, metrics: dict[str, float]) -> None:
        if not is_lead_process():
            return
        now = time.perf_counter()
        session, step = self._session, self._session.learner.step
        must_log = step == session.max_steps or "val/loss" in metrics
        if not must_log and now - self._written_at < CONSOLE_INTERVAL_S:
            return
        self._written_at = now
        left_s = (now - self._started_at) / (step - self._first_step) * (session.max_steps - step)
        forecast = session.purse.forecast()
        until = f"; {forecast}" if forecast is not None and forecast.last_step < session.max_steps else ""
        val = "" if session.val_loss is None else f"  val {session.val_loss:.4f}"
        logger.info(
            "step %d/%d (%d%%, %d:%02d left%s)  loss %.4f%s  lr %.2e  %.0f tokens/s  epoch %.2f",
            step,
            session.max_steps,
            100 * step // session.max_steps,
            *divmod(round(left_s), 60),
            until,
            metrics["nll/mean"] if "nll/mean" in metrics else metrics["loss/mean"],
            val,
            metrics["optim/lr"],
            metrics["perf/throughput"],
            session.order.epoch,
        )
