"""Sandboxes of `repo-repair`: many episodes at once, time and memory per turn.

    python benchmarks/repair.py [--quick] [--episodes 200] [--turns 5] [--backend subprocess]

All episodes are open at once and run shell commands on a package of three modules and 60 files; as many commands run
at a time as there are cores. Then each is played again from its journal. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from stretto.base.process import num_cores
from stretto_repair.workspace import JOURNAL, Workspace
from stretto_sandbox.sandbox import Sandbox, SandboxLimits

FILES = {f"package/part_{n}/module.py": b"x = 1\n" * 200 for n in range(60)}
COMMAND = "grep -c x package/part_7/module.py; echo {turn} >> notes.txt; sed -i s/1/2/ package/part_{turn}/module.py"


def private_bytes(process: psutil.Process) -> int:
    """Resident memory without what is shared with files; 0 if the process has ended."""
    try:
        memory = process.memory_info()
    except psutil.Error:
        return 0
    return memory.rss - memory.shared


async def play(work: Workspace, num_turns: int, waits: list[float]) -> None:
    for turn in range(num_turns):
        command = COMMAND.format(turn=turn)

        async def act(command: str = command) -> str:
            result = await work.run(["/bin/sh", "-c", command])
            assert result.is_ok, result
            return result.stdout

        began = time.monotonic()
        await work.step(command.encode(), act)
        waits.append(time.monotonic() - began)


async def play_all(root: Path, sandbox: Sandbox, episodes: int, turns: int) -> dict[str, Any]:
    """Play all episodes at once; times and memory."""
    own, waits, peak = private_bytes(psutil.Process()), list[float](), 0
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    own_cpu = time.process_time()
    works = [Workspace(root / f"g{number}.0", FILES, sandbox, origin=b"") for number in range(episodes)]
    playing = asyncio.gather(*(play_one(work, turns, waits) for work in works))
    while not playing.done():
        await asyncio.wait([playing], timeout=0.1)
        peak = max(peak, sum(map(private_bytes, psutil.Process().children(recursive=True))))
    await playing
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    num = episodes * turns
    return {
        "wall_s": round(time.monotonic() - began, 1),
        "turns_per_s": round(num / (time.monotonic() - began), 1),
        "cpu_ms_per_turn": round(1000 * cpu / num, 1),
        "own_cpu_ms_per_turn": round(1000 * (time.process_time() - own_cpu) / num, 2),
        "own_kib_per_episode": round((private_bytes(psutil.Process()) - own) / 1024 / episodes, 1),
        "sandboxes_peak_mib": round(peak / 2**20, 1),
        "journal_kib_per_turn": round(sum((w.home / JOURNAL).stat().st_size for w in works) / 1024 / num, 2),
    }


async def play_one(work: Workspace, turns: int, waits: list[float]) -> None:
    async with work:
        await play(work, turns, waits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--backend", default="auto", choices=["auto", "bubblewrap", "subprocess"])
    parser.add_argument("--quick", action="store_true", help="20 episodes of one turn")
    args = parser.parse_args()
    if args.quick:
        args.episodes, args.turns = 20, 1
    sandbox = Sandbox(SandboxLimits(wall_s=60.0, max_processes=64, max_depth=64), backend=args.backend)
    with tempfile.TemporaryDirectory(prefix="stretto-bench-") as folder:
        os.chmod(folder, 0o711)
        result = {"cores": num_cores(), "episodes": args.episodes, "turns": args.turns}
        for name in ("played", "again"):
            result[name] = asyncio.run(play_all(Path(folder), sandbox, args.episodes, args.turns))
            print(name, result[name], flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
