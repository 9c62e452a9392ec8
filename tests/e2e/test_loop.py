"""Whole runs with real processes on a small model: fidelity, determinism, learning, resuming, failures.

The session's `sorter` is the model; one synchronous run, `straight`, is what the exact comparisons are made with.
Figures in docstrings were measured on two cores; nothing here asserts a time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ports import free_ports
from runs import Ended, merged, rl, sorting, start, start_rl, toml, until, wait

from stretto.base.paths import RunDir
from stretto.chat.tokenizer import load_tokenizer
from stretto.ledger.audit import audit
from stretto.records.generate import Completion, GenerateRequest, SamplingParams
from stretto.records.sample import MicroBatch

LETTERS = {"num_letters": 4}
SUMMARY = {
    "reward_before", "reward_after", "greedy_before", "greedy_after", "steps", "wall_s", "tokens_per_s",
    "mismatch_kl_max", "resumed",
}  # fmt: skip
FIDELITY = 1e-5  # nats, in float32 on a CPU
NUM_STEPS = 12

Settings = dict[str, Any]


@pytest.fixture(scope="module")
def sync(sorter: Path) -> Settings:
    """A small synchronous run that keeps the weights of every step."""
    return sorting(sorter, NUM_STEPS) | {"ckpt": {"weights": {"interval": 1}}}


@pytest.fixture(scope="module")
def straight(sync: Settings, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The run that others are compared with; it alone is evaluated and writes its tokens down."""
    more = {"trainer": {"enable_token_export": True}, "orchestrator": {"eval": {"num_examples": 16}}}
    return rl(tmp_path_factory.mktemp("straight"), merged(sync, more))


# -- fidelity --


def test_trainer_and_engine_agree_on_every_trained_token_of_a_synchronous_run(straight: Ended) -> None:
    for name in ("mismatch_kl/mean", "mismatch_kl/max"):
        values = straight.column(name)
        assert len(values) == NUM_STEPS and all(0 <= value < 1e-6 for value in values), (name, values)
    assert straight.column("off_policy/max") == [0.0] * NUM_STEPS

    assert _num_trained_as_sampled(straight, NUM_STEPS) == straight.summary()["tokens"] > 1000


def _num_trained_as_sampled(run: Ended, num_steps: int) -> int:
    """How many tokens were trained, each exactly as it was sampled and with the engine's log-probability."""
    num_tokens = 0
    with run.ledger() as ledger:
        for step in range(1, num_steps + 1):
            rows = ledger.trained_rollouts(step)
            sampled = {f"g{row['group_id']}.{row['member']}/0": row for row in rows}
            lines = (run.run.trained_tokens / f"step_{step}.jsonl").read_text().splitlines()
            trained = {line["sample_id"]: line for line in map(json.loads, lines)}
            assert trained.keys() == sampled.keys()
            for sample_id, line in trained.items():
                row = sampled[sample_id]
                branch = ledger.group(row["group_id"]).rollouts[row["member"]].branches[0]
                positions = np.flatnonzero(branch.is_sampled)
                assert line["position"] == positions.tolist()
                assert line["token_id"] == branch.token_ids[positions].tolist()
                distance = np.abs(np.array(line["trainer_logprob"]) - branch.logprobs[positions])
                assert distance.max() <= FIDELITY, (step, sample_id, distance)
                num_tokens += len(positions)
    return num_tokens


def test_replies_that_stops_end_and_bans_shape_are_trained_as_sampled(sorter: Path, tmp_path: Path) -> None:
    """Log-probabilities of engine and trainer agree on every token, also where min_tokens and bad_words ban some."""
    stops, min_tokens = ["d", "gh", "k", "n", "r", "t", "w"], 3
    sampling = {"stop": stops, "stop_token_ids": [30], "min_tokens": min_tokens, "bad_words": ["e", "ab"]}
    more = {
        "trainer": {"enable_token_export": True},
        "orchestrator": {"train": {"sampling": sampling, "replay": {"max_tokens": 128}}},
    }
    run = rl(tmp_path, merged(sorting(sorter, 4), more))
    assert _num_trained_as_sampled(run, 4) > 300
    assert audit(run.run) == []
    tokenizer, num_stopped = load_tokenizer(sorter), 0
    a, b, e = (tokenizer.encode(letter)[0] for letter in "abe")
    with run.ledger() as ledger:
        groups = {row["group_id"] for step in range(1, 5) for row in ledger.trained_rollouts(step)}
        for branch in (r.branches[0] for group in groups for r in ledger.group(group).rollouts if r.branches):
            ids = branch.token_ids[branch.is_sampled].tolist()
            text = tokenizer.decode(ids)
            assert not {e} & set(ids) and (a, b) not in itertools.pairwise(ids)
            late = tokenizer.decode(ids[min_tokens:-1])
            assert not any(stop in late for stop in stops) and 30 not in ids[:-1]
            num_stopped += any(text.endswith(stop) for stop in stops)
    assert num_stopped > 20


