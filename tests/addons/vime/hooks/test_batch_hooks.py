"""Hooks about groups and batches, in runs of the real orchestrator."""

from __future__ import annotations

import asyncio
import json
import re
import textwrap

import numpy as np
import pytest
from fakes import FakeEngine, FakeTrainer, parrot
from orchestrator_runs import config, train
from processes.add_ons import needs

from stretto.base.errors import ConfigError, StrettoError
from stretto.config.load import build
from stretto.config.root import OrchestratorConfig
from stretto.config.sections.hooks import HooksSection
from stretto.config.sections.orchestrator import SamplingSection
from stretto.ledger.audit import audit
from stretto.ledger.reader import LedgerReader
from stretto.monitors.file import read_metrics
from stretto.orchestrator.groups.buffer import Slot
from stretto.records.rollout import RolloutStatus, Task
from stretto.vime import Arguments
from stretto.vime.calls import Hook
from stretto_vime.hooks.rollouts import UserRolloutFunction
from stretto_vime.hooks.source import DataSource


@pytest.fixture
def hooks(tmp_path, monkeypatch):
    """Writes a module of hooks and gives the settings that name its functions."""
    numbers = iter(range(9))

    def write(code, **args):
        name = f"batch_{tmp_path.name}_{next(numbers)}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
        monkeypatch.syspath_prepend(str(tmp_path))
        functions = re.findall(r"def (\w+)\(", code)
        return {each: f"{name}:{each}" for each in functions} | ({"args": args} if args else {})

    return write


def run(path, hooks, *, skill=0.5, max_steps=3, **settings):
    """The orchestrator's run with these hooks: its config and what the trainer got."""
    cfg = config(path, hooks=hooks, max_steps=max_steps, **settings)
    trainer = FakeTrainer(max_steps=max_steps)
    train(cfg, FakeEngine(parrot(skill)), trainer)
    return cfg, trainer


def error_of(path, hooks, **settings):
    """What a run ends with."""
    with pytest.raises((StrettoError, ExceptionGroup)) as caught:
        run(path, hooks, **settings)
    errors = [caught.value]
    while isinstance(errors[0], ExceptionGroup):
        errors = [inner for error in errors for inner in getattr(error, "exceptions", [error])]
    assert all(isinstance(error, StrettoError) for error in errors), errors
    return "\n".join(map(str, errors))


def samples(trainer):
    """Every trained document: id, advantages of its trained tokens, tokens."""
    found = []
    for step in trainer.batches:
        for mb in (mb for batch in step for mb in batch.micro_batches):
            for i, name in enumerate(mb.sample_ids):
                place = slice(mb.cu_seqlens[i], mb.cu_seqlens[i + 1])
                mask = mb.loss_mask[place]
                found.append((name, mb.advantages[place][mask], mb.token_ids[place], mask))
    return found


def test_a_dynamic_sampling_filter_replaces_groups_and_the_reason_is_kept(tmp_path, hooks):
    named = hooks("""
        from stretto.vime import DynamicFilterOutput

        def dynamic_sampling_filter(args, samples, **kwargs):
            assert len(samples) == args.n_samples_per_prompt == 4
            rewards = [sample.get_reward_value(args) for sample in samples]
            return DynamicFilterOutput(keep=sum(rewards) == 2, reason="not half")
    """)
    cfg, trainer = run(tmp_path, named, filter_zero_advantages=False)
    assert len(samples(trainer)) == 3 * 8
    for _, advantages, *_ in samples(trainer):
        assert set(np.abs(advantages).tolist()) == {0.5}
    assert audit(cfg.run_dir) == []
    rows = read_metrics(cfg.run_dir.metrics("orchestrator"))
    assert sum(row.get("groups/rejected", 0) for row in rows) > 0


def test_a_filter_may_say_no_with_a_bool_and_one_that_raises_fails_groups_by_name(tmp_path, hooks):
    _, trainer = run(tmp_path / "a", hooks("def dynamic_sampling_filter(args, samples):\n    return True\n"))
    assert len(trainer.batches) == 3
    broken = hooks("def dynamic_sampling_filter(args, samples):\n    return samples[0].nothing\n")
    message = error_of(tmp_path / "b", broken, max_failed_groups=3)
    assert ".py:2: AttributeError" in message and "groups in a row failed" in message


def test_marked_samples_are_not_trained_and_count_in_their_group(tmp_path, hooks):
    named = hooks("""
        def sample_filter(args, groups):
            for group in groups:
                for sample in group:
                    sample.remove_sample = sample.reward == 0
    """)
    _, trainer = run(tmp_path, named)
    for _, advantages, *_ in samples(trainer):
        assert 0 < advantages.min() < 1


