import random
import re
import tomllib
from pathlib import Path
from statistics import mean

import pytest
from fakes import FakeEngine, FakeTrainer
from orchestrator_runs import ECHO, by_number, config, train
from processes.add_ons import needs

from stretto.base.errors import ConfigError
from stretto.config.root import OrchestratorConfig
from stretto.config.sections.sft import OnlineEvalSection
from stretto.ledger.audit import audit
from stretto.ledger.reader import LedgerReader


def test_rejected_groups_are_replaced_and_the_ledger_says_by_what(tmp_path):
    gates = {"hard": {"type": "reward_range"}, "easy": {"type": "reward_range", "reject_min": 1.0, "reject_max": 1.0}}
    env = [{"id": ECHO, "name": "echo", "args": {"num_tasks": 13}, "curriculum": {"gates": gates}}]
    cfg = config(tmp_path, env=env, filter_zero_advantages=False)
    trainer = FakeTrainer(max_steps=5)
    train(cfg, FakeEngine(by_number), trainer)
    with LedgerReader(cfg.run_dir) as ledger:
        rows = ledger.rows("SELECT group_id, reason FROM draws WHERE state = 'dropped' AND reason LIKE 'gate%'")
        assert {row["reason"] for row in rows} == {"gate hard", "gate easy"}
        for step in range(1, 6):
            groups = {}
            for row in ledger.trained_rollouts(step):
                groups.setdefault(row["group_id"], []).append(row["reward"])
            assert len(groups) == 2 and all(0 < mean(rewards) < 1 for rewards in groups.values())
    assert audit(cfg.run_dir) == []


def test_a_gate_that_admits_nothing_stops_the_run_and_says_which(tmp_path):
    gate = {"gates": {"hard": {"type": "reward_range", "reject_min": 0.0, "reject_max": 1.0}}}
    cfg = config(tmp_path, env=[{"id": ECHO, "name": "echo", "curriculum": gate}], max_rejected_batches=3)
    with pytest.raises(ConfigError, match=r"6 groups were rejected.*echo, by gate hard"):
        train(cfg, FakeEngine(lambda *_: "x"), FakeTrainer(max_steps=5))


def test_an_enforced_filter_leaves_rollouts_out_of_batches(tmp_path):
    cfg = config(tmp_path, filters=[{"type": "zero_advantage"}, {"type": "repetition", "window": 2}])

    def answer(prompt, rng, version):
        word = prompt.rsplit("U", 1)[-1].removesuffix(".A")
        return word if rng.random() < 0.5 else "no"

    trainer = FakeTrainer(max_steps=5)
    loop = train(cfg, FakeEngine(answer), trainer)
    assert loop.progress.step == 5 and audit(cfg.run_dir) == []
    for step in trainer.batches:
        for micro in step[0].micro_batches:
            assert (micro.advantages[micro.loss_mask] != 0).all()


# -- length --


def length_of(prompt):
    """Heavy-tailed lengths that depend on the task alone."""
    return min(int(random.Random(prompt).lognormvariate(1.0, 1.0)) + 1, 40)


@pytest.mark.parametrize("factor", [None, 6.0])
def test_batches_hold_the_lengths_that_were_drawn_whoever_finishes_first(tmp_path, factor):
    def run_once(order):
        cfg = config(
            tmp_path / order, batch_order=order, oversampling_factor=factor, filter_zero_advantages=False,
            max_steps=12, max_async_level=2, max_off_policy_steps=8,
        )  # fmt: skip
        engine = FakeEngine(
            lambda prompt, rng, version: "y" * length_of(prompt),
            delay=lambda request: 0.3 * length_of("".join(map(chr, request.prompt_ids))) ** 2,
        )
        train(cfg, engine, FakeTrainer(max_steps=12, step_delay=lambda step: 1.0))
        assert audit(cfg.run_dir) == []
        with LedgerReader(cfg.run_dir) as ledger:
            return [
                [(r["group_id"], r["num_sampled_tokens"]) for r in ledger.trained_rollouts(s)] for s in range(1, 13)
            ]

    by_dispatch, by_finish = run_once("dispatch"), run_once("finished")
    # Batch n is draws 2n-2 and 2n-1: nothing that was drawn is missing, so the distributions are equal.
    assert [sorted({g for g, _ in step}) for step in by_dispatch] == [[2 * n, 2 * n + 1] for n in range(12)]
    early = [mean(length for step in run[:3] for _, length in step) for run in (by_dispatch, by_finish)]
    assert early[1] < early[0]


