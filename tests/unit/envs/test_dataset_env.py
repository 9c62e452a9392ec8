"""The environment `dataset`, and the hooks about one sample."""

from __future__ import annotations

import asyncio
import datetime
import json
import socket
from contextlib import AsyncExitStack
from dataclasses import replace

import aiohttp
import pyarrow
import pyarrow.parquet
import pytest
from aiohttp import web
from cases.dataset import RENDERER, RUN, dataset, module_writer, play, sampled_text, write_rows
from fakes import CharRenderer, FakeEngine, FakeTrainer, parrot, run_virtual
from orchestrator_runs import config, train

from stretto.base.errors import ConfigError, DataError, EngineError, EnvError
from stretto.config.root import EvalConfig, OrchestratorConfig
from stretto.envs.base import SingleTurnEnv, load_environment
from stretto.ledger.audit import audit
from stretto.ledger.reader import LedgerReader
from stretto.orchestrator.build import build_env, run_info
from stretto.orchestrator.eval.evaluator import eval_envs
from stretto.orchestrator.eval.verb import with_server_address
from stretto.orchestrator.state.resume import check_fingerprints
from stretto.orchestrator.state.run_checkpoint import Progress
from stretto.orchestrator.tasks.order import TaskMix
from stretto.records.rollout import RolloutStatus
from stretto.vime import Arguments, Sample, get_model_url
from stretto.vime.arguments import addresses_of
from stretto.vime.requests import send


@pytest.fixture
def file(tmp_path):
    return write_rows(tmp_path)


@pytest.fixture
def module(tmp_path, monkeypatch):
    return module_writer(tmp_path, monkeypatch)


def test_a_system_prompt_beside_the_prompt_is_refused_unless_it_is_asked_for(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "label": "a", "system": "Be brief."}))
    with pytest.raises(DataError, match=r"rows\.jsonl:1: 'system' beside the conversation would not reach the model"):
        dataset(path, reward="exact")
    dataset(path, reward="exact", metadata_key=["system"])


def test_prompt_and_label_make_an_environment_whose_groups_are_one_request(file):
    env = dataset(file)
    group, engine = play(env, members=8)
    assert isinstance(env, SingleTurnEnv) and env.name == "mine" and engine.num_requests == 1
    for rollout in group.rollouts:
        assert rollout.reward == float(sampled_text(rollout.branches[0]) == "word0.")
    assert {r.reward for r in group.rollouts} == {0.0, 1.0}
    assert group.task.data == {
        "prompt": [{"role": "user", "content": "word0"}],
        "label": "word0",
        "metadata": {"n": 0},
        "tools": None,
    }


