"""The orchestrator process: builds the parts that loop.py runs, and shuts them down.

Exit status: 0 if done or stopped by one Ctrl-C, 130 if stopped by two, 70 if stalled. A failure raises the
StrettoError that says who must act. torch and transformers are never imported here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

from stretto import addons
from stretto.algorithms.custom import load_credit
from stretto.base import log, rundir
from stretto.base.foreign import warn_when_blocked
from stretto.base.paths import RunDir
from stretto.base.ports import PortClaims
from stretto.base.runtime import collect_on_growth
from stretto.base.secret import load_secret
from stretto.base.status import is_supervised, report, stop_signals
from stretto.base.watch import Watch
from stretto.chat.render import Renderer
from stretto.config.root import OrchestratorConfig
from stretto.config.sections.algorithm import CustomAlgo, RaeAlgo
from stretto.config.sections.curriculum import POOLS
from stretto.config.sections.model import shares_prefixes
from stretto.config.sections.orchestrator import OrchestratorSection
from stretto.data.hub_model import fetch, find_config
from stretto.data.model_file import find_model_file
from stretto.envs.base import Environment, RunInfo, tasks_of
from stretto.envs.models import NO_MODELS, ChatModel
from stretto.ledger import Ledger, Limits
from stretto.ledger.writer import USED
from stretto.monitors.base import build_monitors
from stretto.monitors.purse import Purse
from stretto.orchestrator.alone import AbsentEngines, AbsentTrainer
from stretto.orchestrator.batch import cost_of_model
from stretto.orchestrator.beside import Beside, open_beside
from stretto.orchestrator.build import (
    build_policy_renderer,
    model_names,
    open_env,
    run_info,
    system_prompts,
    untrained_tokens,
)
from stretto.orchestrator.clients import build_engines
from stretto.orchestrator.dry_run import check_first_tasks, check_sampling
from stretto.orchestrator.eval.evaluator import Evaluator, eval_envs
from stretto.orchestrator.groups.advantages import Baselines, check_overlong
from stretto.orchestrator.groups.bounds import Bounds
from stretto.orchestrator.groups.buffer import Buffer
from stretto.orchestrator.groups.hooks import BatchHooks, RolloutFunction, load_batch_hooks, load_rollout_function
from stretto.orchestrator.rollout.player import Player
from stretto.orchestrator.run.loop import Loop
from stretto.orchestrator.run.parts import GROUP, RunParts, load_steering
from stretto.orchestrator.state.resume import prepare_cursor, starting_point, used_before, with_fingerprints
from stretto.orchestrator.state.run_checkpoint import Progress, summary_of
from stretto.orchestrator.tasks.order import Curriculum, TaskMix
from stretto.orchestrator.versions.loader import VersionLoader
from stretto.orchestrator.versions.shared_devices import SharedDevices
from stretto.transports.control import ControlServer
from stretto.transports.engine.client import EngineClient
from stretto.transports.meeting import announce, at_all_addresses, moved_ports
from stretto.transports.rollouts import Sender, build_sender

logger = logging.getLogger(__name__)


def main(cfg: OrchestratorConfig) -> int:
    """Run the orchestrator and return its exit status."""
    with claim_part(cfg):
        log.setup("orchestrator", cfg.run_dir, cfg.log.level, cfg.log.json_logging)
        return asyncio.run(run(cfg))


def claim_part(cfg: OrchestratorConfig) -> AbstractContextManager[None]:
    """Claim the run's ledger for this process, unless a launcher has claimed the whole run."""
    if is_supervised():
        return nullcontext()
    is_new = cfg.resume is None or cfg.resume.dir is not None
    return rundir.claim_part(cfg.run_dir, "orchestrator", is_new=is_new, clean=cfg.clean)