def test_learner_and_a_served_model_agree_on_sampled_tokens(sorter: Path, tmp_path: Path) -> None:
    """Replies of up to 200 tokens over HTTP, at two temperatures, against Learner.logprobs in this process."""
    (port,) = free_ports(1)
    words = ["--model", str(sorter), "--server.port", str(port), "--output-dir", str(tmp_path)]
    server = start("inference", words, tmp_path)
    try:
        prompts, completions = asyncio.run(_sample(f"http://127.0.0.1:{port}"))
    finally:
        server.send_signal(signal.SIGINT)
        code, output = wait(server)
    assert code == 0, output
    logprobs = _learner_logprobs(sorter, prompts, completions)
    assert sum(len(completion.token_ids) for completion in completions) > 2000
    for ours, completion in zip(logprobs, completions):
        assert np.abs(ours - completion.logprobs).max() <= FIDELITY


TEMPERATURES = (1.0, 0.7)


async def _sample(url: str) -> tuple[list[np.ndarray], list[Completion]]:
    """Eight prompts at every temperature, two samples each; the prompt of every sample, and the sample."""
    from stretto.transports.engine.client import EngineClient

    client = EngineClient([url])
    rng = np.random.default_rng(3)
    requests = [
        GenerateRequest(
            request_id=f"r{i}-{temperature}",
            prompt_ids=rng.integers(0, 100, size=5 + 11 * i, dtype=np.int32),
            n=2,
            sampling=SamplingParams(temperature=temperature, max_tokens=200, ignore_eos=True, seed=i),
        )
        for i in range(8)
        for temperature in TEMPERATURES
    ]
    try:
        await client.wait_ready(60)
        answers = await asyncio.gather(*map(client.generate, requests))
    finally:
        await client.close()
    prompts = [request.prompt_ids for request in requests for _ in range(2)]
    return prompts, [completion for answer in answers for completion in answer]


def _learner_logprobs(model: Path, prompts: list[np.ndarray], completions: list[Completion]) -> list[np.ndarray]:
    """The completions' log-probabilities from one packed forward pass of the trainer's learner."""
    from stretto.config.sections.model import ModelSection
    from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler
    from stretto.trainer.learner import Learner, load_policy

    section = ModelSection(name=str(model))
    learner = Learner(
        load_policy(section),
        model=section,
        optim=AdamWOptim(),
        scheduler=ConstantScheduler(warmup_steps=0),
        max_steps=None,
    )
    documents = [np.concatenate((p, c.token_ids)) for p, c in zip(prompts, completions)]
    ends = np.cumsum([0, *map(len, documents)], dtype=np.int32)
    temperatures = np.tile(np.repeat(TEMPERATURES, 2), 8)
    num_tokens = int(ends[-1])
    logprobs, _ = learner.logprobs(
        MicroBatch(
            token_ids=np.concatenate(documents, dtype=np.int32),
            cu_seqlens=ends,
            loss_mask=np.ones(num_tokens, dtype=bool),
            logprobs=np.zeros(num_tokens, dtype=np.float32),
            advantages=np.zeros(num_tokens, dtype=np.float32),
            temperatures=np.repeat(temperatures, np.diff(ends)).astype(np.float32),
            sample_ids=tuple(f"s{i}" for i in range(len(documents))),
            envs=("sort-letters",) * len(documents),
        )
    )
    return [logprobs[end - len(c.token_ids) : end] for end, c in zip(ends[1:], completions)]


# -- determinism --