def test_post_processed_rewards_are_the_advantages(tmp_path, hooks):
    named = hooks(
        """
        async def reward_post_process(args, samples):
            raw = [sample.get_reward_value(args) for sample in samples]
            return raw, [args.scale * (reward - 0.5) for reward in raw]
        """,
        scale=10,
    )
    _, trainer = run(tmp_path, named)
    assert {float(a) for _, advantages, *_ in samples(trainer) for a in advantages} == {-5.0, 5.0}


def test_a_conversion_says_what_is_trained(tmp_path, hooks):
    named = hooks("""
        def convert_samples_to_train_data(args, samples):
            return {
                "tokens": [sample.tokens[:-1] for sample in samples],
                "response_lengths": [sample.response_length - 1 for sample in samples],
                "loss_masks": [[0] + sample.loss_mask[1:-1] for sample in samples],
                "rollout_log_probs": [sample.rollout_log_probs[:-1] for sample in samples],
                "rewards": [7.0 for sample in samples],
                "raw_reward": [sample.get_reward_value(args) for sample in samples],
                "truncated": [int(sample.status == sample.Status.TRUNCATED) for sample in samples],
                "sample_indices": [sample.index for sample in samples],
            }
    """)
    _, trainer = run(tmp_path, named)
    for _, advantages, tokens, mask in samples(trainer):
        text = "".join(map(chr, tokens))
        assert not text.endswith(".") and ".A" in text
        assert mask.sum() == len(text.split(".A")[1]) - 1
        assert set(advantages.tolist()) == {7.0}


def test_a_buffer_filter_chooses_the_groups_of_a_batch(tmp_path, hooks):
    named = hooks("""
        def buffer_filter(args, rollout_id, buffer, num_samples):
            assert num_samples == args.rollout_batch_size == 2
            return sorted(buffer, key=lambda group: -group[0].group_index)[:num_samples]
    """)
    cfg, trainer = run(tmp_path, named, oversampling_factor=6.0, max_async_level=2)
    assert len(trainer.batches) == 3 and audit(cfg.run_dir) == []
    groups = [{int(name[1:].split(".")[0]) for name, *_ in samples_of(step)} for step in trainer.batches]
    assert all(len(each) == 2 for each in groups) and len(set().union(*groups)) == 6
    _, by_draw = run(tmp_path / "plain", {}, oversampling_factor=6.0, max_async_level=2)
    first = {int(name[1:].split(".")[0]) for name, *_ in samples_of(by_draw.batches[0])}
    assert groups[0] != first


def samples_of(step):
    for mb in (mb for batch in step for mb in batch.micro_batches):
        for i, name in enumerate(mb.sample_ids):
            yield name, mb.token_ids[mb.cu_seqlens[i] : mb.cu_seqlens[i + 1]]


ROLLOUT = """
    from stretto.vime import RolloutFnEvalOutput, RolloutFnTrainOutput

    def fill(args, sample, right):
        prompt, reply = [ord(c) for c in f"Q{sample.group_index}"], [ord(c) for c in "ok."]
        sample.tokens, sample.response_length = prompt + reply, len(reply)
        sample.rollout_log_probs, sample.loss_mask = [-0.5] * 3, [1, 0, 1]
        sample.reward, sample.status = float(right), sample.Status.COMPLETED

    async def rollout_function(args, rollout_id, data_source, evaluation=False):
        assert not evaluation
        groups = data_source.get_samples(args.rollout_batch_size + 1)
        for group in groups:
            for i, sample in enumerate(group):
                fill(args, sample, i % 2)
        data_source.add_samples(groups[-1:] if rollout_id == 0 else [])
        return RolloutFnTrainOutput(samples=groups[:-1], metrics={"id": rollout_id})

    async def eval_function(args, rollout_id, data_source, evaluation=False):
        assert evaluation
        samples = [group[0] for group in data_source.get_samples(4)]
        for i, sample in enumerate(samples):
            fill(args, sample, i == 0)
        return RolloutFnEvalOutput(data={"mine": {"rewards": [s.reward for s in samples], "samples": samples}})
"""