async def run(cfg: OrchestratorConfig) -> int:
    """Build everything, train, and write the summary."""
    progress = starting_point(cfg)
    Purse(cfg.budget, used_before(cfg.run_dir, progress)).check()
    if cfg.tokenizer.name is not None or cfg.model.scratch is None:
        fetch(cfg.tokenizer.name or cfg.model.name, has_weights=False)
    renderer = build_policy_renderer(cfg)
    logger.info("messages are rendered by %s", renderer.description)
    if cfg.model.scratch is None and (note := untrained_tokens(renderer, cfg.model.name)):
        logger.warning("%s", note)
    async with AsyncExitStack() as stack:
        # First: the launcher starts the other processes only when all of this has been checked.
        user_code = open_user_code(cfg, renderer, stack)
        check_sampling(cfg, renderer)
        await check_first_tasks(user_code.envs, user_code.eval_envs, renderer)
        wires = await open_wires(cfg, progress.step, stack)
        loop = build_loop(cfg, wires, renderer, progress, stack, user_code)
        handle_interrupts(loop)
        stack.enter_context(warn_when_blocked())
        await stack.enter_async_context(collect_on_growth())
        progress = await loop.run()
        loop.parts.ledger.event(USED, loop.parts.purse.used.as_dict())  # also the time since the last step
    if (verdict := loop.verdict) is not None:
        report("note", text=verdict)
    summary = summary_of(progress, max_steps=cfg.max_steps, stopped_because=loop.stopped_because, verdict=verdict)
    summary |= {"used": loop.parts.purse.summary()}
    cfg.run_dir.summary.write_text(json.dumps(summary, indent=2) + "\n")
    report("summary", **summary)
    logger.info("done steps=%d in %.1fs: %s", progress.step, progress.wall_s, cfg.run_dir.summary)
    return 0


@dataclass(frozen=True)
class UserCode:
    """Code of the user that a run calls: environments, hooks, and functions that replace ours."""

    info: RunInfo
    envs: list[Environment]
    hooks: BatchHooks | None
    rollouts: RolloutFunction | None
    evals: RolloutFunction | None
    eval_envs: list[Environment] = field(default_factory=list)
    beside: Beside = field(default_factory=Beside)


def open_user_code(cfg: OrchestratorConfig, renderer: Renderer, stack: AsyncExitStack) -> UserCode:
    """Import and build the user's code; `stack` closes what environments have started.

    Raises: ConfigError, DataError that name the wrong name, argument, file or function.
    """
    beside = open_beside(cfg, stack)
    info = run_info(cfg, renderer, cfg.train.sampling, cfg.tokenizer.name or cfg.model.name, beside.models)
    hooks = load_batch_hooks(cfg, renderer)
    keys = ("rollout_function", cfg.hooks.eval_setting)
    rollouts, evals = (load_rollout_function(cfg, key, renderer) for key in keys)
    for name in (env.name or env.id for env in cfg.env):
        if isinstance(algo := cfg.algo_of(name), CustomAlgo):
            load_credit(algo, cfg.algo_path(name))
    envs = [open_env(env, cfg.run_dir.logs, stack, info) for env in cfg.env]
    for env in envs:
        tasks_of(env, "train")  # raises if there are none
        check_overlong(env, cfg.algo_of(env.name), cfg.sampling_of(env.name), cfg.algo_path(env.name))
    held_out = [] if cfg.eval is None else eval_envs(cfg, envs, stack, info)
    return UserCode(info, envs, hooks, rollouts, evals, held_out, beside)


@dataclass(frozen=True)
class Wires:
    """The orchestrator's ends of the wires to the other processes."""

    engines: EngineClient
    control: ControlServer
    sender: Sender


async def open_wires(cfg: OrchestratorConfig, start: int, stack: AsyncExitStack) -> Wires:
    """Bind and connect all wires; `stack` closes them in reverse order."""
    if cfg.debug == "training":
        engines: Any = AbsentEngines()
    else:
        engines = await stack.enter_async_context(build_engines(cfg.client))
    if cfg.debug == "rollouts":
        shares = shares_prefixes(cfg.model, find_model_file(cfg.model.name), is_on_cpu=False)  # its device is not known
        trainer: Any = AbsentTrainer(cfg.num_train_workers, start, cfg.max_steps, shares_prefixes=shares)
        return Wires(engines, trainer, trainer)
    claims = PortClaims()
    stack.callback(claims.close)
    cfg, given = at_all_addresses(cfg, claims), cfg
    for line in moved_ports(given, cfg):
        logger.info("%s", line)
    control = ControlServer(
        cfg.control,
        cfg.run_name,
        load_secret(cfg.run_dir),
        world_size=cfg.num_train_workers,
        resume_step=start if cfg.resume else None,
    )
    await control.open()
    stack.push_async_callback(control.close)
    sender = build_sender(cfg.rollout_transport, cfg.run_dir, cfg.num_train_workers, control.sessions)
    await sender.open()
    stack.push_async_callback(sender.close)
    stack.callback(announce(cfg))
    return Wires(engines, control, sender)


