"""What a plan proposes: each change, typed as it stands there, gives what it promised."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from fakes import FakeEngine, FakeTrainer, parrot
from orchestrator_runs import config, train
from processes.add_ons import needs

from stretto.config.load import load
from stretto.config.root import RLConfig, SFTConfig
from stretto.config.sections.model import ScratchSection
from stretto.ledger.reader import LedgerReader
from stretto.models.config import scratch_config
from stretto_bench.hardware import GPUS
from stretto_plan.costs import Costs, Measured
from stretto_plan.memory import running_sequences, trainer_memory
from stretto_plan.proposals import FEWEST_STEPS, Setting, at_setting, fits, proposal_steps, propose, propose_sft
from stretto_plan.setup import build_setup
from stretto_plan.simulation.run import sft_times, simulate, simulate_steering
from stretto_plan.workload import Numbers, Workload

FREE = Measured(prefill_token_s=0.0, request_s=0.0, rollout_s=0.0, turn_s=0.0, step_s=0.0)
"""The orchestrator takes no time; engines and trainer take what a GPU does."""
STEPS = 12
SHAPE = ScratchSection(
    hidden_size=1024,
    intermediate_size=4096,
    num_layers=8,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    max_position_embeddings=16_384,
)


def words_of(tmp_path, config: dict) -> list[str]:
    """The command line of a config file beside a model's config.json."""
    (tmp_path / "config.json").write_text(json.dumps(scratch_config(SHAPE, 4096).hf))
    file = tmp_path / "run.json"
    file.write_text(json.dumps(config | {"model": {"name": str(tmp_path)} | config.get("model", {})}))
    return ["@", str(file)]


def rl_config(**values) -> dict:
    base = {"env": [{"id": "sort-letters"}], "batch_size": 32, "group_size": 4, "max_async_level": 1}
    orchestrator = base | values.pop("orchestrator", {})
    return {"seq_len": 8192, "orchestrator": orchestrator, **values}


def check_promises(words, costs, workload, *, hardware=None, steps=STEPS):
    """Propose, apply each proposal as typed, and simulate that; the proposals."""
    now = simulate(costs, workload, steps=steps)
    reload = lambda added: load(RLConfig, [*words, *added], verb="rl")
    found = propose(costs, workload, now, reload, steps=steps)
    for proposal in found:
        setup = build_setup(reload(proposal.words), gpu="H100", hardware=hardware)
        times = simulate(replace(costs, setup=setup), workload, steps=steps)
        assert times.step_s == pytest.approx(proposal.step_s, rel=1e-6), proposal.text
        assert 1 - times.step_s / now.step_s == pytest.approx(proposal.gain, abs=1e-6), proposal.text
        assert times.staleness_p95 == proposal.staleness_p95
        assert fits(setup) and trainer_memory(setup, setup.row_tokens).peak.total == proposal.peak_bytes
    assert [p.gain for p in found] == sorted((p.gain for p in found), reverse=True)
    return found


@pytest.mark.heavy
def test_slow_rewards_are_hidden_by_more_asynchrony(tmp_path) -> None:
    words = words_of(tmp_path, rl_config(orchestrator={"max_async_level": 0}))
    costs = Costs(build_setup(load(RLConfig, words, verb="rl"), gpu="H100"), measured=FREE)
    workload = Workload(Numbers(200), Numbers(500), score_s=Numbers(3.0, 0.5))
    found = check_promises(words, costs, workload, steps=FEWEST_STEPS)
    assert found[0].words[0] == "--orchestrator.max-async-level" and found[0].gain > 0.5