def test_a_rollout_function_makes_whole_batches_and_an_eval_function_whole_evals(tmp_path, hooks):
    named = {key: path for key, path in hooks(ROLLOUT).items() if key != "fill"}
    cfg, trainer = run(tmp_path, named, eval={"num_examples": 4, "interval": 2, "greedy": False})
    assert len(trainer.batches) == 3
    for _, advantages, tokens, mask in samples(trainer):
        assert "".join(map(chr, tokens)).endswith("ok.") and mask.tolist()[-3:] == [True, False, True]
        assert set(np.abs(advantages).tolist()) == {0.5}
    rows = read_metrics(cfg.run_dir.metrics("orchestrator"))
    numbers = [row["rollout/id"] for row in rows if "rollout/id" in row]  # of the latest call
    assert len(numbers) == 3 and numbers == sorted(numbers) and numbers[-1] == 2
    assert {row["eval/mine/sampled/mean"] for row in rows if "eval/mine/sampled/mean" in row} == {0.25}
    assert audit(cfg.run_dir) == []


def test_a_function_that_knows_no_logprobs_has_those_of_the_trainer(tmp_path, hooks):
    code = ROLLOUT.replace(
        "sample.rollout_log_probs, sample.loss_mask = [-0.5] * 3, [1, 0, 1]", "sample.loss_mask = [1, 0, 1]"
    )
    named = {k: v for k, v in hooks(code).items() if k == "rollout_function"}
    cfg, trainer = run(tmp_path, named)
    batches = [mb for step in trainer.batches for batch in step for mb in batch.micro_batches]
    assert all(np.isnan(mb.logprobs[mb.loss_mask]).all() for mb in batches)
    assert all((mb.logprobs[~mb.loss_mask] == 0).all() for mb in batches) and audit(cfg.run_dir) == []


@needs("prime")
def test_functions_see_all_groups_log_a_batch_and_samples_are_saved(tmp_path, hooks):
    named = hooks("""
        seen = []

        def dynamic_sampling_filter(args, samples):
            return samples[0].group_index % 2 == 0

        def all_samples_process(args, groups, data_source):
            assert data_source is None
            seen.append([group[0].group_index for group in groups])

        def rollout_log(rollout_id, args, samples, extra_metrics, rollout_time):
            assert rollout_time > 0 and args.eps_clip is not None and args.rollout_batch_size == 2
            extra_metrics["seen"] = sum(map(len, seen))
            return rollout_id == 2
    """)
    path = str(tmp_path / "saved" / "{rollout_id}.json")
    cfg, trainer = run(tmp_path, named | {"save_samples": path})
    rows = [row for row in read_metrics(cfg.run_dir.metrics("orchestrator")) if "rollout/seen" in row]
    assert len(rows) == 3 and rows[0]["rollout/seen"] > 2
    assert ["reward/mean" in row for row in rows] == [True, True, False]
    saved = [json.loads((tmp_path / "saved" / f"{n}.json").read_text()) for n in range(3)]
    assert all(len(each["samples"]) == 8 for each in saved) and len(trainer.batches) == 3


def test_a_function_logs_evals_beside_their_own_metrics_or_instead(tmp_path, hooks):
    named = hooks("""
        def eval_log(rollout_id, args, data, extra_metrics):
            (name, greedy) = data
            assert greedy == name + "/greedy" and args.rollout_batch_size == 2
            own = data[name]
            assert len(own["rewards"]) == len(own["truncated"]) == len(own["samples"]) > 0
            assert own["samples"][0].response and own["samples"][0].reward == own["rewards"][0]
            extra_metrics["best"] = max(own["rewards"])
            return rollout_id == 0
    """)
    cfg, _ = run(tmp_path, named, eval={"num_examples": 4, "group_size": 2})
    rows = [row for row in read_metrics(cfg.run_dir.metrics("orchestrator")) if "eval/best" in row]
    assert len(rows) == 2 and all(0 <= row["eval/best"] <= 1 for row in rows)
    assert [any(name.endswith("sampled/mean") for name in row) for row in rows] == [False, True]


OWN = """
    from stretto.vime import RolloutFnTrainOutput, Sample

    def filled(reward, word):
        tokens = [ord(c) for c in "Q" + word]
        return Sample(prompt="mine", tokens=tokens, response_length=len(word), reward=reward,
                      status=Sample.Status.COMPLETED)

    def rollout_function(args, rollout_id, data_source, evaluation=False):
        group = [[filled(1.0, "a."), filled(0.0, "bb.")], filled(0.5, "ccc."), [filled(0.5, "d.")]]
        return RolloutFnTrainOutput(samples=[group for _ in range(args.rollout_batch_size)])
"""