def test_math_rewards_compare_values(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text('{"q": "half of 3", "a": "1.5"}\n')
    env = dataset(path, input_key="q", label_key="a", reward="math")
    (rollout,) = play(env, answer=lambda *_: r"\boxed{\frac{3}{2}}", members=1)[0].rollouts[:1]
    assert rollout.status is RolloutStatus.TRUNCATED  # nine tokens are too few for it
    env_score = run_virtual(env.score(env.tasks("train").task(0), r"it is \boxed{\frac{3}{2}}"))
    assert env_score.reward == 1.0


def test_a_plain_number_is_an_answer_without_its_box(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text('{"prompt": "2 + 3?", "label": "5"}\n{"prompt": "half?", "label": "\\\\boxed{1/2}"}\n')
    env = dataset(path, reward="math", shuffle=False)
    five, half = (env.tasks("train").task(i) for i in range(2))
    scores = {"5": 1, " 5.0\n": 1, "6": 0, r"\boxed{5}": 1, "it is 5": 0, "": 0}
    assert {text: run_virtual(env.score(five, text)).reward for text in scores} == scores
    scores = {"0.5": 1, r"so \boxed{50\%}": 1, "2": 0}
    assert {text: run_virtual(env.score(half, text)).reward for text in scores} == scores


def test_every_epoch_has_each_record_once_in_its_own_order(file):
    env = dataset(f"{file}@[1:5]")
    mix = TaskMix([env], [1.0], seed=3)
    epochs = [[mix.draw(4 * e + i).data["label"] for i in range(4)] for e in range(6)]
    assert all(sorted(epoch) == ["word1", "word2", "word3", "word4"] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    again = TaskMix([dataset(f"{file}@[1:5]")], [1.0], seed=3)
    assert [again.draw(k).data["label"] for k in range(9, 13)] == [label for e in epochs for label in e][9:13]


def test_without_shuffle_records_come_in_the_order_of_the_files(file):
    mix = TaskMix([dataset(file, shuffle=False)], [1.0], seed=3)
    assert [mix.draw(k).data["metadata"]["n"] for k in range(12)] == [*range(5), *range(5), 0, 1]


def test_a_resumed_run_continues_at_the_record_where_it_stopped(file, tmp_path):
    """Two steps and two more after a resume draw the same records, in the same order, as four steps at once."""

    def drawn(cfg):
        with LedgerReader(cfg.run_dir) as ledger:
            steps = [{row["group_id"] for row in ledger.trained_rollouts(step)} for step in range(1, 5)]
            return [[ledger.group(k).task.data["label"] for k in sorted(groups)] for groups in steps]

    env = [{"id": "dataset", "name": "words", "args": {"path": str(file)}}]
    settings = {"env": env, "max_steps": 4, "max_async_level": 0}
    whole = config(tmp_path / "whole", **settings)
    train(whole, FakeEngine(parrot(0.5)), FakeTrainer(max_steps=4))
    first = config(tmp_path / "halves", **settings)
    train(first, FakeEngine(parrot(0.5)), FakeTrainer(max_steps=4, checkpoint_every=2))
    second = OrchestratorConfig.model_validate(first.model_dump() | {"resume": {"step": 2}})
    engine = FakeEngine(parrot(0.5))
    engine.version = 2
    train(second, engine, FakeTrainer(max_steps=4, start=2))
    assert drawn(second) == drawn(whole)
    assert audit(second.run_dir) == []
    file.write_text(file.read_text().replace("word4", "word5"))
    with pytest.raises(DataError, match="records are not those"):
        train(second, engine, FakeTrainer(max_steps=4, start=2))


def test_a_run_that_resumes_with_other_records_is_refused(file):
    fingerprint = lambda *slices: dataset(f"{file}{''.join(slices)}").tasks("train").fingerprint
    assert fingerprint() == fingerprint("@[0:5]") != fingerprint("@[0:4]")
    progress = Progress()
    check_fingerprints([dataset(file)], progress)
    check_fingerprints([dataset(file)], progress)
    before = file.read_text()
    file.write_text(before.replace('"n": 3', '"n": 7'))
    with pytest.raises(DataError, match=r"environment mine: .*records are not those"):
        check_fingerprints([dataset(file)], progress)
    file.write_text(before)
    check_fingerprints([dataset(file)], progress)


def test_evals_need_eval_path_only(file):
    env = dataset(file, path=None, eval_path=str(file))
    assert env.tasks("eval").num_tasks == 5
    with pytest.raises(ConfigError, match="training needs records"):
        env.tasks("train")
    with pytest.raises(ConfigError, match=r"path, .*eval_path"):
        dataset(file, path=None)


def test_settings_that_need_the_orchestrators_process_are_refused_in_workers(file, module):
    name = module("def generate(args, sample, sampling_params): ...\ndef rm(args, samples): ...")
    wrong = {
        "generate needs the policy's tokenizer": {"generate": f"{name}:generate"},
        "max_prompt_tokens and apply_chat_template = false needs": {
            "max_prompt_tokens": 4,
            "apply_chat_template": False,
        },
        "group_reward needs all samples of a group": {"reward": f"{name}:rm", "group_reward": True},
    }
    for message, args in wrong.items():
        with pytest.raises(ConfigError, match=message):
            load_environment("dataset", {"path": str(file)} | args, "mine")


def test_dates_and_bytes_of_parquet_files_are_refused_when_they_are_read(tmp_path):
    day = datetime.date(2026, 1, 2)
    rows = [{"prompt": "a", "label": "b", "day": day}, {"prompt": "a", "label": "b", "day": day}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert dataset(tmp_path / "rows.parquet").tasks("train").num_tasks == 2
    rows = [{"prompt": "a", "label": "b", "metadata": {"day": day}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet, row 1: .*date .*JSON"):
        dataset(tmp_path / "rows.parquet")


def test_held_out_records_are_those_of_eval_path(file):
    with pytest.raises(ConfigError, match="eval_path"):
        dataset(file).tasks("eval")
    env = dataset(f"{file}@[0:3]", eval_path=f"{file}@[3:]")
    source = env.tasks("eval")
    assert [source.task(i).data["label"] for i in range(source.num_tasks)] == ["word3", "word4"]


def test_without_a_template_the_prompt_is_the_text_only(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "?word0.A", "label": "word0"}\n')
    env = dataset(path, apply_chat_template=False)
    group, _ = play(env, answer=lambda prompt, rng, version: "word0", members=2)
    (branch,) = group.rollouts[0].branches
    assert "".join(map(chr, branch.token_ids)) == "?word0.Aword0." and group.rollouts[0].reward == 1.0


def test_without_a_template_a_system_prompt_is_refused_unless_the_text_has_it(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "label": "a", "system": "Be brief."}))
    with pytest.raises(DataError, match=r"'system' beside.*write it into the text of the prompt"):
        dataset(path, apply_chat_template=False)
    path.write_text(json.dumps({"prompt": "<s>Be brief.\na", "label": "a", "system": "Be brief."}))
    dataset(path, apply_chat_template=False)


@pytest.mark.parametrize("limit", [None, 100])
def test_a_prompt_that_the_model_cannot_take_is_refused_with_its_line(tmp_path, limit):
    def prompt_ids(messages, tools):
        if tools:
            raise DataError("the chat template shows no tools")
        return RENDERER.render_prompt(messages)

    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "a", "label": "b"}] * 2 + [{"prompt": "a", "label": "b", "tools": [{"name": "look_up"}]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = {"path": str(path)} | ({} if limit is None else {"max_prompt_tokens": limit})
    with pytest.raises(DataError, match=r"rows\.jsonl:3: the chat template shows no tools"):
        load_environment("dataset", arguments, "mine", replace(RUN, prompt_ids=prompt_ids))


def test_long_prompts_are_skipped_and_the_others_stay_in_order(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * n, "label": "y"}) + "\n" for n in (3, 30, 4, 40)))
    env = dataset(path, max_prompt_tokens=10)
    source = env.tasks("train")
    assert [len(source.task(i).data["prompt"][0]["content"]) for i in range(source.num_tasks)] == [3, 4]
    with pytest.raises(DataError, match="all 4 prompts are longer than max_prompt_tokens = 2"):
        dataset(path, max_prompt_tokens=2)


def test_tools_of_a_record_reach_the_template(tmp_path, monkeypatch):
    tools = [{"type": "function", "function": {"name": "look"}}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "label": "a", "tools": json.dumps(tools)}) + "\n")
    seen, env = [], dataset(path)
    render = CharRenderer.render_prompt
    monkeypatch.setattr(
        CharRenderer, "render_prompt", lambda self, m, tools=None: seen.append(tools) or render(self, m)
    )
    play(env, members=1)
    assert seen == [tools]


