"""`sft` on several ranks of this machine: starts them as torchrun would.

    claim the run directory -> start one process per rank -> wait: all ended, one failed, or a signal came
    at a signal rank 0 is asked to finish, and tells the others; at a second one all are stopped (supervisor.py)

Rank 0 has the terminal; the others write to RUN/logs/sft_<rank>.log. Every rank has the same command line as this
process. What a rank does is in trainer/sft.py.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import closing

from stretto.base import log, process, rundir
from stretto.base.errors import ConfigError
from stretto.base.ports import PortClaims
from stretto.base.status import SUPERVISED_VAR
from stretto.config.root import SFTConfig
from stretto.launch.plan.placement import free_port
from stretto.launch.plan.plan import RENDEZVOUS_PORT, ProcessSpec, rank_env
from stretto.launch.run.supervisor import Supervisor, Timeouts

LOOPBACK = "127.0.0.1"
END_S = 60.0  # between the end of rank 0 and that of the others
GRACE_S = 5.0  # between SIGTERM and SIGKILL


def start_ranks(cfg: SFTConfig, words: Sequence[str]) -> int | None:
    """Start the ranks that the config asks for; the exit status. None if this process is a rank itself.

    words: the command line, without the verb.

    Raises: ConfigError if GPUs are missing, or torchrun has started another number of ranks.
    """
    if "WORLD_SIZE" in os.environ:
        _check_started(cfg)
        return None
    gpus = find_gpus(cfg)
    if cfg.num_ranks == 1:
        os.environ |= process.device_env(gpus) if gpus else {}
        return None
    run, resume = cfg.run_dir, cfg.resume
    step, origin = (None, None) if resume is None else (resume.step, resume.dir)
    wanted = rundir.claim(run, resume=resume is not None, step=step, clean=cfg.clean, origin=origin)
    with closing(wanted) as claim, closing(PortClaims()) as ports:
        log.setup("launcher", run, cfg.log.level, cfg.log.json_logging, is_quiet=True)
        port = free_port("rendezvous", LOOPBACK, RENDEZVOUS_PORT, False, ports)
        specs = [_spec(cfg, words, gpus, port, rank) for rank in range(cfg.num_ranks)]
        timeouts = Timeouts(end_s=END_S, grace_s=GRACE_S)
        supervisor = Supervisor(specs, run, None, timeouts=timeouts, pass_fds=(claim.lock_fd,))
        return asyncio.run(supervisor.run())


def _spec(cfg: SFTConfig, words: Sequence[str], gpus: list[str], port: int, rank: int) -> ProcessSpec:
    argv = (sys.executable, "-m", "stretto", "sft", *words)
    threads = cfg.num_threads or max(1, process.num_cores() // cfg.num_ranks)
    devices = tuple(gpus[rank : rank + 1])
    env = process.thread_env(threads) | rank_env(rank, rank, cfg.num_ranks, LOOPBACK, port)
    env |= process.device_env(devices) | {"LOCAL_WORLD_SIZE": str(cfg.num_ranks)}
    return ProcessSpec("sft", rank, cfg.num_ranks, argv, env, devices, threads, {})


def find_gpus(cfg: SFTConfig) -> list[str]:
    """The GPU of each rank; empty if ranks run on the CPU, or if the config names and counts none.

    Raises: ConfigError if GPUs are missing.
    """
    gpus, ids, count = process.visible_gpus(), cfg.trainer_gpu_ids, cfg.deployment.num_train_gpus
    if not gpus:
        return []
    if ids is None:
        ids = [] if count is None else list(range(count))
    if missing := [index for index in ids if index >= len(gpus)]:
        raise ConfigError(
            f"trainer_gpu_ids or deployment.num_train_gpus ask for GPU {', '.join(map(str, missing))}, but this "
            f"machine shows {len(gpus)}; leave the key out, name others, or set CUDA_VISIBLE_DEVICES."
        )
    return [gpus[index] for index in ids]


def _check_started(cfg: SFTConfig) -> None:
    world_size = os.environ["WORLD_SIZE"]
    if os.environ.get(SUPERVISED_VAR) or cfg.num_ranks == 1 or str(cfg.num_ranks) == world_size:
        return
    raise ConfigError(
        f"trainer_gpu_ids and deployment.num_train_gpus ask for {cfg.num_ranks} ranks, but torchrun has started "
        f"{world_size} (WORLD_SIZE); leave them out, or start `sft` without torchrun."
    )