def test_own_samples_and_members_with_several_are_trained_each_by_its_own_reward(tmp_path, hooks):
    named = {k: v for k, v in hooks(OWN).items() if k == "rollout_function"}
    cfg, trainer = run(tmp_path, named)
    assert len(trainer.batches) == 3 and audit(cfg.run_dir) == []
    by_word = {}
    for name, advantages, tokens, mask in samples(trainer):
        by_word.setdefault("".join(map(chr, tokens)), set()).add((name.split(".")[1], *advantages.tolist()))
        assert mask.sum() == len(advantages)
    zero = {word: each for word, each in by_word.items() if word in ("Qccc.", "Qd.")}
    assert by_word["Qa."] == {("0/0", 0.5, 0.5)} and by_word["Qbb."] == {("0/1", -0.5, -0.5, -0.5)}
    assert zero == {"Qccc.": {("1/0", *[0.0] * 4)}, "Qd.": {("2/0", 0.0, 0.0)}}


RECORDED = """
    from stretto.vime import RecordedBatch, Sample

    def filled(word, reward):
        return Sample(prompt="mine", tokens=[ord(c) for c in "Q" + word], response_length=len(word), reward=reward,
                      rollout_log_probs=[-0.5] * len(word), status=Sample.Status.COMPLETED)

    def rollout_function(args, rollout_id, data_source, evaluation=False):
        words = ["no.", *["a."] * (rollout_id + 1)]
        return RecordedBatch(samples=[[filled(word, 1.0), filled(word, 0.0)] for word in words])

    def dynamic_sampling_filter(args, samples):
        return not samples[0].response.startswith("no") and KEEPS
"""


def test_a_recorded_batch_is_that_of_its_step_without_what_filters_reject(tmp_path, hooks):
    named = {k: v for k, v in hooks(RECORDED.replace("KEEPS", "True")).items() if k != "filled"}
    cfg, trainer = run(tmp_path, named)
    sizes = [sum(len(mb.sample_ids) for batch in step for mb in batch.micro_batches) for step in trainer.batches]
    assert sizes == [2, 4, 6] and audit(cfg.run_dir) == []


def test_filters_that_reject_a_whole_recorded_batch_are_named(tmp_path, hooks):
    named = {k: v for k, v in hooks(RECORDED.replace("KEEPS", "False")).items() if k != "filled"}
    assert "reject all 2 groups that were recorded for step 1" in error_of(tmp_path, named)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 5", "returned int; return RolloutFnTrainOutput"),
        ("return []", "returned no group 2 times in a row (max_failed_groups)"),
        ("data_source.get_samples(1); return []", "returned no group 2 times in a row (max_failed_groups)"),
        ("return [[]]", "a group must be a list of samples"),
        ("a, b = data_source.get_samples(2); return [[a[0], b[0]]]", "has samples of the groups ['0', '1']"),
        ("groups = data_source.get_samples(1); return groups", "the reward is None, not a finite number"),
        ("data_source.get_samples(1); raise ValueError('x')", ".py:2: ValueError: x"),
        ("data_source.add_samples(data_source.get_samples(1)[0]); return []", "add_samples takes a list of groups"),
        (
            "from stretto.vime import RolloutFnTrainOutput as R; return R(data_source.get_samples(1), {'a': 'b'})",
            "the metric a is 'b', not a finite number",
        ),
        (
            "from stretto.vime import RolloutFnTrainOutput as R; return R(data_source.get_samples(1), 5)",
            "metrics are int, not a dictionary",
        ),
    ],
)
def test_a_rollout_function_that_returns_nonsense_is_named(tmp_path, hooks, body, message):
    code = f"async def rollout_function(args, rollout_id, data_source, evaluation=False):\n    {body}\n"
    text = error_of(tmp_path, hooks(code), max_failed_groups=2)
    assert message in text
    assert re.search(r"\.py:[12]\b", text), f"no file and line of the function: {text}"


@pytest.mark.parametrize(
    "bad",
    [
        "sample.rollout_log_probs = [-0.5, 0.0, float('nan')]",
        "sample.reward = None",
        "sample.reward = float('nan')",
        "sample.tokens = 5",
    ],
)
def test_a_sample_that_cannot_be_trained_costs_itself_and_not_its_group(tmp_path, hooks, caplog, bad):
    set_status = "sample.status = float(right), sample.Status.COMPLETED"
    code = ROLLOUT.replace(set_status, f"{set_status}\n        if sample.index % 4 == 3: {bad}")
    named = {k: v for k, v in hooks(code).items() if k == "rollout_function"}
    cfg, trainer = run(tmp_path, named)
    assert len(trainer.batches) == 3 and audit(cfg.run_dir) == []
    assert {name.split(".")[1] for name, *_ in samples(trainer)} == {"0/0", "1/0", "2/0"}
    assert "2 of 8 samples cannot be trained, such as sample 3 of group 0: " in caplog.text


