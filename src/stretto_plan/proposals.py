"""Other settings of the same run, each with the time of its step: what to change, and what it gains.

A proposal is words for the command line. The config is loaded again with them, so that all rules are checked and
derived keys follow. A proposal is listed only if all processes fit into memory. Its gain comes from a simulation: both
configs are simulated with the same steps and the same rollouts.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from stretto.base.errors import StrettoError
from stretto.config.root import RLConfig, SFTConfig
from stretto_plan.costs import Costs
from stretto_plan.memory import all_memory, trainer_memory
from stretto_plan.setup import Setup, with_config
from stretto_plan.simulation.run import SftTimes, Times, sft_times, simulate, simulate_steering
from stretto_plan.workload import Numbers, Workload

LEAST_GAIN = 0.02
"""Smaller gains are not worth a line."""
SLOW_UPDATE = 0.05
"""Share of a step that publishing and loading a version takes, from which on fewer versions may help."""
MOST_ROLLOUTS, FEWEST_STEPS = 5000, 6
"""The size of a simulation of a proposal."""
STEERED_STEPS, FEWEST_STEERED, STEERED_ROLLOUTS = 160, 60, 20_000
"""The size of a simulation of what steering decides."""

Words = tuple[str, ...]
"""Flags and values, as they are typed."""
Reload = Callable[[Words], RLConfig | SFTConfig]
"""Loads the config with words added. Raises: ConfigError."""


@dataclass(frozen=True)
class Proposal:
    """One change, and what a step would take with it."""

    words: Words
    step_s: float
    staleness_p95: float | None
    """None for `sft`."""
    gain: float
    """Share of the step's time that it saves."""
    peak_bytes: float
    """Peak memory of a trainer's rank."""

    @property
    def text(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True)
class Setting:
    """What steering chooses."""

    level: int
    update_interval: int
    """Steps between two versions that engines get."""


def propose(
    costs: Costs,
    workload: Workload,
    now: Times,
    reload: Reload,
    *,
    steps: int,
    settled: Setting | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Proposal]:
    """The changes to a run of `rl` that help, the best first; if it does not fit, those with which it does.

    now: the times of the run as it is. steps: how many to simulate, at most. settled: where steering settles, which
    chooses the level and how often engines get weights: no proposal does, and all are compared there.
    """
    num = proposal_steps(costs.setup.rl, steps)
    before = now if num == now.num_steps else simulate(costs, workload, steps=num)
    fits_now, found = fits(costs.setup), []
    for words, setup in alternatives(costs.setup, _candidates(costs.setup, now, settled), reload):
        say(" ".join(words))
        other = replace(costs, setup=setup)
        try:
            times = simulate(other if settled is None else at_setting(other, settled), workload, steps=num)
        except StrettoError:
            continue  # such as a run whose rollouts all take too long
        gain = 1 - times.step_s / before.step_s
        if gain >= max(LEAST_GAIN, math.hypot(before.spread, times.spread)) or not fits_now:
            found.append(Proposal(words, times.step_s, times.staleness_p95, gain, _peak(setup)))
    return sorted(found, key=lambda proposal: -proposal.gain)


