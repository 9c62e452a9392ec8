"""Credit per turn against plain grpo: how many steps does it need to the same reward?

    python benchmarks/turn_credit.py [--seeds 101 102 103] [--arms plain returns states] [--rows FILE] [--dir DIR]

The task is `alphabet-sort` with four turns of two letters: the reward is 1 if all four are right. A network of 0.13M
parameters is warmed up on solved tasks (`sft`). Then it is trained for STEPS steps with plain grpo, and for SHARE of
them with credit per turn; a run's learning rate falls over its own steps. Both have the settings of
examples/alphabet_sort, with 64 rollouts per step. A figure is the mean reward of 256 held-out tasks, two replies to
each, sampled at temperature 1, after a run's last step.

A step is on-policy and in one process: the orchestrator's player, credit and packing, the trainer's learner, and the
embedded engine, without the wires between them. So figures do not depend on how busy the machine is.
`--rows` keeps every run that is done, with its curve, and those it has are not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from stretto.chat.tokenizer import end_ids
from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.envs.base import load_environment
from stretto.inference.embedded.core import CoreSettings, EngineCore
from stretto.models import hub
from stretto.orchestrator.batch import pack, to_samples
from stretto.orchestrator.build import build_renderer_of
from stretto.orchestrator.groups.filters import assess_group
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto.records.generate import Completion, GenerateRequest
from stretto.records.rollout import Group
from stretto.trainer.learner import Learner

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "alphabet_sort"

STEPS, SHARE = 100, 0.7
GAME = {"num_turns": 4, "letters_per_turn": 2}
SETTINGS = (
    "--trainer.optim.lr 3e-4 --orchestrator.batch-size 64 "
    "--orchestrator.train.sampling.max-completion-tokens 10 --clean"
)
ARMS = {
    "plain": ({}, ""),
    "states": ({}, "--orchestrator.algo.turns.type states"),
    "values": ({}, "--orchestrator.algo.turns.type values"),
    "returns": ({"scores_turns": True}, "--orchestrator.algo.turns.type returns --orchestrator.algo.turns.gamma 0"),
}
EVAL_TASKS, EVAL_REPLIES = 256, 2


class OneEngine:
    """An engine client and the embedded engine behind it; requests that are waiting are computed together."""

    num_ready, generation = 1, 0

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._waiting: dict[str, asyncio.Future[list[Completion]]] = {}
        self._steps: asyncio.Task[None] | None = None

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        self.core.submit(self.core.build_request(request))
        done = self._waiting[request.request_id] = asyncio.get_running_loop().create_future()
        if self._steps is None or self._steps.done():
            self._steps = asyncio.create_task(self._run())
        return await done

    async def _run(self) -> None:
        while self.core.has_work:
            await asyncio.sleep(0)  # others may ask
            for request in self.core.step():
                self._waiting.pop(request.spec.request_id).set_result(request.completions)


def warm_up(seed: int, directory: Path) -> Path:
    """The weights of a seed's network, that has seen solved tasks."""
    weights = directory / f"seed-{seed}" / "alphabet-sort-sft" / "weights" / "latest"
    if not weights.exists():
        game = json.dumps(GAME)
        words = f"--output-dir {directory / f'seed-{seed}'} --model.scratch.seed {seed} --max-steps 150".split()
        command = [sys.executable, "-m", "stretto", "sft", "@", str(EXAMPLE / "sft.toml"), *words]
        env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run([*command, "--data.args", game, "--val.data.args", game], env=env, capture_output=True)
        if done.returncode:
            raise SystemExit(f"sft failed:\n{done.stdout[-2000:].decode()}{done.stderr[-2000:].decode()}")
    return weights


async def play(player: Player, env, split: str, first: int, count: int, members: int, version: int) -> list[Group]:
    """Groups of tasks first, first + 1, ... of a split."""
    source, name = env.tasks(split), "e" if split == "eval" else "g"
    draws = [Draw(n, source.task(n), members, version=version, name=name) for n in range(first, first + count)]
    return await asyncio.gather(*(player.play(env, draw) for draw in draws))