def test_samples_that_failed_need_no_reward(tmp_path, hooks, caplog):
    aborted = "if i == 1: sample.status, sample.reward, sample.tokens = sample.Status.ABORTED, None, []"
    fill = "fill(args, sample, i % 2)"
    code = ROLLOUT.replace(fill, f"{fill}\n                {aborted}")
    named = {k: v for k, v in hooks(code).items() if k == "rollout_function"}
    _, trainer = run(tmp_path, named)
    assert {name.split(".")[1] for name, *_ in samples(trainer)} == {"0/0", "2/0", "3/0"}
    assert "cannot be trained" not in caplog.text


def test_a_group_that_is_not_as_it_was_fails_every_group_of_its_call(tmp_path, hooks):
    code = ROLLOUT.replace("samples=groups[:-1]", "samples=[groups[0], groups[0]]")
    named = {k: v for k, v in hooks(code).items() if k == "rollout_function"}
    message = error_of(tmp_path, named, max_failed_groups=7)
    assert "7 groups in a row failed" in message and "return each group of the data source once" in message


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def reward_post_process(args, samples):\n    return 3\n", "return raw rewards and rewards"),
        ("def reward_post_process(args, samples):\n    return [], [1.0]\n", "1 rewards for"),
        ("def convert_samples_to_train_data(args, samples):\n    return [1]\n", "return a dictionary of lists"),
        ("def convert_samples_to_train_data(args, samples):\n    return {'tokns': []}\n", "the dictionary has tokns"),
        ("def convert_samples_to_train_data(args, samples):\n    return {'rewards': [1.0]}\n", "rewards has 1 entries"),
        (
            "def convert_samples_to_train_data(args, samples):\n    return {'loss_masks': [[1] for s in samples]}\n",
            "loss_mask has 1 entries for a response of",
        ),
        (
            "def sample_filter(args, groups):\n    for g in groups:\n        for s in g: s.remove_sample = True\n",
            "removed every sample",
        ),
        ("def buffer_filter(args, rollout_id, buffer, num_samples):\n    return buffer[:1]\n", "returned 1 groups"),
        ("def convert_samples_to_train_data(args, samples):\n    return {'tokens': 5}\n", "tokens is int, not a list"),
        (
            "def convert_samples_to_train_data(args, samples):\n    return {'tokens': [None for s in samples]}\n",
            ".0/0: its entries: TypeError: ",
        ),
        (
            "def convert_samples_to_train_data(args, samples):\n    return {'rewards': ['x' for s in samples]}\n",
            ".0/0: its reward is 'x', not a finite number",
        ),
        (
            "def convert_samples_to_train_data(args, samples):\n"
            "    return {'rewards': [float('nan') for s in samples]}\n",
            ".0/0: its reward is nan, not a finite number",
        ),
        (
            "def convert_samples_to_train_data(args, samples):\n"
            "    return {'rollout_log_probs': [[float('inf')] * s.response_length for s in samples]}\n",
            ".0/0: rollout_log_probs has inf",
        ),
        ("def sample_filter(args, groups):\n    1 / 0\n", ".py:2: ZeroDivisionError: division by zero"),
    ],
)
def test_a_batch_hook_that_always_gives_nonsense_ends_the_run_with_its_name(tmp_path, hooks, code, message):
    error = error_of(tmp_path, hooks(code), max_failed_groups=4)
    assert message in error and "4 groups in a row were lost to a hook (max_failed_groups)" in error


@pytest.mark.parametrize("name", ["buffer_filter", "reward_post_process"])
def test_a_batch_hook_that_raises_costs_its_groups_and_not_the_run(tmp_path, hooks, caplog, name):
    named = hooks("""
        calls = iter(range(99))

        def buffer_filter(args, rollout_id, buffer, num_samples):
            if next(calls) == 1:
                raise ValueError("a bad day")
            return buffer[:num_samples]

        def reward_post_process(args, samples):
            if next(calls) == 1:
                raise ValueError("a bad day")
            raw = [sample.get_reward_value(args) for sample in samples]
            return raw, raw
    """)
    cfg, trainer = run(tmp_path, {name: named[name]})
    assert len(trainer.batches) == 3 and audit(cfg.run_dir) == []
    assert ".py:6: ValueError: a bad day" in caplog.text or ".py:11: ValueError: a bad day" in caplog.text
    with LedgerReader(cfg.run_dir) as ledger:
        assert ledger.drops_by_reason()["a hook failed"] == 2


def test_a_missing_hook_is_an_error_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match=r"orchestrator\.hooks\.sample_filter = 'no_such_module:f'"):
        run(tmp_path, {"sample_filter": "no_such_module:f"})
    with pytest.raises(ConfigError, match="called with 4"):
        run(tmp_path, {"buffer_filter": "json:loads"})