def steered(costs: Costs, workload: Workload, *, steps: int) -> dict[Setting, Times]:
    """The times of a run at each setting that its steering tries; the last one is where it settles.

    What it tries is decided by the run's own controller in a simulated run: it settles at the setting that most of the
    last half of the steps have. A plan knows no effective sample sizes: all are 1.
    """
    rl = costs.setup.rl
    first = Setting(rl.orchestrator.max_async_level, rl.weight_broadcast.interval)
    num = max(FEWEST_STEERED, min(STEERED_STEPS, STEERED_ROLLOUTS // rl.orchestrator.batch_size))
    settings = [first]  # by step
    for decision in simulate_steering(costs, workload, steps=num):
        settings += [settings[-1]] * (decision["step"] - len(settings))
        settings.append(Setting(decision["level"], decision["update_interval"]))
    settings += [settings[-1]] * (num - len(settings))
    settled = Counter(settings[num // 2 :]).most_common(1)[0][0]
    tried = [each for each in dict.fromkeys(settings) if each != settled]
    return {each: simulate(at_setting(costs, each), workload, steps=steps) for each in (*tried, settled)}


def at_setting(costs: Costs, setting: Setting) -> Costs:
    """The costs of the run at a fixed max_async_level and weight_broadcast.interval, without steering."""
    rl = costs.setup.rl
    orchestrator = rl.orchestrator.model_copy(update={"steering": None, "max_async_level": setting.level})
    wire = rl.weight_broadcast.model_copy(update={"interval": setting.update_interval})
    cfg = rl.model_copy(update={"orchestrator": orchestrator, "weight_broadcast": wire})
    return replace(costs, setup=replace(costs.setup, cfg=cfg))


def proposal_steps(cfg: RLConfig, steps: int) -> int:
    """How many steps of a proposal are simulated: fewer of large batches, because each proposal takes so long."""
    return max(FEWEST_STEPS, min(steps, MOST_ROLLOUTS // cfg.orchestrator.batch_size))


def propose_sft(costs: Costs, examples: Numbers, now: SftTimes, reload: Reload) -> list[Proposal]:
    """The changes to a run of `sft` that help, the best first; if it does not fit, those with which it does."""
    fits_now, found = fits(costs.setup), []
    for words, setup in alternatives(costs.setup, _meshes(costs.setup), reload):
        times = sft_times(replace(costs, setup=setup), examples)
        # Longer rows cut fewer examples: what counts is the time of a token.
        gain = 1 - now.tokens_per_s / times.tokens_per_s
        if gain >= LEAST_GAIN or not fits_now:
            found.append(Proposal(words, times.step_s, None, gain, _peak(setup)))
    return sorted(found, key=lambda proposal: -proposal.gain)


def alternatives(setup: Setup, candidates: Iterable[Words], reload: Reload) -> Iterator[tuple[Words, Setup]]:
    """The candidates with which the config loads and fits."""
    for words in candidates:
        level = logging.root.manager.disable
        logging.disable(logging.WARNING)  # no warnings about configs that are only tried
        try:
            other = with_config(setup, reload(words))
        except StrettoError:
            continue  # a degree that does not divide, or a split without engines
        finally:
            logging.disable(level)
        if fits(other):
            yield words, other


def fits(setup: Setup) -> bool:
    """Whether every process of a run fits into its device's memory."""
    return all(memory.fits for memory in all_memory(setup))


def _peak(setup: Setup) -> float:
    return trainer_memory(setup, setup.row_tokens).peak.total


def _words(**values: object) -> Words:
    """Flags of keys, whose dots are written as two underscores."""
    found: list[str] = []
    for key, value in values.items():
        found += [f"--{key.replace('__', '.').replace('_', '-')}", str(value)]
    return tuple(found)


def _candidates(setup: Setup, now: Times, settled: Setting | None) -> Iterator[Words]:
    """Changes that might help, depending on who waits for whom."""
    cfg = setup.rl
    level = cfg.orchestrator.max_async_level
    for other in (1, 2, 4, 8, 16) if settled is None else ():
        if level < other <= max(cfg.orchestrator.max_off_policy_steps, 1) and now.trainer_idle > 0.05:
            yield _words(orchestrator__max_async_level=other)
    is_slow = settled is None and now.publish_s + now.load_s > SLOW_UPDATE * now.step_s
    if is_slow and cfg.weight_broadcast.interval == 1 and 1 <= level < cfg.orchestrator.max_off_policy_steps:
        yield _words(weight_broadcast__interval=2, orchestrator__max_async_level=level + 1)
    if level and now.trainer_idle > 0.1:
        oldest = cfg.orchestrator.max_off_policy_steps
        if cfg.orchestrator.batch_order == "dispatch":
            yield _words(orchestrator__batch_order="finished")
            older = 2 * max(oldest, 2 * level)
            yield _words(orchestrator__batch_order="finished", orchestrator__max_off_policy_steps=older)
        else:  # a batch waits for groups that would be too old for a later one
            for times in (2, 4):
                yield _words(orchestrator__max_off_policy_steps=times * oldest)
    yield from _splits(setup)
    yield from _meshes(setup)


def _splits(setup: Setup) -> Iterator[Words]:
    """Nodes or GPUs moved between trainer and engines, and between prefill and decode engines."""
    cfg, inference = setup.rl, setup.rl.inference
    if inference is None:
        return
    shape, deployment = inference.deployment, cfg.deployment
    if shape.type == "disaggregated":
        num, nodes = shape.num_prefill_replicas, shape.num_prefill_nodes
        for other in (num - 1, num + 1):
            writing = shape.num_decode_nodes + (num - other) * nodes
            if other >= 1 and writing >= 1:
                yield _words(
                    inference__deployment__num_prefill_replicas=other, inference__deployment__num_decode_nodes=writing
                )
    if deployment.type == "multi_node" and shape.type == "multi_node":
        for moved in (-2, -1, 1, 2):
            moved *= shape.nodes_per_engine
            train, serve = deployment.num_train_nodes + moved, shape.num_nodes - moved
            if train >= 1 and serve >= 1:
                yield _words(deployment__num_train_nodes=train, inference__deployment__num_nodes=serve)
    if deployment.type == "single_node" and shape.type == "single_node" and not setup.is_cpu:
        gpus = inference.parallel.num_gpus
        for moved in (-1, 1):
            train, serve = setup.num_ranks - moved * gpus, shape.num_replicas + moved
            if train >= 1 and serve >= 1:
                yield _words(deployment__num_train_gpus=train, inference__deployment__num_replicas=serve)


def _meshes(setup: Setup) -> Iterator[Words]:
    """Other degrees for the same ranks, other lengths of rows, other activations."""
    model, degrees = setup.model, setup.degrees
    if setup.num_ranks > 1:
        for cp in (model.cp // 2, model.cp * 2):
            if cp >= 1:
                yield _words(model__cp=cp)
        for tp in (model.tp // 2, model.tp * 2):
            if tp >= 1:
                yield _words(model__tp=tp)
        if degrees.tp > 1 and not degrees.splits_tokens:
            yield _words(model__sequence_parallel=True)
        if degrees.dp_shard % 2 == 0:
            yield _words(model__dp_replicate=2 * degrees.dp_replicate)
        if setup.size.experts:
            for ep in (degrees.ep // 2, degrees.ep * 2):
                if ep >= 1:
                    yield _words(model__ep=ep)
    # The micro batch is a row.
    longer = 2 * setup.row_tokens
    yield (_words(orchestrator__row_tokens=longer) if isinstance(setup.cfg, RLConfig) else _words(seq_len=longer))
    if model.ac is not None and model.ac_offloading is None:
        yield ("--no-model.ac",)
    elif model.ac is None and not fits(setup):
        yield _words(model__ac__mode="full")
    if not fits(setup) and setup.cfg.seq_len >= 512:
        yield _words(seq_len=setup.cfg.seq_len // 2)
