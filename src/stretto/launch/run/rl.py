"""`rl`: plans the run, starts its processes under one supervisor, and reports how it ended.

On several nodes each starts the same command: the first one claims the run, the others run their own processes.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import closing, suppress
from pathlib import Path

from stretto.base import log, rundir
from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.base.ports import PortClaims
from stretto.base.process import EXIT_LOST
from stretto.base.secret import Secret, find_secret, load_secret
from stretto.check import nodes as node_checks
from stretto.check.backend import check_trainer_python
from stretto.check.checkpoint import check_resumed
from stretto.check.models import check_shape, key_of, models_of, needs_vllm
from stretto.check.start import check_files, check_node, check_processes, check_run, check_trackers
from stretto.config.changes import changes
from stretto.config.root import RLConfig
from stretto.data.hub_model import fetch
from stretto.launch.launchers import all_launchers, launcher_of
from stretto.launch.plan import nodes
from stretto.launch.plan import plan as planning
from stretto.launch.plan.beside import engines_beside
from stretto.launch.plan.placement import replaced
from stretto.launch.plan.plan import LaunchPlan
from stretto.launch.plan.routers import check_router
from stretto.launch.run import page
from stretto.launch.run.console import Console
from stretto.launch.run.supervisor import STALL_SLACK_S, Supervisor, Timeouts, serve

logger = logging.getLogger(__name__)

SECRET_TIMEOUT_S = 60.0  # another node may be started this long before the first one


def main(cfg: RLConfig) -> int:
    """Run the processes of `rl` to the end; the exit status of the command."""
    run = cfg.run_dir
    check_run(cfg)
    if (launcher := launcher_of(cfg)) is not None:
        return launcher.main(cfg, check=lambda: _check_files(cfg))
    if cfg.deployment.type == "multi_node":
        hosts = nodes.node_hosts(cfg)
        node = check_node(cfg.deployment.node_rank, hosts, probes=True)
        if node > 0:
            return _run_other_node(cfg, run, node)
    check_router(cfg.inference)
    check_trainer_python(cfg.trainer, needs_gpu=cfg.trains_here)
    rundir.check(run, **cfg.start_options)  # before gigabytes are downloaded for a run that is then refused
    check_resumed(cfg)
    _fetch_models(cfg)
    checkpoints = None if cfg.ckpt is None else cfg.ckpt.output_dir
    with (
        closing(rundir.claim(run, **cfg.start_options, checkpoints=checkpoints)) as claim,
        closing(PortClaims()) as ports,
    ):
        plan = _plan(cfg, run, claim.resume_step, ports, load_secret(run))
        if plan.hosts:
            check_processes([spec for spec in plan.processes if spec.node == 0], 0, plan.hosts)
            node_checks.announce(run, plan.hosts)
        _check_files(cfg)
        changed = changes(run.config("run"), cfg, plan.config) if not claim.is_new else []
        planning.write(plan, run.path)
        log.setup("launcher", run, cfg.log.level, cfg.log.json_logging, is_quiet=True)
        return _run(plan, claim, changed)


def _plan(
    cfg: RLConfig, run: RunDir, resume_step: int | None, ports: PortClaims | None = None, secret: Secret | None = None
) -> LaunchPlan:
    if resume_step is not None and cfg.resume is not None and not cfg.resume.skip_progress:
        rundir.check_max_steps(cfg.max_steps, resume_step)
    if cfg.inference is not None and needs_vllm(cfg.inference, cfg.inference.model or cfg.model.name):
        cfg = replaced(cfg, "inference.engine", "vllm")
    cfg = engines_beside(cfg).with_engines(cfg)
    if cfg.deployment.type == "multi_node":
        plan = nodes.plan_nodes(cfg, run, resume_step, secret)
    else:
        plan = planning.plan(cfg, run, resume_step, ports=ports, secret=secret)
    return plan


def _run_other_node(cfg: RLConfig, run: RunDir, node: int) -> int:
    """Run the processes of another node than the first: trainer ranks until they end, servers until stopped.

    Its configs and logs are in RUN-node-<rank>: nodes may share RUN itself, and only the first one claims it.
    """
    node_dir = run.of_node(node)
    step = None
    if cfg.resume is not None:
        step = cfg.resume.step
        # A node that has only engines may not see checkpoints. A rank that misses one fails with a message.
        with suppress(ConfigError):
            _, step = rundir.find_checkpoint(run, step, cfg.resume.dir)
    who = f"node {node}, {nodes.node_hosts(cfg)[node]},"
    plan = nodes.plan_nodes(cfg, run, step, find_secret(run, SECRET_TIMEOUT_S, who))
    mine = [spec for spec in plan.processes if spec.node == node]
    check_processes(mine, node, plan.hosts)
    _fetch_models(cfg)
    if (why := node_checks.needs_shared(plan.config, mine)) is not None:
        node_checks.check_shared(run, plan.hosts, node, why)
    node_dir.path.mkdir(parents=True, exist_ok=True)
    planning.write(plan, node_dir.path)
    log.setup("launcher", node_dir, cfg.log.level, cfg.log.json_logging, is_quiet=True)
    specs = [nodes.with_config_dir(spec, run, node_dir) for spec in nodes.on_visible_gpus(mine)]
    title = f"node {node} of {len(plan.hosts)}, {plan.hosts[node]}"
    trains = any(spec.role in ("trainer", "critic") for spec in mine)
    if not trains and (note := node_checks.unused_gpus(node_checks.num_gpus(mine))):
        title = f"note: {note}\n{title}"
    return serve(specs, node_dir, title, cfg.orchestrator.stall_timeout_s)


def check_here(cfg: RLConfig) -> LaunchPlan:
    """The plan of a run, after checking that this machine (or this node of several) could start it now.

    Starts and writes nothing. Raises: ConfigError with the first reason why the run could not start.
    """
    check_shape(cfg)
    check_trackers(cfg)
    if cfg.slurm is not None or cfg.ray is not None:  # other machines run it
        return _plan(cfg.model_copy(update={"dry_run": True}), cfg.run_dir, None)
    plan = _plan(cfg, cfg.run_dir, None)
    if plan.hosts:
        assert cfg.deployment.type == "multi_node"
        node = check_node(cfg.deployment.node_rank, plan.hosts, probes=False)
        check_processes([spec for spec in plan.processes if spec.node == node], node, plan.hosts)
    check_router(cfg.inference)
    check_trainer_python(cfg.trainer, needs_gpu=cfg.trains_here)
    return plan


def plan_only(cfg: RLConfig) -> tuple[LaunchPlan, Path]:
    """Plan a run without starting it; the plan, and the directory to which configs and plan.json are written."""
    run = cfg.run_dir
    check_shape(cfg)
    plan = _plan(cfg, run, rundir.check(run, **cfg.start_options))
    check_resumed(cfg)
    # A dry run does not overwrite the configs of an existing run, which record how that was started.
    directory = run.path / "dry_run" if rundir.is_used(run) else run.path
    try:
        planning.write(plan, directory)
    except OSError as cause:
        raise rundir.unusable(run.path, cause) from cause
    return plan, directory


def _check_files(cfg: RLConfig) -> None:
    """Check the files of the models that are here, and print warnings about them."""
    for text in check_files(cfg):
        _write_line(f"warning: {text}")


def _fetch_models(cfg: RLConfig) -> None:
    """Download the run's models and tokenizers that are not here, before processes start that would wait for them."""
    for name, has_weights in models_of(cfg):
        try:
            fetch(name, has_weights=has_weights, report=_write_line)
        except ConfigError as error:
            raise ConfigError(f"{key_of(cfg, name)}{error}") from error