WRONG_RECORDS = {
    "no prompt": ({"question": "a", "label": "b"}, {}, ":1: no 'prompt' (input_key); the record has label, question"),
    "no label": ({"prompt": "a"}, {}, ":1: no 'label' (label_key); reward = \"exact\" compares"),
    "a label that is null": ({"prompt": "a", "label": None}, {}, "it is null: give it a value in every record"),
    "a label below a key": ({"prompt": "a", "reward_model": {"ground_truth": "b"}},
        {"label_key": "reward_model.ground_truth"},
        "not named by dots; give a function as `convert` that takes out 'ground_truth'"),
    "metadata": ({"prompt": "a", "label": "b", "metadata": [1]}, {}, ":1: 'metadata' must be an object, got list"),
    "tools": ({"prompt": "a", "label": "b", "tools": {"a": 1}}, {}, ":1: 'tools' must be a list of tools, got dict"),
    "a number that JSON has not": ({"prompt": "a", "label": "b", "metadata": {"n": float("nan")}},
        {}, r":1: metadata['n'] is nan, which JSON cannot hold"),
    "tools that are no JSON": ({"prompt": "a", "label": "b", "tools": "{"}, {}, ":1: tools: not JSON"),
    "messages without a template": ({"prompt": [{"role": "user", "content": "a"}], "label": "b"},
        {"apply_chat_template": False}, ":1: with apply_chat_template = false 'prompt' must be text, got list"),
    "a message without a role": ({"prompt": [{"content": "a"}], "label": "b"}, {}, ":1: prompt[0] has no role"),
    "a message that is text": ({"prompt": ["a"], "label": "b"},
        {}, ":1: prompt[0] must be an object with role and content, got 'a'"),
    "a role that nobody has": ({"prompt": [{"role": "bot", "content": "a"}], "label": "b"},
        {}, ":1: prompt[0].role must be one of system, user, assistant, tool, got 'bot'"),
    "a message without content": ({"prompt": [{"role": "user"}], "label": "b"},
        {}, ":1: prompt[0].content must be text, got None"),
    "content that is a number": ({"prompt": [{"role": "user", "content": 5}], "label": "b"},
        {}, ":1: prompt[0].content must be text, got 5"),
    "a reply as the last message": (
        {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "label": "b"},
        {}, ":1: prompt[1] is an assistant message; a prompt ends where the policy replies"),
    "a tool that is a number": ({"prompt": "a", "label": "b", "tools": [1]},
        {}, ":1: tools[0] must be an object that describes a tool, got 1"),
    "a label that is no number": ({"prompt": "a", "label": float("nan")},
        {}, ":1: 'label' must be text or a number, got nan; reward = \"exact\" compares"),
    "a label that is a list": ({"prompt": "a", "label": ["b"]}, {}, ":1: 'label' must be text or a number, got ['b']"),
    "an empty prompt": ({"prompt": "", "label": "b"}, {}, ":1: 'prompt' must be text or a list of messages"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG_RECORDS)
def test_a_record_that_is_not_valid_is_refused_with_its_place(tmp_path, mistake):
    record, args, message = WRONG_RECORDS[mistake]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(DataError) as caught:
        dataset(path, **args)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            {"reward": "exakt"},
            'reward = "exakt": did you mean "exact"? There are "exact", "math", "dapo", "deepscaler"',
        ),
        ({"group_reward": True}, "group_reward does nothing"),
        ({"reward_key": "a"}, "reward_key does nothing"),
        ({"reward": "nowhere_at_all:rm"}, "no module 'nowhere_at_all'"),
        ({"paths": "x"}, "got an unexpected keyword argument 'paths'"),
        ({"labelkey": "x"}, "Did you mean 'label_key'?"),
        ({"path": 5}, "dataset: path = 5 must be a file, or a list of files; change `args`"),
        ({"path": ["a.jsonl", 5]}, "must be a file, or a list of files"),
        ({"path": []}, "for evals as eval_path"),
        ({"shuffle": "no"}, "dataset: shuffle = 'no' must be true or false"),
        ({"max_prompt_tokens": "100"}, "dataset: max_prompt_tokens = '100' must be a whole number > 0"),
        ({"max_prompt_tokens": 0}, "dataset: max_prompt_tokens = 0 must be a whole number > 0"),
        ({"reward": 3}, "dataset: reward = 3 must be text"),
        ({"generate": 3}, "dataset: generate = 3 must be text"),
        ({"hook_args": "x"}, "dataset: hook_args = 'x' must be a table"),
    ],
)
def test_wrong_arguments_are_refused(file, args, message):
    with pytest.raises(ConfigError) as caught:
        dataset(file, **args)
    assert message in str(caught.value)


