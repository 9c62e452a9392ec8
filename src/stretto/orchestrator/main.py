"""The orchestrator process: builds what loop.py runs, and ends it in good order.

Exit status: 0 done or stopped by one Ctrl-C, 130 by two, 70 stalled; a failure raises the StrettoError that
says who must act. torch and transformers are never imported here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from stretto.algorithms.custom import load_credit
from stretto.base import log
from stretto.base.garbage import collecting_seldom
from stretto.base.paths import RunDir
from stretto.base.status import report, stop_signals
from stretto.base.watch import Watch
from stretto.chat.render import Renderer
from stretto.config.algorithm import CustomAlgo, RaeAlgo
from stretto.config.curriculum import DifficultySampler
from stretto.config.distill import OpdAlgo, OpsdAlgo, SftAlgo
from stretto.config.orchestrator import OrchestratorSection
from stretto.config.roots import OrchestratorConfig
from stretto.envs.base import Environment, RunInfo, tasks_of
from stretto.hooks.calls import Hook
from stretto.ledger.writer import Ledger
from stretto.monitors import build_monitors
from stretto.orchestrator.baselines import Baselines
from stretto.orchestrator.batch_hooks import BatchHooks, arguments_of
from stretto.orchestrator.buffer import Bounds, Buffer
from stretto.orchestrator.build import (
    build_engines,
    build_renderer_of,
    build_scratch_renderer,
    build_teacher_client,
    open_env,
    run_info,
    urls_of,
)
from stretto.orchestrator.checkpoint import Progress, summary_of
from stretto.orchestrator.curriculum import Curriculum, DifficultyPools
from stretto.orchestrator.evaluate import Evaluator, eval_envs
from stretto.orchestrator.loop import Control, Engines, Loop, Sender
from stretto.orchestrator.own_rollouts import OwnRollouts
from stretto.orchestrator.packing import cost_of_model
from stretto.orchestrator.policy import Policy
from stretto.orchestrator.resume import first_cursor, starting_point, with_data_of
from stretto.orchestrator.rollout import Player
from stretto.orchestrator.scoring import check_overlong
from stretto.orchestrator.tasks import TaskMix
from stretto.orchestrator.teacher import Author, Teacher, TeacherEngine, Tutor, Tutors, build_hint
from stretto.transports.control import ControlServer
from stretto.transports.rollouts import build_sender

logger = logging.getLogger(__name__)


def main(cfg: OrchestratorConfig) -> int:
    """Run the orchestrator; its exit status."""
    log.setup("orchestrator", cfg.run_dir, cfg.log.level, cfg.log.json_logging)
    return asyncio.run(run(cfg))


async def run(cfg: OrchestratorConfig) -> int:
    """Build everything, train, and write the summary."""
    progress = starting_point(cfg)
    if cfg.model.scratch is not None and cfg.tokenizer.name is None:
        renderer = build_scratch_renderer(cfg.model.scratch, cfg.renderer)
    else:
        renderer = build_renderer_of(cfg.model.name, cfg.tokenizer.name, cfg.renderer)
    async with AsyncExitStack() as stack:
        own = open_own(cfg, renderer, stack)  # first: what is wrong with it is told before anybody waits
        wires = await open_wires(cfg, progress.step, stack)
        loop = build_loop(cfg, wires, renderer, progress, stack, own)
        handle_interrupts(loop)
        await stack.enter_async_context(collecting_seldom())
        progress = await loop.run()
    summary = summary_of(progress, max_steps=cfg.max_steps)
    cfg.run_dir.summary.write_text(json.dumps(summary, indent=2) + "\n")
    report("summary", **summary)
    logger.info("done steps=%d in %.1fs: %s", progress.step, progress.wall_s, cfg.run_dir.summary)
    return 0


@dataclass(frozen=True)
class Own:
    """What is a user's own in a run: environments, and functions in the place of ours."""

    about: RunInfo
    envs: list[Environment]
    hooks: BatchHooks | None
    rollouts: OwnRollouts | None
    evals: OwnRollouts | None


def open_own(cfg: OrchestratorConfig, renderer: Renderer, stack: AsyncExitStack) -> Own:
    """Build all of it; `stack` closes what environments have started.

    Raises: ConfigError, DataError naming what is wrong with a name, an argument, a file or a function.
    """
    about = run_info(cfg, renderer, cfg.train.sampling, cfg.tokenizer.name or cfg.model.name)
    hooks = None if cfg.hooks.is_empty else BatchHooks(cfg, renderer)
    functions = [own_rollouts_of(cfg, key) for key in ("rollout_function", cfg.hooks.eval_setting)]
    for name in (env.name or env.id for env in cfg.env):
        if isinstance(algo := cfg.algo_of(name), CustomAlgo):
            load_credit(algo, cfg.algo_path(name))
    envs = [open_env(env, cfg.run_dir.logs, stack, about) for env in cfg.env]
    for env in envs:
        tasks_of(env, "train")  # as a check
        check_overlong(env, cfg.algo_of(env.name), cfg.sampling_of(env.name), cfg.algo_path(env.name))
    return Own(about, envs, hooks, *functions)