def test_an_eval_function_that_raises_costs_the_eval_and_not_the_run(tmp_path, hooks, caplog):
    named = hooks("""
        calls = iter(range(9))

        async def eval_function(args, rollout_id, data_source, evaluation=False):
            if next(calls) == 1:
                raise ValueError("no judge today")
            rewards = [float(group[0].metadata["task"]["word"] == "eval0") for group in data_source.get_samples(2)]
            return {"mine": {"rewards": rewards}}
    """)
    cfg, trainer = run(tmp_path, named, eval={"num_examples": 2, "interval": 1, "greedy": False})
    assert len(trainer.batches) == 3
    assert "no eval of version 1" in caplog.text and ".py:6: ValueError: no judge today" in caplog.text
    rows = read_metrics(cfg.run_dir.metrics("orchestrator"))
    means = {row["step"]: row["eval/mine/sampled/mean"] for row in rows if "eval/mine/sampled/mean" in row}
    assert means == {0: 0.5, 2: 0.5, 3: 0.5}


EVALS = """
    from stretto.vime import RolloutFnEvalOutput

    async def eval_function(args, rollout_id, data_source, evaluation=False):
        groups = data_source.get_samples(data_source.num_tasks)
        samples = [sample for group in groups for sample in group]
        assert len(groups) == 3 and len(samples) == 3 * args.n_samples_per_eval_prompt
        for i, sample in enumerate(samples):
            sample.tokens, sample.response_length = [ord(c) for c in "Q1ok."], 3
            sample.reward, sample.status = float(i == 1), sample.Status.COMPLETED
        samples[0].tokens, samples[0].prompt, samples[0].response = [], "as text", "said so"
        samples[5].status = sample.Status.ABORTED
        data = {7: {"rewards": [1.0]}, "a/b": {"rewards": [s.reward for s in samples], "samples": samples}}
        sampling = args.eval_temperature, args.eval_top_p, args.eval_top_k, args.eval_max_response_len
        return RolloutFnEvalOutput(data=data, metrics=dict(zip("tpkm", sampling)))
"""


def test_an_eval_function_has_the_sampling_of_evals_and_its_metrics_and_samples_are_kept(tmp_path, hooks):
    sampling = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "max_completion_tokens": 9}
    section = {"num_examples": 3, "interval": 1, "group_size": 2, "sampling": sampling}
    cfg, _ = run(tmp_path, hooks(EVALS), max_steps=1, eval=section)
    rows = [row for row in read_metrics(cfg.run_dir.metrics("orchestrator")) if "eval/t" in row]
    assert [[row[f"eval/{name}"] for name in "tpkm"] for row in rows] == [[0.25, 0.5, 7, 9]] * 2
    lines = (cfg.run_dir.eval(1) / "a_b-sampled.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [line["reward"] for line in found] == [0, 1, 0, 0, 0, 0]
    assert [line["status"] for line in found] == ["finished"] * 5 + ["failed"]
    assert [line["task_id"] for line in found] == ["eval-0"] * 2 + ["eval-1"] * 2 + ["eval-2"] * 2
    assert found[0]["branches"] == [{"prompt": "as text", "reply": "said so"}]
    assert found[1]["branches"] == [{"prompt": "Q1", "reply": "ok."}] and found[1]["num_tokens"] == 3
    bare, _ = run(tmp_path / "bare", hooks(EVALS), max_steps=1, eval=section | {"save_samples": False})
    assert [path.name for path in bare.run_dir.eval(1).iterdir()] == ["results.json"]


def test_a_rollout_function_makes_the_evals_too_unless_another_does(tmp_path, hooks, caplog):
    both = ROLLOUT.replace("assert not evaluation", "if evaluation: return await evals(args, data_source)")
    both = both.replace(
        "async def eval_function(args, rollout_id, data_source, evaluation=False):\n        assert evaluation",
        "async def evals(args, data_source):",
    )
    section = {"num_examples": 4, "interval": 1}
    means = {}
    for name, code, more in (
        ("both", both, {}),
        ("environments", both, {"eval_function": "environments"}),
        ("ignored", ROLLOUT.replace("assert not evaluation", "pass"), {}),
    ):
        named = {k: v for k, v in hooks(code).items() if k == "rollout_function"}
        cfg, trainer = run(tmp_path / name, named | more, eval=section)
        assert len(trainer.batches) == 3
        rows = read_metrics(cfg.run_dir.metrics("orchestrator"))
        means[name] = {key for row in rows for key in row if key.startswith("eval/") and key.endswith("/mean")}
    assert means == {
        "both": {"eval/mine/sampled/mean"},
        "environments": {"eval/echo/sampled/mean", "eval/echo/greedy/mean"},
        "ignored": set(),
    }
    message = "returned RolloutFnTrainOutput for evaluation=True; return RolloutFnEvalOutput"
    assert message in caplog.text and 'eval_function = "environments"' in caplog.text


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("{'mine': 0.5}", "'mine' is float, not a dictionary with rewards"),
        ("{'mine': {'rewards': [1.0], 'samples': [{}]}}", "the samples of 'mine' are no list of Sample"),
        (
            "{'mine': {'rewards': [1.0], 'samples': [__import__('stretto.vime').vime.Sample(response_length=None)]}}",
            "its samples: TypeError",
        ),
        ("{'mine': {'rewards': [1.0], 'truncated': 3}}", "truncated of 'mine' is int, not a list"),
        ("{'mine': {'rewards': [float('nan')]}}", "the rewards of 'mine' are no list of finite numbers"),
        ("{}", "returned dict for evaluation=True; return RolloutFnEvalOutput"),
        ("5", "returned int for evaluation=True; return RolloutFnEvalOutput"),
    ],
)
def test_an_eval_function_that_gives_nonsense_costs_the_eval_and_not_the_run(
    tmp_path, hooks, caplog, returned, message
):
    code = f"async def eval_function(args, rollout_id, data_source, evaluation=False):\n    return {returned}\n"
    _, trainer = run(tmp_path, hooks(code), max_steps=1, eval={"num_examples": 2, "greedy": False})
    assert len(trainer.batches) == 1
    assert "no eval of version 1: orchestrator.hooks.eval_function" in caplog.text and message in caplog.text