# -- with hooks --


@pytest.mark.heavy
async def test_a_reply_may_take_longer_than_any_limit_of_the_http_library(monkeypatch):
    """Its default, five minutes, is lowered: the request would be sent again and again."""
    asked = []
    monkeypatch.setattr("aiohttp.client.DEFAULT_TIMEOUT", aiohttp.ClientTimeout(total=0.1))

    async def answer(request):
        asked.append(await request.json())
        await asyncio.sleep(0.5)
        return web.json_response({"done": True})

    app = web.Application()
    app.router.add_post("/slow", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        assert await send(f"http://127.0.0.1:{runner.addresses[0][1]}/slow", {"a": 1}, max_retries=1) == {"done": True}
        assert asked == [{"a": 1}]
    finally:
        await runner.cleanup()


async def test_a_reward_that_is_given_is_the_functions_own(file):
    env = dataset(file, reward="given", label_key=None)
    assert await env._reward_of(Sample(reward=0.5)) == 0.5
    with pytest.raises(EnvError, match="the sample has none"):
        await env._reward_of(Sample())


@pytest.mark.parametrize("reward", ["given", "exact", "math", "function"])
async def test_a_samples_own_reward_function_comes_before_its_environments(reward, file, module):
    name = module("""
        def rm(args, sample):
            return 0.25

        async def own(args, sample):
            return 0.75
    """)
    env = dataset(file, reward=f"{name}:rm" if reward == "function" else reward)
    sample = Sample(response="word0", label="word0", custom_rm_path=f"{name}.own")
    assert await env._reward_of(sample) == 0.75


@pytest.mark.heavy
@pytest.mark.parametrize("status", [500, None])
async def test_a_request_that_samples_is_never_sent_twice(status):
    asked = []

    async def answer(request):
        asked.append(request.path)
        if len(asked) > 1 or request.path == "/full/v1/completions":
            return web.json_response({}, status=503 if len(asked) == 1 else 200)
        if status is None:
            request.transport.close()
        return web.json_response({}, status=status or 200)

    app = web.Application()
    for path in ("/inference/v1/generate", "/score", "/full/v1/completions"):
        app.router.add_post(path, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        with pytest.raises(EngineError, match="500" if status else "the connection broke while the reply was"):
            await send(f"{url}/inference/v1/generate", {}, max_retries=1)
        assert asked == ["/inference/v1/generate"]
        for path in ("/score", "/full/v1/completions"):
            asked.clear()
            assert await send(f"{url}{path}", {}, max_retries=1) == {} and len(asked) == 2
    finally:
        await runner.cleanup()


def test_the_address_of_a_model_is_the_configured_one():
    policy = ("https://engines.example/pool/v1", "https://other.example/v1")
    args = Arguments(**addresses_of(policy, {"teacher": "http://127.0.0.1:9000"}))
    assert get_model_url(args) == "https://engines.example/pool/inference/v1/generate"
    assert get_model_url(args, "teacher", "/v1/models") == "http://127.0.0.1:9000/v1/models"
    assert (args.vllm_router_ip, args.vllm_router_port) == ("engines.example", 443)
    args.vllm_model_routers["judge"] = ("10.0.0.1", 8001)
    assert get_model_url(args, "judge") == "http://10.0.0.1:8001/inference/v1/generate"
    nowhere = Arguments(**addresses_of((), {}))
    with pytest.raises(EnvError, match=r"no model 'actor' .*worker processes"):
        get_model_url(nowhere)


def test_rewards_by_function_may_be_dictionaries_and_know_the_metadata(file, module):
    name = module("""
        async def rm(args, sample):
            assert sample.label == "word0" and sample.metadata["n"] == 0 and args.bonus == 2
            return {"right": float(sample.response == sample.label), "score": args.bonus * len(sample.response)}
    """)
    args = {"reward": f"{name}:rm", "reward_key": "score", "hook_args": {"bonus": 2}}
    group, _ = play(dataset(file, **args), members=2)
    assert [r.reward for r in group.rollouts] == [2.0 * (len(sampled_text(r.branches[0])) - 1) for r in group.rollouts]
    assert [r.metrics["right"] for r in group.rollouts] == [1.0, 1.0], "other numbers are metrics"
    group, _ = play(dataset(file, **args | {"reward_key": None}), members=1)
    assert "the reward is a dictionary with 'right', 'score'; name one of them as reward_key" in group.rollouts[0].error


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("None", "the reward is None, not a finite number; return a float on every path"),
        ("'1'", "the reward is '1', not a finite number; return a float, such as float(...) of the text"),
        ("[1.0]", "the reward is list [1.0], not a finite number; return one float"),
        ("{'a': 1}", "the reward is a dictionary with 'a'; name one of them as reward_key"),
    ],
)
def test_what_is_no_reward_is_told_with_the_function_and_its_line(file, module, returned, message):
    name = module(f"""
        def rm(args, sample):
            return {returned}
    """)
    group, _ = play(dataset(file, reward=f"{name}:rm"), members=1)
    error = group.rollouts[0].error
    assert message in error and f"reward = '{name}:rm' (rm, " in error and f"{name}.py:2): " in error, error