@dataclass(frozen=True)
class Wires:
    """The orchestrator's ends of the wires to the other processes."""

    engines: Engines
    control: Control
    sender: Sender
    teachers: Mapping[str, TeacherEngine] = field(default_factory=dict)  # by environment


async def open_wires(cfg: OrchestratorConfig, start: int, stack: AsyncExitStack) -> Wires:
    """Bind and connect; `stack` closes them in reverse."""
    engines = await stack.enter_async_context(build_engines(cfg.client))
    control = ControlServer(cfg.control, cfg.run_name, resume_step=start if cfg.resume else None)
    await control.open()
    stack.push_async_callback(control.close)
    sender = build_sender(cfg.rollout_transport, cfg.run_dir, cfg.num_train_workers)
    await sender.open()
    stack.push_async_callback(sender.close)
    teachers = {}
    clients: dict[str, TeacherEngine] = {}
    for env in cfg.env:
        if (section := cfg.teacher_of(env.name or env.id)) is not None:
            key = section.model_dump_json()
            if key not in clients:
                clients[key] = await stack.enter_async_context(build_teacher_client(section))
            teachers[env.name or env.id] = clients[key]
    return Wires(engines, control, sender, teachers)


def build_loop(
    cfg: OrchestratorConfig,
    wires: Wires,
    renderer: Renderer,
    progress: Progress,
    stack: AsyncExitStack,
    own: Own | None = None,
) -> Loop:
    """All other parts of a run; `stack` closes them."""
    run_dir, resumed_step = cfg.run_dir, progress.step if cfg.resume else None
    own = own or open_own(cfg, renderer, stack)
    envs = own.envs
    progress = with_data_of(cfg, progress, envs)
    player = Player(
        engine=wires.engines,
        renderer=renderer,
        sampling=cfg.train.sampling,
        seq_len=cfg.seq_len,
        seed=cfg.seed,
        run_id=cfg.run_name,
        timeout_s=cfg.rollout_timeout_s,
        max_retries=cfg.max_rollout_retries,
    )
    ledger = Ledger.open(run_dir, keep_steps=cfg.ledger.keep_steps, segment_bytes=cfg.ledger.segment_bytes)
    stack.callback(ledger.close)
    buffer = Buffer(bounds_of(cfg), ledger, next_step=progress.step + 1)
    curriculum = build_curriculum(cfg, envs, progress)
    mix = TaskMix(envs, [env.ratio for env in cfg.env], cfg.seed, curriculum.pools)
    vocab_size = vocab_size_of(cfg, renderer)
    cursor = first_cursor(cfg, ledger, buffer, mix, progress, vocab_size=vocab_size, hooks=own.hooks)
    monitors = build_monitors(cfg.monitors, run_dir, "orchestrator", cfg.run_name, resumed_step=resumed_step)
    stack.callback(monitors.close)
    policy = Policy(
        wires.engines,
        ledger,
        start=progress.step,
        timeout_s=cfg.weight_broadcast.timeout_s,
        tolerance=cfg.weight_broadcast.canary_tolerance,
    )
    watch = Watch(
        cfg.stall_timeout_s,
        run_dir.dumps,
        lambda: {**buffer.gauges(), "versions_waiting": policy.num_waiting, "trained": progress.step},
        role="orchestrator",
    )
    stack.enter_context(watch)
    return Loop(
        cfg=cfg,
        run_dir=run_dir,
        mix=mix,
        cursor=cursor,
        player=player,
        buffer=buffer,
        policy=policy,
        engines=wires.engines,
        ledger=ledger,
        sender=wires.sender,
        control=wires.control,
        monitors=monitors,
        watch=watch,
        cost=cost_of_model(cfg.model.name),
        progress=progress,
        hooks=own.hooks,
        own_rollouts=own.rollouts,
        evaluator=build_evaluator(cfg, own, player, watch, run_dir, stack),
        curriculum=curriculum,
        baselines=build_baselines(cfg, envs, progress),
        tutors=build_tutors(cfg, wires, envs, renderer),
        vocab_size=vocab_size,
    )


