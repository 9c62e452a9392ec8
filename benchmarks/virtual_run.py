"""One real run under a virtual clock: real learning, seconds that are set.

    python benchmarks/virtual_run.py '{"config": "examples/sort_letters/rl.toml", "words": [...], ...}'

The orchestrator's loop, the embedded engine's core, the trainer's updates, environments and the ledger are the real
ones, in one process. What they compute takes no time of the clock: a training step takes `train_s`, an engine's pass
`play_s`, a load `load_s`, and each reward a log-normal wait of median `latency_s`, the same for a task and a member in
every run. So a run's seconds are those of its waits and its setting, not of the machine and what else it does.

The last line of the output is a JSON object (`Row`). Policies are judged by version: `reward` has for each version the
mean reward of the rollouts that began with it, whether they were trained or not, and `at` when it was there. A curve
over steps would show what old policies have sampled.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.envs.base import RolloutContext, RolloutResult, Split, TaskSource
from stretto.inference.embedded.core import EngineCore
from stretto.inference.server import build_core
from stretto.ledger.reader import LedgerReader
from stretto.orchestrator.build import build_policy_renderer
from stretto.orchestrator.main import Wires, build_loop, open_user_code
from stretto.orchestrator.state.resume import starting_point
from stretto.records.control import Bye, Register, StepDone, StepMetrics, Stop, VersionReady
from stretto.records.generate import Completion, GenerateRequest
from stretto.records.rollout import Task
from stretto.records.sample import TrainBatch
from stretto.records.weight_manifest import WeightManifest
from stretto.trainer.build import build_learner
from stretto.trainer.hooks import load_hooks
from stretto.trainer.updates import Updates
from stretto.transports.control import Event
from stretto.virtual_clock import run_virtual

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Spec:
    """What to run, and how long its parts take."""

    config: str
    words: list[str]
    latency_s: float
    train_s: float
    play_s: float
    load_s: float
    publish_s: float
    seed: int
    sigma: float = 1.0


@dataclass
class Row:
    """What a run gave."""

    at: list[float] = field(default_factory=list)
    """By version: the second at which engines had it."""
    reward: list[float] = field(default_factory=list)
    """By version: mean reward of the rollouts that began with it."""
    rollouts: list[int] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    """By step: the second at which it was trained."""
    ess: list[float] = field(default_factory=list)
    age: list[float] = field(default_factory=list)
    """By step: mean age of its tokens in versions."""
    decisions: list[str] = field(default_factory=list)


class Weights:
    """The versions that were published, between the trainer and the engine."""

    def __init__(self) -> None:
        self.tensors: dict[int, list[tuple[str, torch.Tensor]]] = {}


class Engine:
    """The engine's client and the engine in one: requests of one moment are computed together."""

    num_ready = 1
    num_replies = 0
    paused_s = 0.0
    generation = 0

    def __init__(self, core: EngineCore, weights: Weights, spec: Spec, row: Row) -> None:
        self.core, self.weights, self.spec, self.row = core, weights, spec, row
        self._futures: dict[str, asyncio.Future[list[Completion]]] = {}
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="engine")

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        assert self.core.refusal_reason(request) is None, self.core.refusal_reason(request)
        self.core.submit(self.core.build_request(request))
        future = self._futures[request.request_id] = asyncio.get_running_loop().create_future()
        self._wake.set()
        return await future

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(self.spec.play_s)
            while self.core.has_work:
                for request in self.core.step():
                    self._futures.pop(request.request_id).set_result([each for each in request.completions if each])

    async def update_weights(self, manifest: WeightManifest) -> None:
        if manifest.version:
            await asyncio.sleep(self.spec.load_s)
            self.paused_s = self.spec.load_s
        self.core.load_weights(manifest.version, self.weights.tensors.pop(manifest.version))
        self.core.reset_prefix_cache()
        self.row.at.append(asyncio.get_running_loop().time())

    async def watch(self) -> None:
        await asyncio.shield(self._task)

    async def wait_ready(self, timeout_s: float) -> None:
        await asyncio.sleep(0)

    async def abort(self, request_ids: Any = None) -> None:
        raise AssertionError("nothing is aborted here")

    async def metrics(self) -> dict[str, float]:
        return {}

    async def metrics_by_engine(self) -> dict[str, dict[str, float]]:
        await self.watch()
        return {}


