"""Peak memory of trainer and engine together, apart and with [colocate]: `rl` on this machine's CPU.

    python benchmarks/colocate.py [--hidden 768] [--layers 9] [--steps 3] [--only apart|train|rollout|both]

A random network (float32; by default 69M parameters) trains a few small steps on sort-letters with the embedded engine.
Meanwhile the memory of both processes is read twenty times per second: PSS, the resident pages with shared ones divided
among who has them, so that a version in shared memory counts once. The table has the peak after the first step, for
each process and for the sum, the sum's peak since the start, and the seconds per step after the first. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stretto.chat.tokenizer import END_OF_TEXT, build_letters_tokenizer, load_tokenizer
from stretto.config.sections.model import ScratchSection
from stretto.models.hub import random_model, save_hf

WAYS = {
    "apart": [],
    "train": ["--colocate.offload-rollout", "false"],
    "rollout": ["--colocate.offload-train", "false"],
    "both": ["--colocate.offload-train", "true"],
}
ROLES = ("trainer", "inference")
MIB = 1 << 20


def build_model(directory: Path, hidden: int, layers: int) -> tuple[Path, int]:
    """A random model with its tokenizer; its directory and number of parameters."""
    tokenizer_dir = build_letters_tokenizer(directory / "tokenizer")
    tokenizer = load_tokenizer(tokenizer_dir)
    ids = {"eos_token_id": list(tokenizer.eos_ids), "pad_token_id": tokenizer.token_id(END_OF_TEXT)}
    shape = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_layers": layers, "num_heads": hidden // 64}
    model = random_model(ScratchSection(**shape, num_kv_heads=hidden // 64), tokenizer.vocab_size, **ids)
    save_hf(model, directory / "model", tokenizer_dir)
    return directory / "model", sum(p.numel() for p in model.parameters())


def memory_of(launcher: int) -> dict[str, int]:
    """Bytes (PSS) of trainer and engine, by role."""
    found = {}
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for pid in children:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        if (role := next((word for word in words if word in ROLES), None)) is not None:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            found[role] = int(re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)[1]) * 1024
    return found


def measure(model: Path, directory: Path, steps: int, words: list[str]) -> dict[str, float]:
    """Peaks in MiB after the first step, and seconds per step."""
    command = [
        sys.executable,
        "-m",
        "stretto",
        "rl",
        "--model.name",
        str(model),
        "--orchestrator.env.0.id",
        "sort-letters",
    ]
    command += [
        "--output-dir",
        str(directory),
        "--run.name",
        "run",
        "--clean",
        "--max-steps",
        str(steps),
        "--ckpt",
        "None",
    ]
    command += [
        "--orchestrator.batch-size",
        "8",
        "--orchestrator.group-size",
        "4",
        "--seq-len",
        "128",
        "--view",
        "false",
    ]
    command += ["--orchestrator.max-async-level", "0", "--inference.engine", "embedded", "--inference.device", "cpu"]
    command += ["--inference.kv-cache-tokens", "4096", "--orchestrator.train.sampling.max-completion-tokens", "16"]
    run, peaks, first, last = (
        subprocess.Popen([*command, *words]),
        dict.fromkeys((*ROLES, "together", "started"), 0),
        None,
        0.0,
    )
    metrics = directory / "run" / "metrics" / "trainer.jsonl"
    while run.poll() is None:
        try:
            if first is None and metrics.exists() and '"loss/mean"' in metrics.read_text():
                first = time.perf_counter()
            found = memory_of(run.pid)
            peaks["started"] = max(peaks["started"], sum(found.values()))
            if first is not None and len(found) == len(ROLES):
                last = time.perf_counter()
                found["together"] = sum(found.values())
                peaks |= {name: max(peaks[name], value) for name, value in found.items()}
        except (OSError, TypeError):  # a process has ended meanwhile
            pass
        time.sleep(0.05)
    assert run.returncode == 0, f"rl ended with status {run.returncode}"
    seconds = (last - (first or last)) / max(steps - 1, 1)
    return {name: round(value / MIB) for name, value in peaks.items()} | {"step_s": round(seconds, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", choices=WAYS)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        model, num_parameters = build_model(Path(folder), given.hidden, given.layers)
        rows = {
            name: measure(model, Path(folder) / "runs", given.steps, words)
            for name, words in WAYS.items()
            if given.only in (None, name)
        }
    print(f"{num_parameters / 1e6:.0f}M parameters, {num_parameters * 4 / MIB:.0f} MiB of weights; MiB at the peak")
    print(f"{'offloads':10}{'trainer':>10}{'engine':>10}{'together':>10}{'with start':>12}{'step':>10}")
    for name, row in rows.items():
        cells = f"{row['trainer']:10}{row['inference']:10}{row['together']:10}{row['started']:12}"
        print(f"{name:10}{cells}{row['step_s']:8} s")
    print(json.dumps({"parameters": num_parameters, "rows": rows}))


if __name__ == "__main__":
    main()
