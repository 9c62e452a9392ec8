"""Starts a script of this folder on several ranks.

Ranks are forked from one process that has imported torch and the trainer: importing takes longer than most scripts.
"""

from __future__ import annotations

import multiprocessing
from ports import free_port
import os
import pickle
import runpy
import sys
import time
import warnings
from pathlib import Path
from typing import NoReturn, TypeVar

T = TypeVar("T")

# Modules that start no threads when they are imported.
PRELOADED = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "stretto.trainer.critic",
    "stretto.trainer.updates",
    "stretto.trainer.state.checkpoint",
    "stretto.trainer.state.export",
)
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(list(PRELOADED))


def run_ranks(script: str, *args: str | Path, world_size: int, log: Path, deadline_s: float = 200.0) -> None:
    """Run a script of this folder, or of one below, on several ranks and wait for them; their output is in `log`.

    Fails with the end of the log unless all of them end well and in time.
    """
    log.write_text("")
    words = [str(Path(__file__).parent / script), *map(str, args)]
    group = {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    envs = [dict(os.environ) | group | {"RANK": str(rank)} for rank in range(world_size)]
    ranks = [FORKED.Process(target=_run, args=(words, env, log)) for env in envs]
    try:
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + deadline_s
        for rank in ranks:
            rank.join(deadline - time.monotonic())
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * world_size, log.read_text()[-6000:]


def gather_anything(value: T) -> list[T]:
    """What all ranks have of something that only tests exchange, tensors for example."""
    import torch.distributed as dist

    from stretto.trainer.parallel import exchange

    if not dist.is_initialized():  # a single rank
        return [value]
    return [pickle.loads(each) for each in exchange.gather(pickle.dumps(value), bytes)]


def _refuse_pickles() -> None:
    """Let torch's functions for objects fail: no rank may unpickle what another one sends."""
    from torch.distributed import distributed_c10d

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("a pickle from another rank")

    for name in ("_object_to_tensor", "_tensor_to_object"):
        assert hasattr(distributed_c10d, name)
        setattr(distributed_c10d, name, refuse)


def _run(words: list[str], env: dict[str, str], log: Path) -> None:
    """In a rank: what `python -W error WORDS` does."""
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(out, number)
    os.environ.clear()
    os.environ.update(env)
    sys.argv[:] = words
    warnings.simplefilter("error")
    _refuse_pickles()
    runpy.run_path(words[0], run_name="__main__")