def build_loop(
    cfg: OrchestratorConfig,
    wires: Wires,
    renderer: Renderer,
    progress: Progress,
    stack: AsyncExitStack,
    user_code: UserCode | None = None,
) -> Loop:
    """Build all other parts of a run; `stack` closes them."""
    run_dir, resumed_step = cfg.run_dir, progress.step or None
    user_code = user_code or open_user_code(cfg, renderer, stack)
    envs = user_code.envs
    progress = with_fingerprints(cfg, progress, envs)
    player = build_player(cfg, wires.engines, renderer, user_code.info.models)
    kept = cfg.ledger
    limits = Limits(kept.keep_steps, kept.keep_bytes, kept.keep_samples)
    ledger = Ledger(run_dir, limits=limits, segment_bytes=cfg.ledger.segment_bytes)
    stack.callback(ledger.close)
    buffer = Buffer(build_bounds(cfg, progress.step), ledger, next_step=progress.step + 1)
    logger.info("at most %d groups are under way at once", buffer.bounds.num_slots)
    curriculum = build_curriculum(cfg, envs, progress)
    mix = TaskMix(envs, [env.ratio for env in cfg.env], cfg.seed, curriculum)
    vocab_size = vocab_size_of(cfg, renderer)
    cursor = prepare_cursor(cfg, ledger, buffer, mix, progress, vocab_size=vocab_size, hooks=user_code.hooks)
    ledger.event("data", progress.data)
    monitors = build_monitors(cfg.monitors, run_dir, "orchestrator", cfg.run_name, resumed_step=resumed_step)
    stack.callback(monitors.close)
    loading: Any = AbsentEngines() if cfg.debug == "rollouts" else wires.engines
    versions = build_versions(cfg, loading, ledger, start=progress.step)
    watch = stack.enter_context(build_watch(cfg, run_dir, buffer, versions, progress))
    purse = Purse(cfg.budget, used_before(run_dir, progress), clock=asyncio.get_running_loop().time)
    user_code.beside.begin(wires.engines, envs, renderer)
    parts = RunParts(
        cfg=cfg,
        run_dir=run_dir,
        mix=mix,
        cursor=cursor,
        player=player,
        buffer=buffer,
        versions=versions,
        engines=wires.engines,
        ledger=ledger,
        sender=wires.sender,
        control=wires.control,
        monitors=monitors,
        watch=watch,
        cost=cost_of_model(find_config(cfg.model.name) or cfg.model.name),
        progress=progress,
        hooks=user_code.hooks,
        rollout_function=user_code.rollouts,
        evaluator=build_evaluator(cfg, user_code, player, watch, run_dir),
        curriculum=curriculum,
        baselines=build_baselines(cfg, envs, progress),
        beside=user_code.beside,
        vocab_size=vocab_size,
        purse=purse,
    )
    return Loop(parts)


def build_watch(
    cfg: OrchestratorSection, run_dir: RunDir, buffer: Buffer, versions: VersionLoader, progress: Progress
) -> Watch:
    """Build what notices that a run stalls."""
    return Watch(
        cfg.stall_timeout_s,
        run_dir.dumps,
        lambda: {**buffer.gauges(), "versions_waiting": versions.num_waiting, "trained": progress.step},
        role="orchestrator",
    )


def build_player(
    cfg: OrchestratorConfig, engine: EngineClient, renderer: Renderer, models: Mapping[str, ChatModel] = NO_MODELS
) -> Player:
    """Build what plays the rollouts of training; the evaluator makes that of evals from it."""
    return Player(
        engine=engine,
        renderer=renderer,
        sampling=cfg.train.sampling,
        seq_len=cfg.seq_len,
        seed=cfg.seed,
        run_id=cfg.run_name,
        timeout_s=cfg.rollout_timeout_s,
        max_retries=cfg.max_rollout_retries,
        system_prompts=system_prompts(*cfg.env),
        model_names=model_names(*cfg.env),
        models=models,
    )


def build_versions(cfg: OrchestratorConfig, engines: EngineClient, ledger: Ledger, *, start: int) -> VersionLoader:
    """Build what loads new versions into the engines, which have version `start`."""
    return VersionLoader(
        engines,
        ledger,
        start=start,
        timeout_s=cfg.weight_broadcast.timeout_s,
        interval=first_setting(cfg, start)[1],
        end=cfg.max_steps,
        is_evaluated=lambda version: cfg.eval is not None and cfg.eval.is_due(version, end=cfg.max_steps),
        tolerance=cfg.weight_broadcast.canary_tolerance,
        generation=lambda: engines.generation,
        devices=SharedDevices(engines, cfg.colocate) if cfg.colocate is not None and cfg.debug is None else None,
    )


