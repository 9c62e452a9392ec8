"""A learning curve in one process, for benchmarks that compare what is learned per step.

A step is on-policy: the orchestrator's player, credit and packing, the trainer's learner, and the embedded engine,
without the wires between them. So figures do not depend on how busy the machine is.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from stretto.chat.tokenizer import end_ids
from stretto.config.root import RLConfig
from stretto.envs.base import Environment, Split, tasks_of
from stretto.inference.embedded.core import CoreSettings, EngineCore
from stretto.models import hub
from stretto.orchestrator.batch import pack, to_samples
from stretto.orchestrator.build import build_renderer_of
from stretto.orchestrator.groups.filters import assess_group
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto.records.generate import Completion, GenerateRequest
from stretto.records.rollout import Group, RolloutStatus
from stretto.trainer.learner import Learner

ROOT = Path(__file__).resolve().parents[1]
SEQ_LEN = 256
MOST_AT_ONCE = 64
"""Rollouts that are played at the same time; each may be a program of its own."""


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


def warm_up(config: Path, directory: Path, words: Sequence[str]) -> Path:
    """The weights that `sft` makes with this configuration, in a directory that may have them already."""
    weights = next(directory.glob("*/weights/latest"), None)
    if weights is None:
        command = [sys.executable, "-m", "stretto", "sft", "@", str(config), "--output-dir", str(directory), *words]
        env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run(command, env=env, capture_output=True)
        if done.returncode:
            raise SystemExit(f"sft failed:\n{done.stdout[-2000:].decode()}{done.stderr[-2000:].decode()}")
        [weights] = directory.glob("*/weights/latest")
    return weights


async def play(
    player: Player, env: Environment, split: Split, first: int, count: int, members: int, version: int
) -> list[Group]:
    """Groups of tasks first, first + 1, ... of a split."""
    source, name = tasks_of(env, split), "e" if split == "eval" else "g"
    draws = [Draw(n, source.task(n), members, version=version, name=name) for n in range(first, first + count)]
    places = asyncio.Semaphore(max(MOST_AT_ONCE // members, 1))

    async def one(draw: Draw) -> Group:
        async with places:
            return await player.play(env, draw)

    return await asyncio.gather(*map(one, draws))


def mean_reward(groups: Sequence[Group]) -> float:
    """The mean reward; a rollout that failed has 0, and is printed."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout in rollouts:
        if rollout.status is RolloutStatus.FAILED:
            print(f"failed: {rollout.rollout_id}: {rollout.error}", flush=True)
    return round(sum(rollout.reward for rollout in rollouts) / len(rollouts), 4)


def train(
    cfg: RLConfig, env: Environment, *, num_eval_tasks: int, before: dict[str, float] | None = None
) -> dict[str, Any]:
    """Train for cfg.max_steps steps. The row has the curve, and the held-out reward before and after: `sampled` is the
    mean of two replies, `greedy` that of the likeliest. before: the first of both, if it is known."""
    return asyncio.run(_train(cfg, env, num_eval_tasks, before))


async def _train(
    cfg: RLConfig, env: Environment, num_eval_tasks: int, before: dict[str, float] | None
) -> dict[str, Any]:
    began, section, trainer = time.monotonic(), cfg.orchestrator_config(), cfg.trainer_config()
    assert cfg.max_steps is not None, "a run of a benchmark has an end"
    weights, steps = Path(cfg.model.name), cfg.max_steps
    learner = Learner(
        hub.load_model(weights, dtype=torch.float32), model=trainer.model, optim=trainer.optim,
        scheduler=trainer.scheduler, max_steps=steps, loss=trainer.loss,
    )  # fmt: skip
    renderer = build_renderer_of(str(weights), None, section.renderer)
    core = EngineCore(
        hub.load_model(weights, dtype=torch.float32),
        CoreSettings(kv_cache_tokens=1 << 17, eos_ids=end_ids(weights), max_model_len=SEQ_LEN),
    )
    engine, greedy = OneEngine(core), section.train.sampling.model_copy(update={"temperature": 0.0})
    player, likeliest = (
        Player(engine, renderer, sampling, seq_len=SEQ_LEN, seed=section.seed, is_learned=is_learned)
        for sampling, is_learned in ((section.train.sampling, True), (greedy, False))
    )

    async def held_out() -> dict[str, float]:
        each = {"sampled": (player, 2), "greedy": (likeliest, 1)}
        return {
            kind: mean_reward(await play(by, env, "eval", 0, num_eval_tasks, replies, learner.step))
            for kind, (by, replies) in each.items()
        }

    curve, before = [], before or await held_out()
    size = section.batch_size // section.group_size
    for step in range(1, steps + 1):
        groups = await play(player, env, "train", step * size, size, section.group_size, step - 1)
        curve.append(mean_reward(groups))
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
    after, close = await held_out(), getattr(env, "close", None)
    if close is not None:
        await close()
    return {"steps": steps, "before": before, "after": after, "time_s": round(time.monotonic() - began), "curve": curve}