@pytest.mark.slow
def test_a_synchronous_run_is_a_function_of_its_seed(
    sync: Settings, straight: Ended, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    again = rl(tmp_path, sync)
    assert again.column("reward/mean") == straight.column("reward/mean")
    assert again.column("loss/mean") == straight.column("loss/mean")
    assert again.weights(NUM_STEPS) == straight.weights(NUM_STEPS)
    other = rl(tmp_path_factory.mktemp("other"), merged(sync, {"max_steps": 3, "seed": 1}))
    assert other.column("reward/mean") != straight.column("reward/mean")[:3]
    assert other.weights(3) != straight.weights(3)


def test_files_carry_the_same_bits_as_sockets_and_shared_memory(
    sync: Settings, straight: Ended, tmp_path: Path
) -> None:
    files = {"max_steps": 3, "rollout_transport": {"type": "filesystem"}, "weight_broadcast": {"type": "filesystem"}}
    ended = rl(tmp_path, merged(sync, files))
    assert ended.weights(3) == straight.weights(3) != straight.weights(2)
    assert (ended.run.rollouts / "step_3").is_dir() and (ended.run.broadcasts / "version_3").is_dir()
    assert not straight.run.rollouts.exists() and not straight.run.broadcasts.exists()


def test_processes_that_take_turns_train_what_others_train(sync: Settings, straight: Ended, tmp_path: Path) -> None:
    ended = rl(tmp_path, merged(sync, {"max_steps": 3, "colocate": {}}))
    assert ended.weights(3) == straight.weights(3) and audit(ended.run) == []


def test_three_verbs_started_by_hand_train_what_rl_trains(sync: Settings, straight: Ended, tmp_path: Path) -> None:
    """`inference @ ..`, `orchestrator @ ..`, `trainer @ ..`; with one thread each, as `rl` gives on two cores."""
    http, rollouts, control = free_ports(3)
    wires = {"rollout_transport": {"type": "zmq", "port": rollouts}, "control": {"port": control}}
    common = {"max_steps": 3, "seq_len": sync["seq_len"], "model": sync["model"]}
    client = {"client": {"base_url": f"http://127.0.0.1:{http}/v1"}}
    files = {
        "infer": {"model": sync["model"]["name"], "server": {"port": http}, "num_threads": 1},
        "orch": merged(common, sync["orchestrator"], client, wires),
        "train": merged(common, sync["trainer"], {"ckpt": sync["ckpt"], "num_threads": 1}, wires),
    }
    for name, settings in files.items():
        (tmp_path / f"{name}.toml").write_text(toml({"output_dir": tmp_path} | settings))
    verbs = {"inference": "infer.toml", "orchestrator": "orch.toml", "trainer": "train.toml"}
    started = {verb: start(verb, ["@", file], tmp_path, is_forked=False) for verb, file in verbs.items()}
    try:
        for verb in ("trainer", "orchestrator"):
            code, output = wait(started[verb])
            assert code == 0, f"{verb}: {output}"
        started["inference"].send_signal(signal.SIGINT)
        code, output = wait(started["inference"])
        assert code == 0, output
    finally:
        for popen in started.values():
            popen.kill()
            popen.communicate()
    (run,) = {path.parent for path in tmp_path.glob("*/ledger.sqlite")}
    ended = Ended(0, "", RunDir(run))
    assert ended.weights(3) == straight.weights(3)
    assert audit(ended.run) == []


# -- learning --


def learning(model: Path, num_steps: int, num_decay_steps: int) -> Settings:
    """An asynchronous run at the example's learning rate, evaluated before and after."""
    return {
        "max_steps": num_steps,
        "seq_len": 1024,
        "model": {"name": model},
        "ckpt": None,
        "orchestrator": {
            "batch_size": 128,
            "group_size": 8,
            "train": {"sampling": {"max_completion_tokens": 6}},
            "env": [{"id": "sort-letters", "args": LETTERS}],
            "eval": {"num_examples": 256, "group_size": 2},
        },
        "trainer": {
            "optim": {"lr": 1e-3},
            "scheduler": {"type": "linear", "warmup_steps": 20, "decay_steps": num_decay_steps},
        },
    }


def test_it_learns(sorter: Path, tmp_path: Path) -> None:
    """Measured on seeds 0, 1, 2: sampled .23-.24 -> .68-.69, greedy .68 -> .95; after 90 steps .58-.64 and .92-.95."""
    summary = rl(tmp_path, learning(sorter, 110, 90)).summary()
    assert summary["reward_before"] < 0.35
    assert summary["reward_after"] > summary["reward_before"] + 0.3, summary
    assert summary["greedy_after"] > summary["greedy_before"] + 0.1, summary


CUTS = {"top_p": 0.9, "top_k": 20, "min_p": 0.01}


def test_cuts_are_replayed_token_by_token(sync: Settings, tmp_path: Path) -> None:
    """With the same weights on both sides, over processes and wires; partial rollouts and resumes keep them too."""
    settings = merged(sync, {"orchestrator": {"train": {"sampling": CUTS, "replay": {}}}, "max_steps": 6})
    ended = rl(tmp_path, settings)
    for name in ("mismatch_kl/mean", "mismatch_kl/max"):
        values = ended.column(name)
        assert len(values) == 6 and all(0 <= value < 1e-6 for value in values), (name, values)
    with ended.ledger() as ledger:
        group = ledger.group(0)
    for branch in (branch for rollout in group.rollouts for branch in rollout.branches):
        assert branch.support is not None and not branch.support.sizes[~branch.is_sampled].any()
        for token, left in zip(branch.token_ids.tolist(), branch.support.lists()):
            assert not left or (token in left and len(left) <= 20)
    assert audit(ended.run) == []


@pytest.mark.slow
def test_it_learns_from_replayed_cuts(sorter: Path, tmp_path: Path) -> None:
    """Evaluated as it is sampled. Measured on seed 0: sampled .44 -> .95, greedy .70 -> .98."""
    settings = {"orchestrator": {"train": {"sampling": CUTS, "replay": {}}, "eval": {"sampling": CUTS}}}
    summary = rl(tmp_path, merged(learning(sorter, 150, 130), settings)).summary()
    assert summary["reward_after"] > summary["reward_before"] + 0.3, summary
    assert summary["greedy_after"] > summary["greedy_before"] + 0.1, summary


def test_without_advantages_nothing_is_learned(sorter: Path, tmp_path: Path) -> None:
    """Measured on seeds 0, 1, 2: no held-out reply of 768 changes; the weights only decay, by lr * 0.01 per step."""
    zero = {"orchestrator": {"algo": {"type": "zero"}}, "trainer": {"loss": {"kl_tau": 0.0}}}
    ended = rl(tmp_path, merged(learning(sorter, 24, 4), zero))
    summary = ended.summary()
    assert summary["steps"] == 24 and max(ended.column("off_policy/max")) == 1
    for name in ("reward", "greedy"):
        assert abs(summary[f"{name}_after"] - summary[f"{name}_before"]) < 0.03, summary


# -- ending and resuming --


def test_a_run_that_was_stopped_and_resumed_ends_with_the_same_bits(
    sync: Settings, straight: Ended, tmp_path: Path
) -> None:
    """Ctrl-C comes when some groups of a step are done and others are not."""
    gate, run = tmp_path / "gate", RunDir(tmp_path / "run")
    held = {"id": "envs:HeldSort", "args": LETTERS | {"gate": str(gate), "num_free": 300}}
    settings = merged(sync, {"orchestrator": {"env": [held]}})
    popen = start_rl(tmp_path, settings)
    until(Path(f"{gate}.held").exists, popen, "scores that wait")
    popen.send_signal(signal.SIGINT)
    code, output = wait(popen)
    gate.touch()
    assert code == 0, output
    assert "finishing this step, then saving a checkpoint" in output and "--resume" in output, output
    stopped = run.latest_complete_checkpoint()
    assert stopped is not None and 1 <= stopped < NUM_STEPS
    summary = Ended(code, output, run).summary()
    assert summary["steps"] == stopped and not summary["resumed"]
    assert audit(run) == []

    resumed = rl(tmp_path, settings, "--resume", "--orchestrator.stall-timeout-s", "700")
    assert f"resumed from step {stopped}" in resumed.output
    lines = [line.split() for line in resumed.output.splitlines() if line.startswith("  changed  ")]
    assert [(line[1], line[-1]) for line in lines] == [("orchestrator.stall_timeout_s:", "700")], lines
    assert "-> 700" in resumed.run.log("launcher").read_text()
    assert resumed.weights(NUM_STEPS) == straight.weights(NUM_STEPS)
    assert resumed.column("reward/mean") == straight.column("reward/mean")
    assert audit(run) == []
    assert resumed.summary()["steps"] == NUM_STEPS and resumed.summary()["resumed"]
    assert [life["resumed_step"] for life in resumed.ledger().rows("SELECT * FROM incarnations")] == [None, stopped]


def test_the_summary_has_every_field(straight: Ended) -> None:
    summary = straight.summary()
    assert summary.keys() >= SUMMARY
    assert summary["steps"] == NUM_STEPS and summary["resumed"] is False
    for name in SUMMARY - {"resumed"}:
        assert isinstance(summary[name], int | float) and math.isfinite(summary[name]), name
    assert summary["mismatch_kl_max"] < 1e-6
    assert straight.run.curve.stat().st_size > 1000
    for word in ("reward", str(straight.run.curve), "next:"):
        assert word in straight.output


# -- asynchrony --


def without_skill(model: Path, env: Settings, *more: Settings) -> Settings:
    """A run whose reward needs no skill."""
    orchestrator = {
        "batch_size": 16,
        "group_size": 4,
        "filter_zero_advantages": False,
        "train": {"sampling": {"max_completion_tokens": 8}},
        "env": [env],
    }
    settings = {"max_steps": 4, "seq_len": 256, "model": {"name": model}, "orchestrator": orchestrator}
    return merged(settings, *more)


def test_weights_change_in_flight_and_staleness_stays_bounded(sorter: Path, tmp_path: Path) -> None:
    """Replies of 200 tokens, four at a time, last for several steps: their tokens come from several versions."""
    lead = 2
    long = {
        "max_steps": 10,
        "inference": {"max_num_seqs": 4},
        "orchestrator": {
            "max_async_level": lead,
            "train": {"sampling": {"max_completion_tokens": 200, "ignore_eos": True}},
        },
    }
    ended = rl(tmp_path, without_skill(sorter, {"id": "envs:Vowels"}, long))
    assert max(ended.column("off_policy/max")) == lead
    assert ended.column("groups/failed") == [0.0] * 10
    num_mixed = 0
    with ended.ledger() as ledger:
        assert set(ledger.rollouts_by_status()) <= {"truncated", "dropped", "running"}
        for step in range(1, 11):
            for row in ledger.trained_rollouts(step):
                assert step - 1 - lead <= row["first_version"] <= row["last_version"] <= step - 1
                branch = ledger.group(row["group_id"]).rollouts[row["member"]].branches[0]
                spans = branch.versions
                assert [span.version for span in spans] == sorted({span.version for span in spans})
                covered = np.concatenate([np.arange(span.start, span.end) for span in spans])
                assert np.array_equal(covered, np.flatnonzero(branch.is_sampled))
                num_mixed += len(spans) > 1
    assert num_mixed > 0
    assert audit(ended.run) == []


# -- environments that fail --


def test_an_environment_that_always_fails_stops_the_run_with_the_cause(sorter: Path, tmp_path: Path) -> None:
    few = {"orchestrator": {"max_failed_groups": 6}}
    # A trainer that is forked may end faster than the orchestrator, and is named in its place.
    ended = rl(tmp_path, without_skill(sorter, {"id": "envs:Broken"}, few), is_ok=False, num_forked=2)
    assert ended.code == 1
    assert "RuntimeError: the judge is on holiday" in ended.output, ended.output
    assert "6 groups in a row failed" in ended.output, ended.output
    assert not ended.run.metrics("trainer").exists() or not ended.steps()


def test_failed_rollouts_are_rows_with_a_cause_and_training_goes_on(sorter: Path, tmp_path: Path) -> None:
    flaky = {"id": "envs:Flaky", "args": {"share": 0.3}}
    once = {"orchestrator": {"max_rollout_retries": 0}}
    ended = rl(tmp_path, without_skill(sorter, flaky, once))
    with ended.ledger() as ledger:
        failed = ledger.rows("SELECT error FROM rollouts WHERE status = 'failed'")
        (total,) = ledger.rows("SELECT count(*) AS number FROM rollouts WHERE status != 'running'")
        members = defaultdict(int)
        for step in range(1, 5):
            for row in ledger.trained_rollouts(step):
                members[row["group_id"]] += 1
        for group_id, number in members.items():
            group = ledger.group(group_id)
            counted = [r.reward for r in group.rollouts if r.status != "failed"]
            assert len(counted) == number
            # The baseline is the mean of those that have a reward.
            wanted = [r.reward - np.mean(counted) if r.status != "failed" else 0.0 for r in group.rollouts]
            np.testing.assert_allclose(group.advantages, wanted, atol=1e-6)
    assert 0.05 < len(failed) / total["number"] < 0.6
    assert all("ValueError: this reply cannot be judged" in row["error"] for row in failed)
    assert 0 < min(members.values()) < 4  # groups are trained without their failed members
    assert ended.summary()["steps"] == 4
    assert audit(ended.run) == []


@pytest.mark.slow
def test_rollouts_that_hang_fail_at_their_deadline(sorter: Path, tmp_path: Path) -> None:
    hanging = {"id": "envs:Hanging", "args": {"every": 4}}
    short = {"max_steps": 2, "orchestrator": {"rollout_timeout_s": 2.0}}
    ended = rl(tmp_path, without_skill(sorter, hanging, short))
    with ended.ledger() as ledger:
        causes = {row["error"] for row in ledger.rows("SELECT error FROM rollouts WHERE status = 'failed'")}
    assert causes == {"EngineError: not done after 2 s"}
    assert ended.summary()["steps"] == 2
    assert audit(ended.run) == []


def test_a_stalled_run_says_where_it_stands_and_stops(sorter: Path, tmp_path: Path) -> None:
    # Shorter than the interval at which engines are asked what they have sampled, which is progress the first time.
    forever = {"orchestrator": {"rollout_timeout_s": None, "stall_timeout_s": 4.0}}
    ended = rl(tmp_path, without_skill(sorter, {"id": "envs:Hanging"}, forever), is_ok=False)
    assert ended.code == 1
    assert "stalled: nothing moved for " in ended.output and "stall_timeout_s 4)" in ended.output, ended.output
    assert str(ended.run.dumps) in ended.output, ended.output
    (dump,) = ended.run.dumps.iterdir()
    text = dump.read_text()
    assert "await asyncio.Event().wait()" in text  # the environment's own line
    gauges = json.loads(text.split("== gauges ==")[1])
    assert gauges["running"] == 8 and gauges["version"] == 0 and gauges["next_step"] == 1


@pytest.mark.slow
def test_episodes_that_take_longer_than_a_stall_are_no_stall(sorter: Path, tmp_path: Path) -> None:
    """Neither to the orchestrator nor to the launcher, which waits a minute longer."""
    sampling = {"max_completion_tokens": 24}  # an episode ends with a reply that is cut off
    settings = {"stall_timeout_s": 20.0, "train": {"sampling": sampling}}
    patient = {"orchestrator": settings, "max_steps": 1, "seq_len": 512}
    ended = rl(tmp_path, without_skill(sorter, {"id": "envs:Patient"}, patient))
    assert ended.summary()["steps"] == 1 and re.search(r"groups of step 1 \d/4", ended.output), ended.output


# -- the other example --


@pytest.mark.slow
def test_the_reverse_text_example_runs(tmp_path: Path) -> None:
    examples = Path(__file__).parents[2] / "examples" / "reverse_text"
    code, output = wait(start("sft", ["@", str(examples / "sft.toml"), "--max-steps", "5"], tmp_path))
    assert code == 0, output
    words = ["@", str(examples / "rl.toml"), "--max-steps", "2", "--orchestrator.eval.num-examples", "8"]
    words += ["--trainer.scheduler.warmup-steps", "0", "--trainer.scheduler.decay-steps", "2"]
    words += ["--orchestrator.eval.interval", "None"]
    code, output = wait(start("rl", words, tmp_path))
    assert code == 0, output
    assert Ended(code, output, RunDir(tmp_path / "outputs" / "reverse-text")).summary()["steps"] == 2