def train(seed: int, arm: str, weights: Path, steps: int, more: str = "") -> dict:
    """One run, as a row."""
    args, flags = ARMS[arm]
    envs = json.dumps([{"id": "alphabet-sort", "args": {**GAME, **args}}])
    words = f"--model.name {weights} --seed {seed} --max-steps {steps} {SETTINGS} {flags} {more}".split()
    cfg = load(RLConfig, ["@", str(EXAMPLE / "rl.toml"), "--orchestrator.env", envs, *words], verb="rl")
    began, section, trainer = time.monotonic(), cfg.orchestrator_config(), cfg.trainer_config()
    env = load_environment("alphabet-sort", {**GAME, **args})
    learner = Learner(
        hub.load_model(weights, dtype=torch.float32), model=trainer.model, optim=trainer.optim,
        scheduler=trainer.scheduler, max_steps=steps, loss=trainer.loss,
    )  # fmt: skip
    renderer = build_renderer_of(str(weights), None, section.renderer)
    core = EngineCore(
        hub.load_model(weights, dtype=torch.float32),
        CoreSettings(kv_cache_tokens=1 << 17, eos_ids=end_ids(weights), max_model_len=256),
    )
    player = Player(OneEngine(core), renderer, section.train.sampling, seq_len=256, seed=seed, is_learned=True)

    def held_out() -> float:
        groups = asyncio.run(play(player, env, "eval", 0, EVAL_TASKS, EVAL_REPLIES, learner.step))
        rewards = [rollout.reward for group in groups for rollout in group.rollouts]
        return sum(rewards) / len(rewards)

    curve, before = [], held_out()
    size = section.batch_size // section.group_size
    for step in range(1, steps + 1):
        groups = asyncio.run(play(player, env, "train", step * size, size, section.group_size, step - 1))
        rewards = [rollout.reward for group in groups for rollout in group.rollouts]
        curve.append(round(sum(rewards) / len(rewards), 4))
        samples = to_samples([assess_group(group, section).group for group in groups])
        packing = pack(samples, step=step, seq_len=section.seq_len)
        try:
            while True:
                next(packing)
        except StopIteration as done:
            [batch] = done.value
        learner.forward_backward(batch.micro_batches)
        learner.optim_step()
        core.load_weights(step, hub.export_tensors(learner.policy))
        core.reset_prefix_cache()
    return {
        "seed": seed, "arm": arm, "flags": f"{flags} {more}".strip(), "steps": steps, "before": round(before, 4),
        "after": round(held_out(), 4), "time_s": round(time.monotonic() - began), "curve": curve,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[101, 102, 103])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["plain", "returns"])
    parser.add_argument("--steps", type=int, default=STEPS, help="of a plain run")
    parser.add_argument("--flags", default="", help="more flags of all runs")
    parser.add_argument("--rows", type=Path, help="file of rows that are done")
    parser.add_argument("--dir", type=Path, help="directory of the warm-ups; a temporary one without it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    directory = args.dir or Path(tempfile.mkdtemp(prefix="turn-credit-"))
    rows = [json.loads(line) for line in args.rows.open()] if args.rows and args.rows.exists() else []
    for seed in args.seeds:
        for arm in args.arms:
            steps, more = args.steps if arm == "plain" else int(SHARE * args.steps), args.flags
            wanted = (seed, arm, f"{ARMS[arm][1]} {more}".strip(), steps)
            if any((row["seed"], row["arm"], row["flags"], row["steps"]) == wanted for row in rows):
                continue
            rows.append(train(seed, arm, warm_up(seed, directory), steps, more))
            if args.rows:
                with args.rows.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
            print({key: value for key, value in rows[-1].items() if key != "curve"}, flush=True)
    print("| seed | credit | steps | held-out reward | time |\n|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: (row["seed"], -row["steps"], row["arm"])):
        change = f"{row['before']:.3f} -> {row['after']:.3f}"
        print(f"| {row['seed']} | {row['arm']} | {row['steps']} | {change} | {row['time_s']} s |")


if __name__ == "__main__":
    main()