@needs("prime")
def test_environments_have_their_own_sampling_group_size_and_deadline(tmp_path):
    env = [
        {"id": ECHO, "name": "a", "group_size": 2, "sampling": {"max_tokens": 3, "temperature": 0.5}},
        {"id": ECHO, "name": "b", "rollout_timeout_s": 7.0},
    ]
    cfg = config(tmp_path, env=env, filter_zero_advantages=False, max_steps=2)
    requests = []

    def delay(request):
        requests.append((request.n, request.sampling.temperature, request.sampling.max_tokens > 3))
        return 0.0

    loop = train(cfg, FakeEngine(by_word, delay=delay), FakeTrainer(max_steps=2))
    assert set(requests) == {(2, 0.5, False), (4, 1.0, True)}
    assert loop._pipeline._players["a"].timeout_s == 600.0 and loop._pipeline._players["b"].timeout_s == 7.0
    assert audit(cfg.run_dir) == []


def by_word(prompt, rng, version):
    return "word"


def test_the_settings_in_the_document_are_valid_together(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "orchestrator.md").read_text()
    blocks = re.findall(r"```toml\n(.*?)```", page, re.S)
    blocks = [block for block in blocks if not block.startswith(("[ckpt.weights]", "[val]"))]  # other roots' keys
    assert len(blocks) == 8
    # A table's own keys stand before those of the tables in it.
    blocks.sort(key=lambda block: not block.startswith("[orchestrator]"))
    data = tomllib.loads("\n".join(blocks))
    assert OnlineEvalSection.model_validate(data["eval"]).interval == 500
    cfg = OrchestratorConfig.model_validate(data["orchestrator"] | {"output_dir": tmp_path})
    assert cfg.sampling_of("reverse-text").max_completion_tokens == 512
    assert cfg.sampling_of("reverse-text").top_p == cfg.train.sampling.top_p
    assert list(cfg.gates_of("my_envs:Shout")) == ["dynamic", "too_easy"]
    assert [each.enforce for each in cfg.filters] == [True]
    assert cfg.eval.env[0].interval == 10


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"oversampling_factor": 2.0, "max_async_level": 0}, "starts groups early and max_async_level = 0 forbids"),
        ({"oversampling_factor": 16.0, "max_async_level": 1}, "15 steps early and max_off_policy_steps = 8"),
        ({"filters": [{"type": "gibberish"}] * 2}, '"gibberish" is listed twice'),
        ({"client": {"api": "chat"}}, "gives no tokens to train on"),
        (
            {"env": [{"id": ECHO, "curriculum": {"gates": {"a": {"type": "reward_range", "reject_min": 1}}}}]},
            "gates.a.reject_min = 1 is above .* it would reject nothing",
        ),
        (
            {"env": [{"id": ECHO, "curriculum": {"sampler": {"type": "difficulty_pool", "hard_threshold": 0.9}}}]},
            "no task would be normal",
        ),
    ],
)
def test_settings_that_would_do_nothing_or_harm_are_refused(tmp_path, settings, words):
    with pytest.raises(ConfigError, match=words):
        config(tmp_path, **settings)


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        ({"pools": {"a": {"threshold": 0.5}, "b": {"threshold": 0.5}}}, "a and b have the same threshold, 0.5"),
        ({"pools": {"unseen": {"threshold": 0.5}}}, "not `unseen`"),
        ({"pools": {"a b": {"threshold": 0.5}}}, "for it names a metric"),
        ({"pools": {"a": {"threshold": 0.5, "weight": 0.0}}}, "no pool has a weight above 0"),
        ({"pools": {"a": {"threshold": 0.5}}, "easy_weight": 0.5}, "easy_weight = 0.5 does nothing"),
        ({"pools": {"a": {"threshold": 0.5, "weight": -1}}}, "weight"),
        ({"pools": {"a": {"weight": 1}}}, "threshold"),
    ],
)
def test_pools_that_would_be_empty_or_have_no_metric_are_refused(tmp_path, sampler, words):
    env = {"id": ECHO, "curriculum": {"sampler": {"type": "difficulty_pool", **sampler}}}
    with pytest.raises(ConfigError, match=words):
        config(tmp_path, env=[env])
