"""`sft` on several ranks, on one machine or on several: starts them as torchrun would.

    claim the run directory -> start one process per rank -> wait until all have ended, one fails, or a signal comes
    at the first signal rank 0 is asked to finish, and stops the other ranks; at the second all are stopped

Rank 0 writes to the terminal, the others to RUN/logs/sft_<rank>.log. Every rank has the same command line as this
process. On several machines the same command is started on each: the first machine claims the run, each starts its own
ranks, and the ranks meet on the first. Which ranks there are is in plan.py, and what a rank does in training.py.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import closing

from stretto.base import log, process, rundir
from stretto.base.errors import ConfigError
from stretto.base.ports import LOOPBACK, PortClaims
from stretto.base.status import SUPERVISED_VAR
from stretto.check import nodes as node_checks
from stretto.check.checkpoint import check_resumed
from stretto.check.nodes import check_ports, check_reachable, find_node_rank
from stretto.config.root import SFTConfig
from stretto.config.sections.deployment import NodesDeployment
from stretto.data.hub_model import fetch
from stretto.launch.launchers import all_launchers
from stretto.launch.plan.nodes import on_visible_gpus
from stretto.launch.plan.placement import free_port
from stretto.launch.plan.processes import RENDEZVOUS_PORT, ProcessSpec
from stretto.launch.run.report import how_to_continue
from stretto.launch.run.supervisor import Supervisor, Timeouts, serve
from stretto_sft.check import check_devices
from stretto_sft.plan import HOSTS_KEY, find_gpus, plan_ranks, rank_process

END_S = 60.0  # between the end of rank 0 and that of the others
GRACE_S = 5.0  # between SIGTERM and SIGKILL
STALL_S = 1800.0
GPUS_KEY = "deployment.gpus_per_node"


def start_ranks(cfg: SFTConfig, words: Sequence[str]) -> int | None:
    """Start the config's ranks and wait for them; the exit status. None if this process is a rank itself.

    words: the command line, without the verb.

    Raises: ConfigError if GPUs are missing, a setting needs one, or torchrun has started another number of ranks.
    """
    check_devices(cfg)
    if "WORLD_SIZE" in os.environ:
        _check_started(cfg)
        return None
    if isinstance(shape := cfg.deployment, NodesDeployment):
        return _start_node(cfg, shape, words)
    gpus = find_gpus(cfg)
    if cfg.num_ranks == 1:
        os.environ |= process.device_env(gpus) if gpus else {}
        return None
    _fetch_model(cfg)
    with closing(_claim(cfg)) as claim, closing(PortClaims()) as ports:
        port = free_port("rendezvous", LOOPBACK, RENDEZVOUS_PORT, False, ports)
        ranks = range(cfg.num_ranks)
        specs = [rank_process(cfg, words, gpus[rank : rank + 1], port, rank) for rank in ranks]
        return _lead(cfg, specs, claim)


def _fetch_model(cfg: SFTConfig) -> None:
    """Download the model, if it is not here, before ranks start that would wait for it."""
    if cfg.model.scratch is None:
        fetch(cfg.model.name)


def _claim(cfg: SFTConfig) -> rundir.Claim:
    rundir.check(cfg.run_dir, **cfg.start_options)
    check_resumed(cfg)
    checkpoints = None if cfg.ckpt is None else cfg.ckpt.output_dir
    claim = rundir.claim(cfg.run_dir, **cfg.start_options, checkpoints=checkpoints)
    log.setup("launcher", cfg.run_dir, cfg.log.level, cfg.log.json_logging, is_quiet=True)
    return claim


def _lead(cfg: SFTConfig, specs: Sequence[ProcessSpec], claim: rundir.Claim) -> int:
    """Run the ranks of the machine that has rank 0."""
    timeouts = Timeouts(end_s=END_S, grace_s=GRACE_S)
    supervisor = Supervisor(specs, cfg.run_dir, None, timeouts=timeouts, pass_fds=(claim.lock_fd,))
    code = asyncio.run(supervisor.run())
    if code and (cfg.run_dir.metrics("sft").exists() or cfg.run_dir.latest_complete_checkpoint()):
        sys.stderr.write(how_to_continue(cfg.run_dir, cfg, "sft") + "\n")
    return code


# -- several machines --


def _start_node(cfg: SFTConfig, shape: NodesDeployment, words: Sequence[str]) -> int | None:
    """Run this machine's ranks; None if this process is the only rank."""
    hosts, specs = plan_ranks(cfg, words)
    node = find_node_rank(shape.node_rank, hosts, "deployment.node_rank")
    mine, run = [spec for spec in specs if spec.node == node], cfg.run_dir
    node_checks.check_num_gpus(shape.gpus_per_node, node, hosts[node], GPUS_KEY)
    if len(specs) == 1:
        os.environ |= process.device_env(process.visible_gpus()[: shape.gpus_per_node])
        return None
    check_reachable(hosts, node)
    if len(hosts) > 1:
        node_checks.check_others(hosts, node, HOSTS_KEY)
        check_ports(mine, node, hosts[node], "deployment.rendezvous_port")
    mine = on_visible_gpus(mine)
    _fetch_model(cfg)
    if node == 0:
        with closing(_claim(cfg)) as claim:
            node_checks.announce(run, hosts)
            try:
                code = _lead(cfg, mine, claim)
            finally:
                for launcher in all_launchers():
                    launcher.end_other_nodes()
            if code == process.EXIT_LOST:
                for launcher in all_launchers():
                    launcher.requeue()
            return code
    if cfg.ckpt is not None:
        node_checks.check_shared(run, hosts, node, "each rank writes its part of a checkpoint there")
    node_dir = run.of_node(node)
    node_dir.path.mkdir(parents=True, exist_ok=True)
    log.setup("launcher", node_dir, cfg.log.level, cfg.log.json_logging, is_quiet=True)
    return serve(mine, node_dir, f"node {node} of {len(hosts)}, {hosts[node]}", STALL_S)


def _check_started(cfg: SFTConfig) -> None:
    world_size = os.environ["WORLD_SIZE"]
    if os.environ.get(SUPERVISED_VAR) or cfg.num_ranks == 1 or str(cfg.num_ranks) == world_size:
        return
    is_wide = cfg.deployment.type == "multi_node"
    keys = "[deployment] asks" if is_wide else "trainer_gpu_ids and deployment.num_train_gpus ask"
    raise ConfigError(
        f"{keys} for {cfg.num_ranks} ranks, but torchrun has started {world_size} (WORLD_SIZE); leave them out, or "
        "start `sft` without torchrun."
    )