@pytest.mark.heavy
def test_proposals_to_a_steered_run_are_compared_where_steering_settles(tmp_path) -> None:
    """Steering chooses the level itself, and a longer row gains what it gains at that level, not at the first one."""
    given = {"max_async_level": 1, "steering": {"max_level": 4}}
    words = words_of(tmp_path, rl_config(orchestrator=given))
    # Rewards take three steps of the trainer: it waits for them at the first level alone.
    measured = replace(FREE, train=((1.0, 1.0), (2.0, 1.0)), decode=((1.0, 1e-5), (2.0, 1e-5)))
    workload = Workload(Numbers(200), Numbers(500), score_s=Numbers(9.0, 0.0))
    costs = Costs(build_setup(load(RLConfig, words, verb="rl"), gpu="H100"), measured=measured)
    settled, there = Setting(4, 1), at_setting(costs, Setting(4, 1))
    now = simulate(there, workload, steps=FEWEST_STEPS)
    assert now.trainer_idle < 0.05
    tried = []
    reload = lambda added: tried.append([*added]) or load(RLConfig, [*words, *added], verb="rl")
    found = propose(there, workload, replace(now, trainer_idle=0.5), reload, steps=FEWEST_STEPS, settled=settled)
    assert tried and not any("--orchestrator.max-async-level" in words for words in tried)
    for proposal in found:
        setup = build_setup(load(RLConfig, [*words, *proposal.words], verb="rl"), gpu="H100")
        times = simulate(at_setting(replace(costs, setup=setup), settled), workload, steps=FEWEST_STEPS)
        assert times.step_s == pytest.approx(proposal.step_s, rel=1e-6), proposal.text
    assert "--orchestrator.row-tokens 16384" in [proposal.text for proposal in found]


def test_a_steered_run_has_memory_for_the_highest_level(tmp_path) -> None:
    def sequences(**given) -> int:
        words = words_of(tmp_path, rl_config(orchestrator={"max_async_level": 1, **given}))
        setup = build_setup(load(RLConfig, words, verb="rl"), gpu="H100")
        return running_sequences(setup, setup.engines[0])

    assert sequences(steering={"max_level": 4}) == sequences(max_async_level=4) > sequences()


@pytest.mark.heavy
def test_a_plan_tries_the_levels_that_a_run_tries(tmp_path) -> None:
    """A run with engines, trainer and waits of its own, against the simulated ends of a plan with the same times."""
    shape = {"batch_size": 32, "group_size": 4, "max_async_level": 1}
    given = shape | {"steering": {"max_level": 8}}
    words = words_of(tmp_path, rl_config(orchestrator=given))
    measured = replace(FREE, train=((1.0, 4.0), (2.0, 4.0)), decode=((1.0, 1e-6), (2.0, 1e-6)), update_s=0.0)
    costs = Costs(build_setup(load(RLConfig, words, verb="rl"), gpu="H100"), measured=measured)
    for wait_s, sigma, levels in ((100.0, 0.3, [4]), (17.0, 0.0, [3]), (1.0, 0.5, [])):
        workload = Workload(Numbers(200), Numbers(50), score_s=Numbers(wait_s, sigma))
        delays = random.Random(1)
        engine = FakeEngine(parrot(0.5), delay=lambda _, draw=workload.score_s.draw, rng=delays: draw(rng))
        trainer = FakeTrainer(max_steps=6, step_delay=lambda _: 4.0)
        cfg = config(tmp_path / str(wait_s), max_steps=6, filter_zero_advantages=False, **given)
        with LedgerReader(train(cfg, engine, trainer).parts.run_dir) as reader:
            played = [event["data"] for event in reader.events("steering")]
        planned = simulate_steering(costs, workload, steps=1)
        changes = [[(each["step"], each["level"]) for each in rows[:1]] for rows in (planned, played)]
        assert changes[0] == changes[1] == [(2, level) for level in levels]


@pytest.mark.heavy
def test_slow_updates_are_made_less_often(tmp_path) -> None:
    words = words_of(tmp_path, rl_config())
    slow = replace(FREE, train=((1.0, 0.1), (2.0, 0.1)), decode=((1.0, 1e-5), (2.0, 1e-5)), publish_s=2.0)
    costs = Costs(build_setup(load(RLConfig, words, verb="rl"), gpu="H100"), measured=slow)
    found = check_promises(words, costs, Workload(Numbers(200), Numbers(500)), steps=FEWEST_STEPS)
    rarely = ("--weight-broadcast.interval", "2", "--orchestrator.max-async-level", "2")
    [proposal] = [each for each in found if each.words == rarely]
    assert proposal.gain > 0.4