@pytest.mark.parametrize(
    ("read", "message"),
    [
        ("sample.answer", "a sample has no 'answer'; it has group_index, index,"),
        (
            "sample.metadata['level']",
            "KeyError: 'level'; name the columns that `metadata` shall have: args.metadata_key",
        ),
        ("{}['level']", "KeyError: 'level'"),
    ],
)
def test_what_a_sample_does_not_have_is_told_with_what_it_has(read, message, file, module):
    name = module(f"""
        def rm(args, sample):
            return {read}
    """)
    group, _ = play(dataset(file, reward=f"{name}:rm"), members=1)
    assert message in group.rollouts[0].error
    assert ("metadata_key" in group.rollouts[0].error) == ("metadata_key" in message)


def test_a_reward_function_gets_the_whole_sample(file, module):
    name = module("""
        def rm(args, sample):
            text = "".join(map(chr, sample.tokens))
            assert text == "Uword0.A" + sample.response + "." * (sample.status is sample.Status.COMPLETED)
            assert sample.response_length == len(text) - len("Uword0.A")
            return float(sample.status is sample.Status.TRUNCATED)
    """)
    says = lambda prompt, rng, version: rng.choice(["short", "much too long"])
    group, _ = play(dataset(file, reward=f"{name}:rm"), answer=says, members=8)
    assert {r.reward for r in group.rollouts} == {0.0, 1.0}, group.rollouts[0].error
    assert all((r.status is RolloutStatus.TRUNCATED) == r.reward for r in group.rollouts)