class Trainer:
    """The trainer, its control wire and the wire of batches in one."""

    def __init__(self, updates: Updates, weights: Weights, spec: Spec, row: Row, max_steps: int) -> None:
        self.updates, self.weights, self.spec, self.row, self.max_steps = updates, weights, spec, row, max_steps
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._inbox: asyncio.Queue[list[TrainBatch] | Stop] = asyncio.Queue()

    async def wait_registered(self, timeout_s: float | None = None) -> list[Register]:
        self._task = asyncio.create_task(self._train(), name="trainer")
        return [Register(rank=0, world_size=1, resumed_step=None, version=0)]

    async def next_event(self) -> Event:
        return await self._events.get()

    async def send(self, message: Any) -> None:
        if isinstance(message, list | Stop):
            self._inbox.put_nowait(message)
        await asyncio.sleep(0)

    async def _train(self) -> None:
        self._publish(0)
        for step in range(1, self.max_steps + 1):
            order = await self._inbox.get()
            if isinstance(order, Stop):
                break
            metrics = self.updates.train(order[0].micro_batches)
            await asyncio.sleep(self.spec.train_s)
            self.row.ends.append(asyncio.get_running_loop().time())
            self.row.ess.append(round(metrics["ess/tokens"], 4))
            self._emit(StepDone(step=step, metrics=metrics))
            if order[0].is_sent:
                await asyncio.sleep(self.spec.publish_s)
                self._emit(StepMetrics(step=step, metrics={"time/publish": self.spec.publish_s}))
                self._publish(step)
        self._emit(Bye())

    def _publish(self, version: int) -> None:
        tensors = self.updates.learner.export_tensors()
        self.weights.tensors[version] = [(name, tensor.detach().clone()) for name, tensor in tensors]
        manifest = WeightManifest(
            version=version, transport="filesystem", location="nowhere", shards=(), tensors=(), checksum=0
        )
        self._emit(VersionReady(manifest=manifest))

    def _emit(self, message: Any) -> None:
        self._events.put_nowait(Event(0, message))


class Slow:
    """An environment whose rewards come later."""

    def __init__(self, of: Any, spec: Spec, engine: Engine) -> None:
        self.of, self.spec, self.engine = of, spec, engine
        self.name = of.name
        self.rewards: dict[int, list[float]] = defaultdict(list)

    def tasks(self, split: Split) -> TaskSource:
        return self.of.tasks(split)

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        version = self.engine.core.version
        result = await self.of.rollout(task, ctx)
        self.rewards[version].append(result.reward)
        assert ctx.episode is not None
        source = random.Random(f"{self.spec.seed} {task.task_id} {ctx.episode.member}")
        await asyncio.sleep(self.spec.latency_s * source.lognormvariate(0.0, self.spec.sigma))
        return result


async def run(spec: Spec) -> Row:
    """One run to its end."""
    cfg = load(RLConfig, ["@", spec.config, *spec.words], verb="rl")
    orchestrator, trainer, inference = cfg.orchestrator_config(), cfg.trainer_config(), cfg.inference_config()
    torch.manual_seed(cfg.seed)
    row, weights = Row(), Weights()
    async with AsyncExitStack() as stack:
        renderer = build_policy_renderer(orchestrator)
        core = build_core(inference, Path(cfg.model.name))
        engine = Engine(core, weights, spec, row)
        stack.callback(engine._task.cancel)
        code = open_user_code(orchestrator, renderer, stack)
        [env] = code.envs
        slow = code.envs[0] = Slow(env, spec, engine)  # type: ignore[assignment]
        hooks = load_hooks(trainer.hooks)
        learner = build_learner(trainer, Path(cfg.model.name), hooks)
        assert cfg.max_steps is not None
        ends = Trainer(Updates(learner, trainer, hooks=hooks), weights, spec, row, cfg.max_steps)
        wires = Wires(engine, ends, ends)  # type: ignore[arg-type]
        loop = build_loop(orchestrator, wires, renderer, starting_point(orchestrator), stack, code)
        await loop.run()
    rewards = [slow.rewards[version] for version in range(len(row.at))]
    row.reward = [round(fmean(each), 4) if each else 0.0 for each in rewards]
    row.rollouts = [len(each) for each in rewards]
    lines = orchestrator.run_dir.metrics("orchestrator").read_text().splitlines()
    row.age = [each["off_policy/mean"] for each in map(json.loads, lines) if "off_policy/mean" in each]
    with LedgerReader(orchestrator.run_dir) as reader:
        row.decisions = [event["data"] for event in reader.events("steering")]
    return row


def main() -> None:
    torch.set_num_threads(1)
    row = run_virtual(run(Spec(**json.loads(sys.argv[1]))))
    print(json.dumps(vars(row)))


if __name__ == "__main__":
    main()