@pytest.mark.slow
def test_batches_of_whoever_is_done_that_wait_for_old_groups_get_an_older_bound(tmp_path) -> None:
    done = {"batch_order": "finished", "max_async_level": 4, "max_off_policy_steps": 5}
    words = words_of(tmp_path, rl_config(orchestrator=done))
    costs = Costs(
        build_setup(load(RLConfig, words, verb="rl"), gpu="H100"),
        measured=replace(FREE, train=((1.0, 1.0), (2.0, 1.0)), decode=((1.0, 1e-5), (2.0, 1e-5))),
    )
    found = check_promises(words, costs, Workload(Numbers(200), Numbers(500), score_s=Numbers(3.0, 1.0)), steps=40)
    gains = {each.words: each.gain for each in found}
    assert gains[("--orchestrator.max-off-policy-steps", "20")] > 0.25


@pytest.mark.slow
def test_nodes_go_where_the_time_is_spent(tmp_path) -> None:
    nodes = {
        "deployment": {"type": "multi_node", "num_train_nodes": 1, "gpus_per_node": 8},
        "inference": {"engine": "vllm", "deployment": {"type": "multi_node", "num_nodes": 3}, "parallel": {"dp": 8}},
    }
    words = words_of(tmp_path, rl_config(orchestrator={"batch_size": 144}, **nodes))
    setup = build_setup(load(RLConfig, words, verb="rl"), gpu="H100")
    # Only the trainer's time counts: six rollouts are a row of a second, and engines write at once.
    slow = replace(FREE, train=((1.0, 1.0), (2.0, 1.0)), decode=((1.0, 1e-5), (2.0, 1e-5)), load_s=0.0)
    costs, workload = Costs(setup, measured=slow), Workload(Numbers(200), Numbers(1000))
    found = check_promises(words, costs, workload, steps=FEWEST_STEPS)
    best = found[0].words
    assert best[:2] == ("--deployment.num-train-nodes", "3") and best[-1] == "1" and found[0].gain > 0.5


@pytest.mark.heavy
def test_what_does_not_fit_gets_proposals_that_do(tmp_path) -> None:
    words = words_of(tmp_path, rl_config())
    cfg = load(RLConfig, words, verb="rl")
    empty = replace(GPUS["H100"], reserved_bytes=0.0)
    whole = trainer_memory(build_setup(cfg, hardware=empty), cfg.seq_len).peak.total
    small = replace(empty, memory_bytes=0.8 * whole)
    setup = build_setup(cfg, hardware=small)
    assert not fits(setup)
    found = check_promises(words, Costs(setup, measured=FREE), Workload(Numbers(200), Numbers(500)), hardware=small)
    assert ("--model.ac.mode", "full") in [proposal.words for proposal in found]


def test_large_batches_are_simulated_for_fewer_steps(tmp_path) -> None:
    words = words_of(tmp_path, rl_config())
    cfg = load(RLConfig, words, verb="rl")
    assert proposal_steps(cfg, 40) == 40 and proposal_steps(cfg, 12) == 12
    large = load(RLConfig, [*words, "--orchestrator.batch-size", "4096"], verb="rl")
    assert proposal_steps(large, 40) == 6


@pytest.mark.heavy
@needs("sft")
def test_proposals_for_sft_keep_their_promise(tmp_path) -> None:
    config = {"data": {"type": "environment", "id": "sort-letters"}, "seq_len": 4096, "max_steps": 9}
    config |= {"model": {"ac": {}}, "deployment": {"num_train_gpus": 8}}
    words = words_of(tmp_path, config)
    reload = lambda added: load(SFTConfig, [*words, *added], verb="sft")
    costs = Costs(build_setup(reload(()), gpu="H100"))
    examples = Numbers(1000, 0.5)
    now = sft_times(costs, examples)
    found = propose_sft(costs, examples, now, reload)
    assert ("--no-model.ac",) in [proposal.words for proposal in found]
    for proposal in found:
        times = sft_times(replace(costs, setup=build_setup(reload(proposal.words), gpu="H100")), examples)
        assert times.step_s == pytest.approx(proposal.step_s)
        assert 1 - now.tokens_per_s / times.tokens_per_s == pytest.approx(proposal.gain)