def build_baselines(cfg: OrchestratorSection, envs: Sequence[Environment], progress: Progress) -> Baselines:
    """Build the running baselines of environments whose advantage estimator is `rae`."""
    algos = {env.name: cfg.algo_of(env.name) for env in envs}
    baselines = Baselines({env: algo for env, algo in algos.items() if isinstance(algo, RaeAlgo)})
    baselines.restore(progress.baselines)
    return baselines


def build_curriculum(cfg: OrchestratorSection, envs: Sequence[Environment], progress: Progress) -> Curriculum | None:
    """Have an add-on build the pools of the environments whose config asks for them; None if none does.

    Raises: ConfigError for an environment that cannot have pools, or if the add-on is not installed.
    """
    if not cfg.has_pools:
        return None
    curriculum: Curriculum = addons.load(GROUP, "curriculum", POOLS)(cfg, envs, progress.curriculum)
    return curriculum


def vocab_size_of(cfg: OrchestratorSection, renderer: Renderer) -> int | None:
    """Size of the vocabulary; None if no filter needs it."""
    if not any(section.type == "gibberish" for section in cfg.filters):
        return None
    return renderer.tokenizer.vocab_size


def build_evaluator(
    cfg: OrchestratorSection, user_code: UserCode, player: Player, watch: Watch, run_dir: RunDir
) -> Evaluator | None:
    """Build the evaluator; None if no evals are configured."""
    section = cfg.eval_as_trained()
    if section is None:
        return None
    return Evaluator(
        user_code.eval_envs,
        section,
        player,
        max_inflight_rollouts=cfg.max_inflight_rollouts or (cfg.max_async_level + 1) * cfg.batch_size,
        watch=watch,
        run_dir=run_dir,
        user_function=user_code.evals,
    )


def build_bounds(cfg: OrchestratorConfig, start: int = 0) -> Bounds:
    """The buffer's bounds, from the config; start: the step after which this incarnation begins."""
    factor = cfg.oversampling_factor
    oversampled = None if factor is None else int(factor * cfg.batch_size) // cfg.group_size
    held = None if cfg.max_inflight_rollouts is None else cfg.max_inflight_rollouts // cfg.largest_group
    limits = [limit for limit in (held, oversampled) if limit is not None]
    is_user_played = cfg.hooks.rollout_function is not None  # it may put groups back, so no batch waits for one
    return Bounds(
        groups_per_batch=cfg.batch_size // cfg.group_size,
        max_async_level=first_setting(cfg, start)[0],
        max_off_policy_steps=cfg.max_off_policy_steps,
        max_running_groups=min(limits, default=None),
        max_oversampling=cfg.max_oversampling,
        filter_zero_signal=cfg.filter_zero_advantages,
        max_steps=cfg.max_steps,
        is_in_dispatch_order=cfg.batch_order == "dispatch" and not is_user_played,
        keeps_late=cfg.batch_order == "finished" and not is_user_played,
        oversampling_factor=cfg.oversampling_factor,
        tokens_per_batch=cfg.token_batch_size,
        min_groups=math.ceil(cfg.num_train_workers / cfg.smallest_group),
        is_deterministic=cfg.deterministic,
        sync_interval=cfg.sync_interval,
        update_interval=cfg.weight_broadcast.interval,
        first_version=start,
    )


def first_setting(cfg: OrchestratorConfig, start: int) -> tuple[int, int]:
    """The level, and the steps between two versions that engines get, at which the run goes on after step `start`."""
    if cfg.steering is not None:
        level, interval = load_steering().setting_after(cfg, start)
        return level, interval
    return cfg.max_async_level, cfg.weight_broadcast.interval


# -- ending --


def handle_interrupts(loop: Loop) -> None:
    """Stop in order at the first SIGINT or preemption signal; exit at once at the second."""
    first_at: list[float] = []

    def on_interrupt() -> None:
        if first_at:
            logger.warning("interrupted twice: ending now")
            os._exit(130)
        first_at.append(time.monotonic())
        logger.info("interrupted: finishing step %d, then saving", loop.buffer.next_step - 1)
        loop.stop()

    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, on_interrupt)