@needs("vime")
def test_vime_s_names_of_hooks_are_understood():
    section = HooksSection.model_validate(
        {
            "dynamic_sampling_filter_path": "a:b",
            "buffer_filter_path": "a:c",
            "rollout_sample_filter_path": "a:d",
            "custom_reward_post_process_path": "a:e",
            "custom_convert_samples_to_train_data_path": "a:f",
            "rollout_function_path": "a:g",
            "eval_function_path": "a:h",
            "rollout_all_samples_process_path": "a:i",
            "custom_rollout_log_function_path": "a:j",
        }
    )
    named = [section.model_dump()[name] for name in HooksSection.model_fields]
    assert sorted(each for each in named if isinstance(each, str)) == [f"a:{letter}" for letter in "bcdefghij"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hooks": {"args": {"a": 1}}}, "hooks.args = { a = 1 } does nothing with hooks (no function is named)"),
        ({"hooks": {"eval_function": "json:loads"}}, "does nothing with eval = None (there are no evals)"),
        (
            {"hooks": {"eval_function": "environments"}, "eval": {}},
            'hooks.eval_function = "environments" is what happens without hooks.rollout_function',
        ),
        (
            {
                "hooks": {"eval_function": "json:loads"},
                "eval": {"env": [{"id": "sort-letters", "group_size": 2, "sampling": {"top_k": 3}}]},
            },
            "eval.env.0.group_size does nothing: hooks.eval_function makes the evals",
        ),
        (
            {"hooks": {"reward_post_process": "json:loads"}, "algo": {"type": "opsd"}},
            'hooks.reward_post_process does nothing for sort-letters: its algo "opsd" learns from a teacher',
        ),
        (
            {"hooks": {"rollout_function": "json:loads"}, "env": [{"id": "sort-letters", "group_size": 2}]},
            "env.0.group_size = 2: hooks.rollout_function gets groups of one size",
        ),
    ],
)
def test_hooks_that_would_do_nothing_are_refused(tmp_path, settings, message):
    settings = {"env": [{"id": "sort-letters"}], "output_dir": tmp_path, "batch_size": 8, "group_size": 4} | settings
    with pytest.raises(ConfigError) as caught:
        build(OrchestratorConfig, settings)
    assert message in str(caught.value)


def test_a_config_with_functions_is_valid_once_more_when_a_process_reads_it(tmp_path):
    settings = {
        "env": [{"id": "sort-letters"}],
        "output_dir": tmp_path,
        "eval": {"env": [{"id": "sort-letters"}]},
        "hooks": {"rollout_function": "json:loads"},
    }
    cfg = OrchestratorConfig.model_validate(settings)
    assert OrchestratorConfig.model_validate(cfg.model_dump()) == cfg