def build_baselines(cfg: OrchestratorSection, envs: Sequence[Environment], progress: Progress) -> Baselines:
    """What agents have earned so far, where that is what they are compared with."""
    algos = {env.name: cfg.algo_of(env.name) for env in envs}
    baselines = Baselines({env: algo for env, algo in algos.items() if isinstance(algo, RaeAlgo)})
    baselines.restore(progress.baselines)
    return baselines


def build_curriculum(cfg: OrchestratorSection, envs: Sequence[Environment], progress: Progress) -> Curriculum:
    """The difficulty pools of the environments that ask for them.

    Raises: ConfigError for an environment that cannot have them.
    """
    curriculum = Curriculum(
        {
            env.name: DifficultyPools(env.name, tasks_of(env, "train"), section.curriculum.sampler)
            for env, section in zip(envs, cfg.env, strict=True)
            if isinstance(section.curriculum.sampler, DifficultySampler)
        }
    )
    curriculum.restore(progress.curriculum)
    return curriculum


def build_tutors(
    cfg: OrchestratorSection, wires: Wires, envs: Sequence[Environment], renderer: Renderer
) -> Tutors:
    """Who is asked about the groups of each environment.

    Raises: ConfigError for an environment that has no demonstrations and needs them.
    """
    by_env: dict[str, Tutor] = {}
    for env in envs:
        algo = cfg.algo_of(env.name)
        if isinstance(algo, OpdAlgo):
            by_env[env.name] = Teacher(wires.teachers[env.name], max_failures=cfg.max_failed_groups)
        elif isinstance(algo, OpsdAlgo):
            hint = build_hint(env, algo, renderer, cfg.algo_path(env.name))
            by_env[env.name] = Teacher(wires.engines, hint=hint, max_failures=cfg.max_failed_groups)
        elif isinstance(algo, SftAlgo):
            by_env[env.name] = Author(algo.min_reward)
    players = {name: wires.teachers[name] for name, tutor in by_env.items() if isinstance(tutor, Author)}
    engines: dict[str, TeacherEngine] = {}
    for name, engine in wires.teachers.items():
        if engine not in engines.values():
            is_own = getattr(cfg.algo_of(name), "teacher", None) is not None
            engines[f"orchestrator.env {name}, algo.teacher" if is_own else "orchestrator.teacher"] = engine
    sections = [section for name in wires.teachers if (section := cfg.teacher_of(name)) is not None]
    longest = max((section.ready_timeout_s for section in sections), default=0.0)
    return Tutors(by_env, engines, players, ready_timeout_s=longest)


def vocab_size_of(cfg: OrchestratorSection, renderer: Renderer) -> int | None:
    """Size of the vocabulary, where a filter needs it."""
    if not any(section.type == "gibberish" for section in cfg.filters):
        return None
    return renderer.tokenizer.vocab_size


def build_evaluator(
    cfg: OrchestratorSection,
    own: Own,
    player: Player,
    watch: Watch,
    run_dir: RunDir,
    stack: AsyncExitStack,
) -> Evaluator | None:
    """Evals as configured; None: there are none."""
    section = cfg.eval_as_trained()
    if section is None:
        return None
    return Evaluator(
        eval_envs(section, own.envs, run_dir, stack, own.about),
        section,
        player,
        max_inflight_rollouts=cfg.max_inflight_rollouts or (cfg.max_async_level + 1) * cfg.batch_size,
        watch=watch,
        run_dir=run_dir,
        own=own.evals,
    )


def own_rollouts_of(cfg: OrchestratorSection, key: str | None) -> OwnRollouts | None:
    """The function that plays whole batches or evals, where one is named."""
    if key is None or (path := getattr(cfg.hooks, key)) is None:
        return None
    hook = Hook.load(path, f"orchestrator.hooks.{key}", 3)
    return OwnRollouts(hook, arguments_of(cfg), cfg.train.sampling.temperature, urls_of(cfg.client))


def bounds_of(cfg: OrchestratorSection) -> Bounds:
    return Bounds(
        groups_per_batch=cfg.batch_size // cfg.group_size,
        max_async_level=cfg.max_async_level,
        max_off_policy_steps=cfg.max_off_policy_steps,
        max_running_groups=cfg.max_inflight_rollouts and cfg.max_inflight_rollouts // cfg.group_size,
        max_oversampling=cfg.max_oversampling,
        filter_zero_signal=cfg.filter_zero_advantages,
        max_steps=cfg.max_steps,
        is_in_dispatch_order=cfg.batch_order == "dispatch" and cfg.hooks.rollout_function is None,
        oversampling_factor=cfg.oversampling_factor,
    )


# -- ending --


def handle_interrupts(loop: Loop) -> None:
    """SIGINT, or a preemption, ends the run in good order; twice at once."""
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
