"""`sft` on several ranks of this machine: started as torchrun would start them, watched, and stopped together.

    claim the run directory -> start a process a rank -> wait: all ended, one failed, or a signal
    a signal: rank 0 is asked to finish, which tells the others; a second one: all are stopped

Rank 0 has the terminal; the others write to RUN/logs/sft_<rank>.log. They load the words that this process was
started with. What a rank does is trainer/sft.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing

from stretto.base import log, process, rundir
from stretto.base.errors import ConfigError
from stretto.base.ports import PortClaims
from stretto.base.process import Child
from stretto.base.rundir import Claim
from stretto.base.status import SUPERVISED_VAR
from stretto.config.roots import SFTConfig
from stretto.launch.placement import free_port
from stretto.launch.plan import RENDEZVOUS_PORT, rank_env

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
LAST_WORDS_S = 3.0  # what ranks get to say why they end when another one has failed
END_S = 60.0  # between the end of rank 0 and that of all
GRACE_S = 5.0  # between SIGTERM and SIGKILL
EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 130


def start_ranks(cfg: SFTConfig, words: Sequence[str]) -> int | None:
    """Train on as many ranks as the config asks for; the exit status. None: this process is one, and shall train.

    words: the command line, without the verb.

    Raises: ConfigError for GPUs that are not there, and where somebody else has started ranks.
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
        return asyncio.run(_Ranks(cfg, words, gpus, port, claim).run())


def find_gpus(cfg: SFTConfig) -> list[str]:
    """The GPU of each rank; none where ranks run on the CPU, or one takes what it finds.

    Raises: ConfigError for GPUs that are not there.
    """
    gpus, ids, count = process.visible_gpus(), cfg.trainer_gpu_ids, cfg.deployment.num_train_gpus
    if not gpus:
        return []
    if ids is None:
        ids = [] if count is None else list(range(count))
    if missing := [index for index in ids if index >= len(gpus)]:
        raise ConfigError(
            f"trainer_gpu_ids or deployment.num_train_gpus ask for GPU {', '.join(map(str, missing))}, but this "
            f"machine shows {len(gpus)}; name others, or set CUDA_VISIBLE_DEVICES."
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


class _Ranks:
    """The processes of one run."""

    def __init__(
        self, cfg: SFTConfig, words: Sequence[str], gpus: list[str], port: int, claim: Claim
    ) -> None:
        self._cfg, self._run, self._gpus, self._port, self._claim = cfg, cfg.run_dir, gpus, port, claim
        self._argv = (sys.executable, "-m", "stretto", "sft", *words)
        self._children: list[Child] = []
        self._num_signals = 0
        self._is_over = asyncio.Event()

    async def run(self) -> int:
        """Start, watch, stop; the exit status."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal)
        try:
            for rank in range(self._cfg.num_ranks):
                self._children.append(self._start(rank))
            return await self._watch()
        finally:
            await process.stop(self._children, grace_s=GRACE_S)
            for number in numbers:
                loop.remove_signal_handler(number)

    def _start(self, rank: int) -> Child:
        num_ranks, name = self._cfg.num_ranks, f"sft_{rank}"
        threads = self._cfg.num_threads or max(1, process.num_cores() // num_ranks)
        env = process.thread_env(threads) | rank_env(rank, rank, num_ranks, LOOPBACK, self._port)
        env |= process.device_env(self._gpus[rank : rank + 1])
        env |= {"LOCAL_WORLD_SIZE": str(num_ranks), SUPERVISED_VAR: "1"}
        return process.start(
            name,
            self._argv,
            env=env,
            log=self._run.log(name),
            pass_fds=(self._claim.lock_fd,),
            is_shown=rank == 0,
        )

    async def _watch(self) -> int:
        """Until all ranks have ended, one has failed, or a second signal came; the exit status."""
        running = {asyncio.create_task(child.wait()): child for child in self._children}
        over = asyncio.create_task(self._is_over.wait())
        deadline = None
        try:
            while running:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                waits = {*running, over}
                done, _ = await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if over in done:
                    return EXIT_INTERRUPTED
                ended = [running.pop(task) for task in done]
                failed = [child for child in ended if child.returncode]
                if failed:
                    if running:
                        await asyncio.wait(running, timeout=LAST_WORDS_S)
                    return self._failed(failed)
                if not done:
                    names = ", ".join(child.name for child in running.values())
                    return self._say(f"FAILED: rank 0 ended {END_S:g} s ago and {names} did not")
                if self._children[0] in ended:  # it may have evals to wait for when the others are done
                    deadline = time.monotonic() + END_S
            return 0
        finally:
            for task in (*running, over):
                task.cancel()

    def _failed(self, first: list[Child]) -> int:
        """Who ended first is the cause; of several, one that was killed. Rank 0 has told its own error."""
        cause, lead = min(first, key=lambda child: child.returncode or 0), self._children[0]
        assert cause.returncode is not None
        if lead.returncode == EXIT_CONFIG or (cause is lead and cause.returncode > 0):
            assert lead.returncode is not None
            return lead.returncode
        how = process.describe_exit(cause.returncode)
        if cause.returncode == -signal.SIGKILL:
            how += ", by hand or because memory ran out (`dmesg` says)"
        lines = [
            f"FAILED: {cause.name} (pid {cause.pid}) ended: {how}; the end of {cause.log}:",
            *cause.tail(),
        ]
        return self._say("\n    ".join(lines))

    def _say(self, text: str) -> int:
        logger.error("%s", text)
        sys.stderr.write(text + "\n")
        return EXIT_FAILED

    def _on_signal(self) -> None:
        """Rank 0 finishes the step and says so; at the second signal it ends at once, and all others with it."""
        self._num_signals += 1
        self._children[0].signal(signal.SIGINT)
        if self._num_signals > 1:
            self._is_over.set()