def _write_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _run(plan: LaunchPlan, claim: rundir.Claim, changed: list[str]) -> int:
    """Run the plan's processes and report how the run ended; the exit status.

    changed: config keys of a resumed run that have changed, with their values.
    """
    from stretto.launch.run import report

    console = Console(sys.stdout, max_steps=plan.config.max_steps)
    with page.beside(plan.run, is_wanted=plan.config.view) as address:
        if address is not None:
            console.line(f"view  {address}")
        console.line(report.header(plan, changed))
        for line in changed:
            logger.info("changed since the run was last started: %s", line)
        supervisor = _supervisor(plan, claim, console)
        try:
            code = asyncio.run(supervisor.run())
        finally:
            console.close()
            if plan.hosts:
                for launcher in all_launchers():
                    launcher.end_other_nodes()
    if code == EXIT_LOST:
        for launcher in all_launchers():
            launcher.requeue()
    if supervisor.was_stopped_before_begin:
        if claim.is_new:
            rundir.discard(plan.run)
        return code
    if code and not supervisor.has_begun and not plan.run.latest_complete_checkpoint():
        return code  # nothing has been trained: the error message is enough
    console.line(report.ending(plan, is_complete=code == 0, stopped_early=supervisor.was_asked_to_finish))
    return code


def _supervisor(plan: LaunchPlan, claim: rundir.Claim, console: Console) -> Supervisor:
    stall_s = plan.config.orchestrator.stall_timeout_s + STALL_SLACK_S
    own = [spec for spec in plan.processes if spec.node == 0]
    return Supervisor(
        nodes.on_visible_gpus(own) if plan.hosts else own,
        plan.run,
        console,
        timeouts=Timeouts(stall_s, stall_s),
        pass_fds=(claim.lock_fd,),
        likely_causes=likely_causes(plan),
    )


def likely_causes(plan: LaunchPlan) -> dict[str, str]:
    """By role, what may have ended a process that logged no reason."""
    names = [env.name or env.id for env in plan.config.orchestrator.env if env.num_workers is None]
    if not names:
        return {}
    return {
        "orchestrator": (
            f"it did not say why; an environment in its process ({', '.join(names)}) may have ended it: os._exit, or a "
            "crash in native code. With num_workers = 1 in [[orchestrator.env]] an environment has its own process, "
            "whose end costs only its rollouts."
        )
    }