def test_a_plain_rollout_function_runs_in_a_thread_and_takes_tasks_from_there(hooks):
    named = hooks("""
        import asyncio
        import threading

        def rollout_function(args, rollout_id, data_source, evaluation=False):
            assert threading.current_thread() is not threading.main_thread()
            groups = asyncio.run(later(data_source))
            for sample in groups[0]:
                sample.tokens, sample.response_length, sample.rollout_log_probs = [1, 2], 1, [-1.0]
                sample.reward, sample.status = {"a": args.bonus}, sample.Status.TRUNCATED
            return groups

        async def later(data_source):
            return data_source.get_samples(1)
    """)

    async def main():
        slots = iter(Slot(n, Task(env="e", task_id=str(n), data={"label": "x"}), version=3) for n in range(5))
        source = DataSource(lambda *_: next(slots), 2, asyncio.get_running_loop())
        hook = Hook.load(named["rollout_function"], "hooks.rollout_function", 3)
        function = UserRolloutFunction(hook, Arguments(bonus=2, reward_key="a"), SamplingSection(temperature=0.5), 64)
        return await function.play(0, source, lambda: 3)

    [(slot, group)] = asyncio.run(main())
    assert slot.group_id == 0 and [r.reward for r in group.rollouts] == [2.0, 2.0]
    for rollout in group.rollouts:
        (branch,) = rollout.branches
        assert rollout.status is RolloutStatus.TRUNCATED and branch.temperature == 0.5
        assert branch.logprobs.tolist() == [0.0, -1.0] and rollout.first_version == 3


def test_a_rollout_function_may_return_groups_of_a_ledger_which_are_trained_as_they_were(tmp_path, hooks):
    first, trained = run(tmp_path / "first", {}, max_steps=3, max_async_level=0)
    named = hooks(f"""
        from pathlib import Path

        from stretto.base.paths import RunDir
        from stretto.ledger.reader import LedgerReader

        def rollout_function(args, rollout_id, data_source, evaluation=False):
            with LedgerReader(RunDir(Path({str(first.run_dir.path)!r}))) as ledger:
                rows = ledger.trained_rollouts(rollout_id + 1)
                return [ledger.group(number) for number in dict.fromkeys(row["group_id"] for row in rows)]
    """)
    again, repeated = run(tmp_path / "again", named, max_steps=3, max_async_level=0)
    assert audit(again.run_dir) == []
    pairs = [zip(*ranks, strict=True) for ranks in zip(trained.batches, repeated.batches, strict=True)]
    for one, two in (pair for ranks in pairs for pair in ranks):
        for ours, theirs in zip(one.micro_batches, two.micro_batches, strict=True):
            for name in ("token_ids", "advantages", "logprobs", "loss_mask"):
                np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    with LedgerReader(first.run_dir) as one, LedgerReader(again.run_dir) as two:
        query = "SELECT DISTINCT task_id, data FROM draws JOIN live_rollouts USING (group_id) ORDER BY task_id"
        assert one.rows(query) == two.rows(query) != []


def test_a_run_is_stopped_in_the_middle_of_a_rollout_function(tmp_path, hooks):
    code = ROLLOUT.replace("        data_source.add", "        await asyncio.sleep(1)\n        data_source.add")
    named = {k: v for k, v in hooks("    import asyncio\n" + code).items() if k == "rollout_function"}
    cfg = config(tmp_path, hooks=named, max_steps=None)

    async def interrupt(loop):
        await asyncio.sleep(3.5)
        loop.stop()

    trainer = FakeTrainer(max_steps=None, step_delay=lambda step: 2.0)
    loop = train(cfg, FakeEngine(parrot(0.5)), trainer, meanwhile=interrupt)
    assert loop.progress.step == len(trainer.batches) >= 1
    assert cfg.run_dir.complete_checkpoints() == [loop.progress.step] and audit(cfg.run_dir) == []


def test_groups_that_become_too_old_while_a_rollout_function_has_them_are_dropped(tmp_path, hooks):
    code = ROLLOUT.replace("if rollout_id == 0 else []", "if rollout_id < 4 else []").replace(
        "samples=groups[:-1]", "samples=groups[:-1] if rollout_id < 4 else groups[1:] + groups[:1]"
    )
    code = code.replace("groups = data_source", "groups = sorted(data_source").replace(
        "rollout_batch_size + 1)", "rollout_batch_size + 1), key=lambda group: -group[0].group_index)"
    )
    named = {k: v for k, v in hooks(code).items() if k == "rollout_function"}
    cfg, trainer = run(tmp_path, named, max_steps=6, max_off_policy_steps=1, max_async_level=1)
    assert len(trainer.batches) == 6 and audit(cfg.run_dir) == []
    with LedgerReader(cfg.run_dir) as ledger:
        assert ledger.drops_by_reason()["stale"] >= 1
