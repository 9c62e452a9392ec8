"""Exchanges values between ranks and looks where they listen; run by every rank."""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from stretto.base.errors import DataError, WireError
from stretto.check.degrees import Degrees
from stretto.trainer.ranks import exchange
from stretto.trainer.ranks.mesh import Mesh, new_values_group, process_group
from stretto.transports.weights.layout import RankShards

CPU = torch.device("cpu")


def exchange_values(rank: int) -> None:
    everybodys = exchange.gather({"loss": rank / 2}, dict[str, float])
    assert everybodys == [{"loss": 0.0}, {"loss": 0.5}, {"loss": 1.0}]
    shards = exchange.gather((f"r{rank}", RankShards(("s",) * rank, (), ())), tuple[str, RankShards])
    assert [(name, len(each.shards)) for name, each in shards] == [("r0", 0), ("r1", 1), ("r2", 2)]
    large = np.arange(100_000) if rank == 1 else None
    got = exchange.broadcast(large, np.ndarray | None, source=1)
    assert got is not None and got.sum() == np.arange(100_000).sum()
    assert exchange.broadcast("only the first has it" if rank == 0 else None, str | None)


def refuse_other_things(rank: int) -> None:
    with pytest.raises(WireError, match=r"damaged message: .*`int`.*`str`"):
        exchange.gather("text", int)
    sent = torch.frombuffer(bytearray(b"cos\nsystem\n(S'true'\ntR."), dtype=torch.uint8)
    if rank == 0:
        exchange._message, real = (lambda *_: sent), exchange._message
    try:
        with pytest.raises(DataError, match=r"the message of trainer rank 0: .*cut off"):
            exchange.gather(1, int)
    finally:
        if rank == 0:
            exchange._message = real


def share_over_stages(rank: int) -> None:
    """Two stages of two replicas: batches arrive at the first stage, scores are those of the last."""
    mesh = Mesh(Degrees(dp_shard=2, pp=2), CPU, is_sharded=False)
    stage, replica = divmod(rank, 2)
    assert (mesh.pp_rank, mesh.dp_rank, mesh.is_lead) == (stage, replica, rank == 0)
    assert mesh.is_batch_lead == (stage == 0) and mesh.is_counted == mesh.is_last_stage == (stage == 1)
    batch = f"batch {replica}" if mesh.is_batch_lead else None
    assert mesh.broadcast_batch(batch, str | None) == f"batch {replica}"
    scores = [np.full(3, float(rank))]
    (found,) = mesh.from_last_stage(scores, list[np.ndarray])
    assert (found == 2 + replica).all()
    sums = {"loss": float(rank), "max/rank": float(rank)} if mesh.is_last_stage else {}
    assert mesh.reduce(sums) == {"loss": 5.0, "max/rank": 3.0}
    assert mesh.local_items("abcd") == (["a", "c"] if replica == 0 else ["b", "d"])


def listening_addresses() -> set[str]:
    """The IPv4 and IPv6 addresses at which this process listens."""
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                found.add(words[1].rpartition(":")[0])
    return found


def as_table(address: str) -> str:
    """An IPv4 address as tables in /proc write it."""
    return f"{struct.unpack('=I', socket.inet_aton(address))[0]:08X}"


def main() -> None:
    if sys.argv[1:] == ["stages"]:
        with process_group(60.0):
            share_over_stages(int(os.environ["RANK"]))
        return
    rank, (reaches,) = int(os.environ["RANK"]), sys.argv[1:] or [None]
    join_timeout_s = 60.0
    if reaches is not None and rank == 0:  # the others wait for it longer than it for them
        time.sleep(2.0)
    elif reaches is not None:
        join_timeout_s = 0.5
    with process_group(60.0, join_timeout_s, reaches=reaches):
        exchange_values(rank)
        dist.barrier()
        backend = new_values_group()._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=60.0)
        store = {"127.0.0.1"} if rank == 0 else set()
        assert listening_addresses() == set(map(as_table, store | {reaches or "127.0.0.1"}))
        dist.barrier()
        refuse_other_things(rank)


if __name__ == "__main__":
    main()