def test_a_function_may_reward_a_whole_group(file, module):
    name = module("""
        def rm(args, samples):
            lengths = [len(s.response) for s in samples]
            assert all(s.response_length == len(s.rollout_log_probs) == sum(s.loss_mask) > 0 for s in samples)
            assert all(len(s.tokens) == len("Uword0.A") + s.response_length for s in samples)
            assert all(s.weight_versions and s.metadata["n"] == 0 for s in samples)
            return [float(n == min(lengths)) for n in lengths]
    """)
    env = dataset(file, reward=f"{name}:rm", group_reward=True)
    group, _ = play(env, members=8)
    lengths = [len(sampled_text(r.branches[0])) for r in group.rollouts]
    assert [r.reward for r in group.rollouts] == [float(n == min(lengths)) for n in lengths]
    parts = module("""
        def rm(args, samples):
            return [{"score": 2.0, "is_first": i == 0, "note": "text"} for i in range(len(samples))]
    """)
    group, _ = play(dataset(file, reward=f"{parts}:rm", group_reward=True, reward_key="score"), members=2)
    assert [(r.reward, r.metrics["is_first"]) for r in group.rollouts] == [(2.0, 1.0), (2.0, 0.0)]
    wrong = module("def rm(args, samples):\n    return [1.0]\n")
    group, _ = play(dataset(file, reward=f"{wrong}:rm", group_reward=True), members=2)
    assert all("returned 1 rewards for 2; return one for each" in r.error for r in group.rollouts)


