"""Damages one file of a run directory after another, and resumes: it recovers, or says in one message what is wrong.

    python tests/campaigns/damage.py DIR --kind rl --part 1/4 --seconds 280

A run of a few steps is made once. Then every file of it, one for each kind of name, is emptied, cut in half, changed in
one byte, or deleted, each time in a fresh copy, and the run is resumed. DIR/damage.jsonl has a line for each try. A try
is at fault if a process printed a traceback, called it a bug, or hung, or if a run that went on breaks a promise.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

import faults  # noqa: E402
from processes import forked  # noqa: E402
from runs import merged, toml  # noqa: E402

from stretto.base.paths import RunDir  # noqa: E402
from stretto.ledger.audit import audit  # noqa: E402

STEPS, DEADLINE_S = 4, 90.0


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x55]) + data[middle + 1 :] if data else b"x"


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "flipped": flipped,
    "missing": lambda data: None,
}


def start(verb: str, config: Path, words: list[str], output: Path) -> tuple[int | None, str]:
    """Exit status and output of a verb; None if it hung."""
    with output.open("wb") as log:
        popen = forked.Popen([sys.executable, "-m", "stretto", verb, "@", str(config), *words], stdout=log, stderr=log)
        try:
            code = popen.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()
            code = None
    return code, output.read_text(errors="replace")


def try_all(directory: Path, kind: str, part: tuple[int, int], seconds: float) -> int:
    """Returns how many tries were at fault."""
    verb, settings = faults.kinds.settings(kind, faults.kinds.model_in(directory))
    whole, copy = directory / "whole", directory / "copy"
    small = {"max_steps": STEPS, "run": {"name": "run"}, "ckpt": {"interval": 2, "keep_last": 2}}
    settings = merged(settings, small, {"ckpt": {"weights": {"interval": 2}}} if kind != "service" else {})
    if verb == "rl":
        control, rollouts, http = faults.free_ports(3)
        ports = {"control": {"port": control}, "inference": {"server": {"port": http}}, "view": False}
        settings = merged(settings, ports, {"rollout_transport": {"port": rollouts}} if kind != "files" else {})
    config = directory / f"{verb}.toml"
    config.write_text(toml(merged(settings, {"output_dir": copy})))
    if not whole.exists():
        shutil.rmtree(copy, ignore_errors=True)
        code, text = start(verb, config, [], directory / "whole.log")
        assert code == 0, text
        shutil.copytree(copy, whole, symlinks=True)
    kinds_of = {}
    for path in sorted(whole.rglob("*"), key=lambda path: path.stat().st_mtime):
        if path.is_file() and not path.is_symlink():
            name = str(path.relative_to(whole))
            kinds_of[re.sub(r"\d+", "N", name)] = name  # the newest of its kind
    tries = [(name, damage) for name in sorted(kinds_of.values()) for damage in DAMAGES]
    begun, num_wrong = time.monotonic(), 0
    with (directory / "damage.jsonl").open("a", buffering=1) as results:
        done = {(row["file"], row["damage"]) for row in map(json.loads, (directory / "damage.jsonl").open())}
        for name, damage in tries[part[0] - 1 :: part[1]]:
            if time.monotonic() - begun > seconds:
                break
            if (name, damage) not in done:
                row = one(verb, config, directory, name, damage)
                num_wrong += bool(row["wrong"])
                results.write(json.dumps(row) + "\n")
                print(row, flush=True)
    print(f"{kind}: {len(tries)} tries in all, {num_wrong} at fault now")
    return num_wrong


def one(verb: str, config: Path, directory: Path, name: str, damage: str) -> dict[str, Any]:
    copy = directory / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(directory / "whole", copy, symlinks=True)
    data = DAMAGES[damage]((copy / name).read_bytes())
    if data is None:
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(data)
    code, text = start(verb, config, ["--resume", "--max-steps", str(STEPS + 2)], directory / "try.log")
    wrong = [what for what in ("Traceback", "This is a bug") if what in text]
    wrong += ["it hung"] * (code is None)
    run = RunDir(copy / "run")
    if code == 0 and run.ledger.exists():
        wrong += audit(run)[:3]
    if code == 0 and run.latest_complete_checkpoint() != STEPS + 2:
        wrong.append(f"the last checkpoint is {run.latest_complete_checkpoint()}")
    if wrong:
        (directory / f"{name.replace('/', '_')}.{damage}.log").write_text(text)
    lines = [line for line in text.splitlines() if re.search(r"error|damaged|warning", line, re.IGNORECASE)]
    said = "; ".join(line[:250] for line in lines[-2:])
    return {"file": name, "damage": damage, "code": code, "said": said, "wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kind", default="rl")
    parser.add_argument("--part", default="1/1", help="which of how many equal parts of all tries")
    parser.add_argument("--seconds", type=float, default=280.0)
    args = parser.parse_args()
    directory = args.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    first, _, count = args.part.partition("/")
    return int(try_all(directory, args.kind, (int(first), int(count)), args.seconds) > 0)


if __name__ == "__main__":
    sys.exit(main())
