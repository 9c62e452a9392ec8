"""Starts a script of this folder on several ranks.

Ranks are forked (processes/forked.py): importing takes longer than most scripts.
"""

from __future__ import annotations

import io
import os
import runpy
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TypeVar

from ports import free_port
from processes import forked

T = TypeVar("T")


def run_ranks(script: str, *args: str | Path, world_size: int, log: Path, deadline_s: float = 200.0) -> None:
    """Run a script of this folder, or of one below, on several ranks and wait for them; their output is in `log`.

    Fails with the end of the log unless all of them end well and in time.
    """
    log.write_text("")
    words = [sys.executable, __file__, str(Path(__file__).parent / script), *map(str, args)]
    group = {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ["PYTHONPATH"]]),
    }
    envs = [os.environ | group | {"RANK": str(rank)} for rank in range(world_size)]
    ranks: list[subprocess.Popen] = []
    try:
        with log.open("a") as out:
            for env in envs:
                ranks.append(forked.Popen(words, env=env, stdout=out, stderr=out))
        deadline = time.monotonic() + deadline_s
        with suppress(subprocess.TimeoutExpired):
            for rank in ranks:
                rank.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * world_size, log.read_text()[-6000:]


def gather_anything(value: T) -> list[T]:
    """What all ranks have of something that only tests exchange, tensors for example."""
    import torch
    import torch.distributed as dist

    from stretto.trainer.ranks import exchange

    if not dist.is_initialized():  # a single rank
        return [value]
    mine = io.BytesIO()
    torch.save(value, mine)  # pickle writes each tensor as a file of its own, in four times the time
    return [torch.load(io.BytesIO(each), weights_only=False) for each in exchange.gather(mine.getvalue(), bytes)]


def _refuse_pickles() -> None:
    """Let torch's functions for objects fail: no rank may unpickle what another one sends."""
    from torch.distributed import distributed_c10d

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("a pickle from another rank")

    for name in ("_object_to_tensor", "_tensor_to_object"):
        assert hasattr(distributed_c10d, name)
        setattr(distributed_c10d, name, refuse)


if __name__ == "__main__":  # in a rank: what `python -W error SCRIPT ...` does
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    warnings.simplefilter("error")
    _refuse_pickles()
    runpy.run_path(sys.argv[0], run_name="__main__")