def test_args_have_the_sampling_and_the_group_size_of_the_section(file, tmp_path):
    """The environment's, else the eval's, else the run's."""
    named = {"id": "dataset", "args": {"path": str(file), "eval_path": str(file)}}
    cfg = config(
        tmp_path,
        env=[named | {"name": "plain"}, named | {"name": "own", "group_size": 2, "sampling": {"top_k": 5}}],
        train={"sampling": {"temperature": 0.9, "max_completion_tokens": 7}, "replay": {}},
        eval={
            "env": [named | {"name": "held"}, named | {"name": "cold", "sampling": {"temperature": 0.1}}],
            "group_size": 3,
            "sampling": {"temperature": 0.6, "max_completion_tokens": 30},
        },
    )
    seen = lambda env: (
        env.args.n_samples_per_prompt,
        env.args.rollout_temperature,
        env.args.rollout_top_k,
        env.args.rollout_max_response_len,
    )
    run = run_info(cfg, RENDERER, cfg.train.sampling, None)

    async def main():
        async with AsyncExitStack() as stack:
            train = [build_env(section, run=run) for section in cfg.env]
            assert list(map(seen, train)) == [(cfg.group_size, 0.9, None, 7), (2, 0.9, 5, 7)]
            evals = eval_envs(cfg, train, stack, run)
            assert list(map(seen, evals)) == [(3, 0.6, None, 30), (3, 0.1, None, 30)]

    asyncio.run(main())


def test_in_an_eval_hooks_get_the_address_of_the_engine_that_it_starts(tmp_path):
    cfg = EvalConfig.model_validate(
        {"model": str(tmp_path), "output_dir": tmp_path, "run": {"name": "e"}, "eval": {"env": [{"id": "dataset"}]}}
    )
    free = with_server_address(cfg)
    url = f"http://127.0.0.1:{free.inference.server.port}/v1"
    assert run_info(free, RENDERER, cfg.eval.sampling, None).engine_urls == (free.client.base_url,) == (url,)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = {"port": taken.getsockname()[1]}
        with pytest.raises(ConfigError, match="is taken by another process"):
            with_server_address(EvalConfig.model_validate(cfg.model_dump() | {"inference": {"server": server}}))
    assert with_server_address(cfg.model_copy(update={"model": None})).client == cfg.client


# -- the sample itself --


def test_a_sample_grows_shrinks_and_round_trips_through_a_dictionary():
    sample = Sample(prompt="a", tokens=[1, 2])
    sample.append_response_tokens([3, 4], [-0.5, -0.25], text="bc")
    sample.append_response_tokens([9, 9], trainable=False, text="!!")
    sample.append_response_tokens([5], [-1.0])
    assert (sample.loss_mask, sample.effective_response_length) == ([1, 1, 0, 0, 1], 3)
    assert sample.rollout_log_probs == [-0.5, -0.25, 0.0, 0.0, -1.0]
    sample.strip_last_output_tokens(2)
    assert (sample.tokens, sample.loss_mask, sample.response_length) == ([1, 2, 3, 4, 9], [1, 1, 0], 3)
    sample.check()
    again = Sample.from_dict(sample.to_dict() | {"mine": 4})
    assert again.mine == 4 and again.to_dict() == sample.to_dict() | {"mine": 4}
    with pytest.raises(EnvError, match="give one per token"):
        sample.append_response_tokens([1, 2], [-0.5])
    sample.loss_mask = [1]
    with pytest.raises(EnvError, match="loss_mask has 1 entries for a response of 3 tokens"):
        sample.check()
