"""Eight runs of `rl --service` learn at the same time on one trainer and one engine, and each alone.

    python benchmarks/tenants_learn.py [--steps N] [--warm-up N] [--alone first|all] [--work DIR]

A network of 0.13M parameters sees solved tasks of all three kinds (`sft`), until it solves some of each. Then
`stretto serve` has it once, and eight runs train an adapter each: sort-letters, arithmetic, reverse-text, with other
seeds and ranks. Each has its own orchestrator, as its user would start it. After that each run (or the first of each
kind) trains alone on the same service, with the same seed, and one without advantages, the control. Figures are the
mean reward of held-out tasks before and after, which neither the warm-up nor the runs see. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stretto.base.ports import PortClaims
from stretto.envs.base import load_environment
from stretto.launch.plan.placement import free_port

ROOT = Path(__file__).resolve().parents[1]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
READY_S = 300.0
TASKS = {
    "sort-letters": {"num_letters": 4, "instruction": "sort "},
    "arithmetic": {"max_number": 9, "instruction": "sum "},
    "reverse-text": {"min_length": 3, "max_length": 5, "instruction": "turn "},
}

SHARES = {"sort-letters": 1, "arithmetic": 4, "reverse-text": 1}
"""Parts of the solved tasks that are of each kind: sums are harder."""


CONTROL = "[orchestrator.algo]\ntype = 'zero'\n[trainer.loss]\nkl_tau = 0.0\n"
"""No rollout is better than another."""


@dataclass(frozen=True)
class Learner:
    """One run: its task, seed, rank and learning rate."""

    task: str
    seed: int
    rank: int = 16
    lr: float = 3e-3

    @property
    def name(self) -> str:
        return f"{self.task}-{self.seed}"


LEARNERS = (
    Learner("sort-letters", 1),
    Learner("arithmetic", 2),
    Learner("reverse-text", 3),
    Learner("sort-letters", 4, rank=8),
    Learner("arithmetic", 5, rank=8),
    Learner("reverse-text", 6, rank=8),
    Learner("sort-letters", 7, lr=2e-3),
    Learner("reverse-text", 8, lr=2e-3),
)


def start(*words: str, log: Path, **env: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "stretto", *words], env=ENV | env, stdout=file, stderr=subprocess.STDOUT
        )


def wait(popen: subprocess.Popen[bytes], log: Path) -> None:
    if popen.wait():
        raise SystemExit(f"{log}: exit code {popen.returncode}\n{log.read_text()[-3000:]}")


def warm_up(work: Path, steps: int) -> Path:
    """A network that solves some tasks of each kind; its directory."""
    rows = [
        row for task, args in TASKS.items() for row in load_environment(task, args).sft_rows(SHARES[task] * 2048, 0)
    ]
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = work / "sft.toml"
    config.write_text(
        f'max_steps = {steps}\nbatch_size = 96\nseq_len = 4096\nnum_threads = 1\noutput_dir = "{work}"\n'
        '[run]\nname = "sft"\n[model.scratch]\n[data]\ntype = "file"\n'
        f'name = "{work / "rows.jsonl"}"\n[optim]\nlr = 2e-3\n[scheduler]\ntype = "constant"\nwarmup_steps = 20\n'
    )
    log = work / "sft.log"
    wait(start("sft", "@", str(config), log=log), log)
    return work / "sft" / "weights" / "latest"


@contextmanager
def serving(work: Path, model: Path) -> Iterator[str]:
    """A service with the model; its address."""
    claims = PortClaims()
    ports = [free_port(f"port {i}", "127.0.0.1", 8700 + i, False, claims) for i in range(3)]
    claims.close()
    config = work / "serve.toml"
    config.write_text(
        f'seq_len = 2048\noutput_dir = "{work}"\n[run]\nname = "service"\n[model]\nname = "{model}"\n'
        f"[control]\nport = {ports[0]}\n[inference]\nmax_model_len = 128\n[inference.server]\nport = {ports[1]}\n"
        f"[service]\nport = {ports[2]}\nmax_lora_rank = 16\nmax_adapters = 12\n[service.users.user]\n"
        "max_samples = 512\n"
    )
    url, log = f"http://127.0.0.1:{ports[2]}", work / "serve.log"
    popen = start("serve", "@", str(config), log=log)
    try:
        deadline = time.monotonic() + READY_S
        while not is_ready(url):
            if popen.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(log.read_text()[-3000:])
            time.sleep(0.5)
        yield url
    finally:
        popen.terminate()
        popen.wait()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


def train(work: Path, model: Path, url: str, learners: tuple[Learner, ...], steps: int, how: str) -> dict:
    """Runs at the same time: by name reward before and after, and seconds of all."""
    token = json.loads((work / "service" / "tokens.json").read_text())["user"]
    begin, started = time.perf_counter(), []
    for learner in learners:
        name = f"{how}-{learner.name}"
        config = work / f"{name}.toml"
        args = "".join(f"{key} = {json.dumps(value)}\n" for key, value in TASKS[learner.task].items())
        config.write_text(
            f'max_steps = {steps}\nseq_len = 2048\nseed = {learner.seed}\noutput_dir = "{work}"\nview = false\n'
            f'[run]\nname = "{name}"\n[model]\nname = "{model}"\n[model.lora]\nrank = {learner.rank}\n'
            f"[trainer.optim]\nlr = {learner.lr}\n[trainer.scheduler]\ntype = 'linear'\nwarmup_steps = 4\n"
            f"decay_steps = {steps - 4}\n[orchestrator]\nbatch_size = 128\ngroup_size = 8\nmax_async_level = 1\n"
            + CONTROL
            * (how == "control")
            + "[orchestrator.train.sampling]\nmax_completion_tokens = 12\n"
            "[orchestrator.eval]\nnum_examples = 256\ngroup_size = 2\ngreedy = false\n"
            f'[[orchestrator.env]]\nid = "{learner.task}"\n[orchestrator.env.args]\n{args}'
        )
        log = work / f"{name}.log"
        words = ("rl", "@", str(config), "--service", url, "--clean")
        started.append((learner, name, start(*words, log=log, STRETTO_SERVICE_TOKEN=token), log))
    found = {}
    for learner, name, popen, log in started:
        wait(popen, log)
        summary = json.loads((work / name / "summary.json").read_text())
        found[learner.name] = {key: round(summary[f"reward_{key}"], 3) for key in ("before", "after")}
    return {"runs": found, "seconds": round(time.perf_counter() - begin, 1)}


def show(how: str, part: dict) -> None:
    for name, row in part["runs"].items():
        print(f"{how:9s} {name:16s} {row['before']:.3f} -> {row['after']:.3f}", flush=True)
    print(f"{how:9s} {part['seconds']:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warm-up", type=int, default=400)
    parser.add_argument("--alone", choices=("first", "all"), default="all")
    parser.add_argument("--work", type=Path)
    words = parser.parse_args()
    work = (words.work or Path(tempfile.mkdtemp(prefix="tenants-learn-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    model, found = warm_up(work, words.warm_up), {}
    alone = LEARNERS if words.alone == "all" else LEARNERS[:3]
    with serving(work, model) as url:
        found["together"] = train(work, model, url, LEARNERS, words.steps, "together")
        show("together", found["together"])
        parts = [train(work, model, url, (each,), words.steps, "alone") for each in alone]
        runs = {name: row for part in parts for name, row in part["runs"].items()}
        found["alone"] = {"runs": runs, "seconds": sum(part["seconds"] for part in parts)}
        show("alone", found["alone"])
        found["control"] = train(work, model, url, LEARNERS[:1], words.steps, "control")
        show("control", found["control"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
