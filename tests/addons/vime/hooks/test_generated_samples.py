"""Functions of the environment `dataset` that make samples, see them, or give its records."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from aiohttp import web
from cases.dataset import RUN, dataset, module_writer, play, sampled_text, write_rows
from fakes import FakeEngine, FakeTrainer, parrot
from orchestrator_runs import config, train

from stretto.base.errors import ConfigError, DataError, EngineError, EnvError
from stretto.config.sections.algorithm import GrpoAlgo
from stretto.config.sections.orchestrator import SamplingSection
from stretto.ledger.reader import LedgerReader
from stretto.orchestrator.batch import to_samples
from stretto.orchestrator.groups.advantages import assign_advantages
from stretto.records.rollout import RolloutStatus
from stretto.vime import Arguments, get_model_url, post
from stretto.vime.arguments import addresses_of
from stretto_vime.hooks.engine import requests_as_turns, requests_to_engines

SPEC_GENERATE = """
    from stretto.vime import Sample, post

    class Letters:
        def __call__(self, text, add_special_tokens):
            return {"input_ids": [ord(c) for c in text]}
        def decode(self, ids):
            return "".join(map(chr, ids))

    async def generate(args, sample: Sample, sampling_params) -> Sample:
        tokenizer = Letters()
        prompt_token_ids = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
        output = await post(
            f"http://{args.vllm_router_ip}:{args.vllm_router_port}/inference/v1/generate",
            {
                "model": args.hf_checkpoint,
                "token_ids": prompt_token_ids,
                "sampling_params": {"max_tokens": sampling_params["max_new_tokens"], "logprobs": 1},
            },
        )
        choice = output["choices"][0]
        content = choice["logprobs"]["content"]
        assert [each["token_id"] for each in content] == choice["token_ids"]
        sample.rollout_log_probs = [each["logprob"] for each in content]
        response_token_ids = list(choice.get("token_ids") or [])
        sample.tokens = prompt_token_ids + response_token_ids
        sample.response_length = len(response_token_ids)
        finish_reason = choice.get("finish_reason") or "stop"
        if finish_reason == "length":
            sample.status = Sample.Status.TRUNCATED
        elif finish_reason in ("abort", "cancelled"):
            sample.status = Sample.Status.ABORTED
        else:
            sample.status = Sample.Status.COMPLETED
        sample.response = tokenizer.decode(response_token_ids).removesuffix(".")
        return sample
"""


@pytest.fixture
def file(tmp_path):
    return write_rows(tmp_path)


@pytest.fixture
def module(tmp_path, monkeypatch):
    return module_writer(tmp_path, monkeypatch)


def test_a_generate_function_as_documented_plays_rollouts(file, module):
    env = dataset(file, generate=f"{module(SPEC_GENERATE)}:generate")
    group, engine = play(env, members=6)
    assert engine.num_requests == 6
    for rollout in group.rollouts:
        (branch,) = rollout.branches
        assert rollout.status is RolloutStatus.FINISHED
        assert rollout.reward == float(sampled_text(branch) == "word0.")
        assert branch.logprobs[branch.is_sampled].all() and branch.versions
    assert {r.reward for r in group.rollouts} == {0.0, 1.0}


def test_what_a_request_cannot_change_is_refused_or_warned_about(file, module, caplog):
    def generating(more: str) -> str:
        return module(f"""
            from stretto.vime import post

            async def generate(args, sample, sampling_params):
                tokens = [ord(c) for c in sample.prompt]
                url = "http://127.0.0.1:8000/inference/v1/generate"
                output = await post(url, {{"token_ids": tokens, {more}}})
                reply = output["choices"][0]["token_ids"]
                assert "logprobs" not in output["choices"][0]
                sample.tokens, sample.response_length = tokens + reply, len(reply)
                sample.status, sample.reward = sample.Status.COMPLETED, 0.5
                return sample
        """)

    name = generating('"stream": True')
    group, _ = play(dataset(file, generate=f"{name}:generate", reward="exact"), members=1)
    assert "stream: a turn of a rollout is answered whole" in group.rollouts[0].error
    name = generating('"cache_salt": "mine", "sampling_params": {"seed": 3}')
    group, _ = play(dataset(file, generate=f"{name}:generate", reward="exact"), members=2)
    assert all(rollout.reward == 0.5 for rollout in group.rollouts), group.rollouts[0].error
    assert caplog.text.count("cache_salt, seed of a request inside `generate` has no effect") == 1


def test_requests_at_once_are_turns_of_their_own_and_answered_as_an_engine_does(file, module):
    name = module("""
        import asyncio
        from stretto.vime import Sample, post

        async def generate(args, sample, sampling_params):
            tokens, found = [ord(c) for c in sample.prompt], []
            url = "http://127.0.0.1:8000/inference/v1/generate"
            ask = lambda prompt: post(url, {"token_ids": prompt, "sampling_params": {"logprobs": 1, "seed": None}})
            async def two_turns(number):
                own = Sample(prompt=sample.prompt, tokens=list(tokens), reward=float(number))
                for _ in range(2):
                    output = await ask(own.tokens)
                    choice, usage = output["choices"][0], output["usage"]
                    ids, log_probs = choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]]
                    assert usage["completion_tokens"] == len(ids) and usage["prompt_tokens"] == len(own.tokens)
                    assert usage["total_tokens"] == sum(list(usage.values())[:2]) and output["weight_version"] == "0"
                    own.weight_versions += [int(span["version"]) for span in choice["weight_versions"]]
                    own.append_response_tokens(ids, log_probs, trainable=True)
                    own.append_response_tokens([ord(c) for c in "Uq.A"], trainable=False)
                own.status = Sample.Status.COMPLETED
                return own
            return list(await asyncio.gather(*map(two_turns, range(3))))
    """)
    env = dataset(file, generate=f"{name}:generate", reward="given")
    group, engine = play(env, members=2)
    assert engine.num_requests == 12
    for rollout in group.rollouts:
        assert rollout.status is RolloutStatus.FINISHED, rollout.error
        assert rollout.reward == 1.0 and [branch.reward for branch in rollout.branches] == [0.0, 1.0, 2.0]
        for branch in rollout.branches:
            assert "Uq.A" in "".join(map(chr, branch.token_ids)) and len(branch.versions) == 2
            assert np.isfinite(branch.logprobs).all() and branch.logprobs[branch.is_sampled].all()


def test_masked_tokens_and_turns_in_no_returned_sample_are_not_trained(file, module):
    name = module("""
        from stretto.vime import post

        async def ask(tokens):
            url = "http://127.0.0.1:8000/inference/v1/generate"
            output = await post(url, {"token_ids": tokens})
            return output["choices"][0]["token_ids"]

        async def generate(args, sample, sampling_params):
            prompt = [ord(c) for c in sample.prompt]
            await ask(prompt)                                    # thrown away
            first = await ask(prompt)
            tool = [ord(c) for c in "Tool.A"]
            second = await ask(prompt + first + tool)
            sample.tokens = prompt + first + tool + second
            sample.response_length = len(first + tool + second)
            sample.loss_mask = [1] * len(first) + [0] * len(tool + second[:1]) + [1] * len(second[1:])
            sample.status, sample.reward = sample.Status.COMPLETED, 0.75
            return sample
    """)
    group, engine = play(dataset(file, generate=f"{name}:generate", reward="exact"), members=1)
    (rollout,) = group.rollouts
    assert engine.num_requests == 3 and rollout.reward == 0.75
    (branch,) = rollout.branches
    text = "".join(map(chr, branch.token_ids))
    first, second = text.removeprefix("Uword0.A").split("Tool.A")
    assert sampled_text(branch) == first + second[1:]
    scored, _ = assign_advantages(group, GrpoAlgo())
    (sample,) = to_samples([scored])
    assert sample.loss_mask.sum() == len(first + second) - 1


def test_a_removed_sample_counts_in_its_group_and_is_not_trained(file, module):
    name = module(SPEC_GENERATE + "\n    async def but_not_wrong_ones(args, sample, sampling_params):\n"
                  "        sample = await generate(args, sample, sampling_params)\n"
                  "        sample.remove_sample = sample.response != sample.label\n"
                  "        return sample\n")  # fmt: skip
    group, _ = play(dataset(file, generate=f"{name}:but_not_wrong_ones"), members=8)
    group, _ = assign_advantages(group, GrpoAlgo())
    assert {r.reward for r in group.rollouts} == {0.0, 1.0}
    right = [r.rollout_id for r in group.rollouts if r.reward]
    assert [s.sample_id.partition("/")[0] for s in to_samples([group])] == right
    assert all(s.advantages.max() < 1 for s in to_samples([group]))


def test_several_samples_of_one_call_are_one_rollout(file, module):
    name = module(SPEC_GENERATE + "\n    async def twice(args, sample, sampling_params):\n"
                  "        import copy\n"
                  "        both = [copy.copy(sample) for _ in range(2)]\n"
                  "        return [await generate(args, each, sampling_params) for each in both]\n")  # fmt: skip
    group, _ = play(dataset(file, generate=f"{name}:twice"), members=6)
    for rollout in group.rollouts:
        assert len(rollout.branches) == 2
        assert rollout.reward == sum(sampled_text(b) == "word0." for b in rollout.branches) / 2


def test_tokens_that_were_not_sampled_are_refused_with_their_position(file, module):
    name = module(SPEC_GENERATE + "\n    async def anew(args, sample, sampling_params):\n"
                  "        sample = await generate(args, sample, sampling_params)\n"
                  "        sample.tokens[-1] = 7\n"
                  "        return sample\n")  # fmt: skip
    group, _ = play(dataset(file, generate=f"{name}:anew"), members=1, answer=lambda *_: "word0")
    (rollout,) = group.rollouts
    assert rollout.status is RolloutStatus.FAILED
    assert "differs from token 13 on from what the policy was given and sampled" in rollout.error


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 3", "generate returned int; return the sample"),
        ("sample.response_length = 5; return sample", "response_length = 5, but the sample has 0 tokens"),
        ("raise KeyError('x')", ":3: KeyError: 'x'"),
        ("return sample.nothing", ":3: AttributeError: a sample has no 'nothing'; it has group_index"),
        ("import json; json.loads('{')", ".py:3 (in "),
        ("return args.nothing", "args has no 'nothing'; it has apply_chat_template"),
        ("sample.status = Sample.Status.FAILED; return sample", "the sample's status is FAILED"),
        ("await post('http://127.0.0.1:8000/inference/v1/generate', {}); return sample", "needs `token_ids`"),
        (
            "await post(f'http://{args.vllm_router_ip}:{args.vllm_router_port}/inference/v1/generate', "
            "{'token_ids': [65], 'sampling_params': {'beam': 1}})",
            "sampling_params has beam; a turn of a rollout accepts",
        ),
    ],
)
def test_an_error_of_a_hook_fails_its_rollout_with_file_and_line(file, module, body, message):
    name = module(f"""from stretto.vime import Sample, post
async def generate(args, sample, sampling_params):
    {body}
""")
    group, _ = play(dataset(file, generate=f"{name}:generate"), members=2)
    for rollout in group.rollouts:
        assert rollout.status is RolloutStatus.FAILED and message in rollout.error, rollout.error
        assert "Traceback" not in rollout.error


@pytest.mark.heavy
def test_requests_to_other_servers_are_plain_http_even_with_the_path_of_the_policy():
    class Policy:
        async def generate(self, prompt_ids, **sampling):
            raise AssertionError("this was not for the policy")

    answers = iter([503, 200, 404])

    async def answer(request):
        status = next(answers)
        return web.json_response({"said": await request.json()} if status == 200 else {}, status=status)

    async def main():
        nonlocal answers
        app = web.Application()
        app.router.add_post("/inference/v1/generate", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            others = {"teacher": f"http://127.0.0.1:{runner.addresses[0][1]}/v1"}
            args = Arguments(**addresses_of(RUN.engine_urls, others))
            assert args.vllm_model_routers["actor"] == ("127.0.0.1", 8000)
            url = get_model_url(args, "teacher")
            with requests_as_turns(Policy(), RUN.engine_urls):
                assert await post(url, {"token_ids": [1]}) == {"said": {"token_ids": [1]}}  # after a 503
                with pytest.raises(EngineError, match=r"generate: 404"):
                    await post(url, {})
                with pytest.raises(AssertionError, match="not for the policy"):
                    await post(get_model_url(args), {"token_ids": [1]})
            answers = iter([200, 200, 200])
            versions = iter([7, 8, 9])
            with requests_to_engines([others["teacher"]], lambda: next(versions)):
                assert (await post(url, {"a": 1}))["said"] == {"a": 1, "cache_salt": "7"}
                assert (await post(url, {"a": 1}))["said"] == {"a": 1, "cache_salt": "8"}
                assert (await post(url, {"cache_salt": "mine"}))["said"] == {"cache_salt": "mine"}
            with pytest.raises(EnvError, match=r"no model 'ref' .*actor, teacher"):
                get_model_url(args, "ref")
        finally:
            await runner.cleanup()

    asyncio.run(main())


def test_a_generate_function_gets_the_sampling_of_its_rollout(file, module):
    name = module("""
        from stretto.vime import post

        async def generate(args, sample, sampling_params):
            assert sampling_params == {"temperature": 0.5, "top_p": 1.0, "top_k": -1, "max_new_tokens": 3}
            tokens = [ord(c) for c in sample.prompt]
            payload = {"token_ids": tokens, "sampling_params": sampling_params}
            output = await post("http://127.0.0.1:8000/inference/v1/generate", payload)
            reply = output["choices"][0]["token_ids"]
            sample.tokens, sample.response_length, sample.reward = tokens + reply, len(reply), 1.0
            sample.status = sample.Status.COMPLETED
            return sample
    """)
    sampling = SamplingSection(max_completion_tokens=3, temperature=0.5)
    group, _ = play(dataset(file, generate=f"{name}:generate"), members=2, sampling=sampling)
    for rollout in group.rollouts:
        assert rollout.reward == 1.0 and rollout.branches[0].temperature == 0.5, rollout.error
        assert rollout.num_sampled_tokens == 3


def test_functions_see_every_finished_sample_and_may_change_its_reward(file, module):
    name = module("""
        async def first(args, sample, *, rollout_id, evaluation):
            assert rollout_id == 0 and not evaluation and sample.reward in (0.0, 1.0)
            sample.reward += 1
        def second(args, sample, *, rollout_id, evaluation):
            sample.reward *= 10
            return sample
    """)
    env = dataset(file, sample_hooks=[f"{name}:first", f"{name}:second"])
    group, _ = play(env, members=8)
    assert {rollout.reward for rollout in group.rollouts} == {10.0, 20.0}, group.rollouts[0].error


def test_group_reward_gets_the_samples_that_generate_returned(file, module):
    """The function gets all samples of each call as `generate` left them; rewards that it set are not changed."""
    name = module(
        SPEC_GENERATE
        + """
    async def twice(args, sample, sampling_params):
        import copy
        both = []
        for number in range(2):
            each = await generate(args, copy.deepcopy(sample), sampling_params)
            each.metadata["number"], each.response = number, f"mine {number}"
            both.append(each)
        both[0].reward = 0.75
        return both

    def rm(args, samples):
        assert [s.response for s in samples] == ["mine 0", "mine 1"] * 3
        assert [s.metadata for s in samples] == [{**s.metadata, "n": 0, "number": i % 2} for i, s in enumerate(samples)]
        assert all(s.tokens and "messages" in s.metadata and isinstance(s.prompt, str) for s in samples)
        assert [(s.index, s.group_index, s.rollout_id) for s in samples[::2]] == [(i, 0, i) for i in range(3)]
        return [0.25] * len(samples)
    """
    )
    env = dataset(file, generate=f"{name}:twice", reward=f"{name}:rm", group_reward=True)
    group, _ = play(env, members=3)
    assert [r.reward for r in group.rollouts] == [0.5] * 3, group.rollouts[0].error
    unasked = module(
        SPEC_GENERATE
        + """
    async def paid(args, sample, sampling_params):
        sample = await generate(args, sample, sampling_params)
        sample.reward = 0.75
        return sample

    def rm(args, samples):
        raise AssertionError("they have their rewards")
    """
    )
    env = dataset(file, generate=f"{unasked}:paid", reward=f"{unasked}:rm", group_reward=True)
    assert [r.reward for r in play(env, members=2)[0].rollouts] == [0.75] * 2


def test_functions_about_one_sample_get_its_ids(file, module):
    name = module(
        SPEC_GENERATE
        + """
    def expect(sample):
        assert sample.rollout_id == sample.index == sample.group_index * 4 + sample.index % 4, sample.index

    async def knowing(args, sample, sampling_params):
        expect(sample)
        return await generate(args, sample, sampling_params)

    def rm(args, sample):
        expect(sample)
        return float(sample.index % 4 + 10 * sample.group_index)
    """
    )
    for more in ({}, {"generate": f"{name}:knowing"}):
        group, _ = play(dataset(file, reward=f"{name}:rm", **more), members=3, index=2)
        assert [r.reward for r in group.rollouts] == [20.0, 21.0, 22.0], group.rollouts[0].error


SOURCE = """
from stretto.vime import Sample

class Source:
    def __init__(self, args):
        self.words = args.words
    def __len__(self):
        return len(self.words)
    def get_samples(self, num_samples):
        samples = [Sample(prompt=word, label=word, metadata={"n": n}) for n, word in enumerate(self.words)]
        return [[sample] * 4 for sample in samples[:num_samples]]

class Empty(Source):
    def __len__(self):
        return 0

class Failing(Source):
    def get_samples(self, num_samples):
        raise ValueError("no words")

class Texts(Source):
    def get_samples(self, num_samples):
        return self.words

class Nothing(Source):
    def get_samples(self, num_samples):
        return None

class NoLength:
    def __init__(self, args): ...
    def get_samples(self, num_samples): ...

def no_source(args, more): ...
"""


def from_source(module, name, **more):
    args = {"words": [f"word{n}" for n in range(5)]}
    given = {"data_source": f"{module(SOURCE)}:{name}", "hook_args": args, "shuffle": False, "path": None} | more
    return dataset(None, **given)


def test_a_data_source_gives_the_records_that_a_file_would(module, file):
    ours, theirs = from_source(module, "Source").tasks("train"), dataset(file, shuffle=False).tasks("train")
    assert [ours.task(n) for n in range(6)] == [theirs.task(n) for n in range(6)]
    assert ours.num_tasks == 5 and ours.fingerprint == theirs.fingerprint and ours.is_ordered


def test_a_run_trains_on_a_data_source(module, tmp_path):
    args = {"data_source": f"{module(SOURCE)}:Source", "shuffle": False, "hook_args": {"words": ["parrot", "crow"]}}
    cfg = config(tmp_path, env=[{"id": "dataset", "args": args}], max_steps=2, filter_zero_advantages=False)
    trainer = FakeTrainer(max_steps=2)
    train(cfg, FakeEngine(parrot(0.5)), trainer)
    assert len(trainer.batches) == 2
    with LedgerReader(cfg.run_dir) as ledger:
        tasks = {row["group_id"]: ledger.group(row["group_id"]).task for row in ledger.trained_rollouts(1)}
    assert sorted((task.task_id, task.data["label"]) for task in tasks.values()) == [
        ("train-0", "parrot"),
        ("train-1", "crow"),
    ]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("Empty", DataError, "data_source: it has no record"),
        ("Failing", EnvError, r"get_samples: .*\.py:\d+: ValueError: no words"),
        ("Texts", ConfigError, "get_samples: group 0 is str; give a list of Sample for each"),
        ("Nothing", ConfigError, r"get_samples: .*NoneType"),
        ("NoLength", ConfigError, "it has no __len__; write a class with get_samples"),
        ("no_source", ConfigError, "called with 1"),
        ("Nobody", ConfigError, "Nobody"),
    ],
)
def test_a_data_source_that_does_not_fit_is_named(module, name, error, message):
    with pytest.raises(error, match=message):
        from_source(module, name)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"path": "rows.jsonl"}, "path and data_source"),
        ({"streaming": True}, "streaming in `args`: data_source has no file"),
        ({"convert": "my:convert"}, "convert in `args`: data_source has no file"),
    ],
)
def test_what_is_said_about_files_is_refused_beside_a_data_source(module, more, message):
    with pytest.raises(ConfigError, match=message):
        from_source(module, "Source", **more)


def test_metadata_of_a_sample_does_not_replace_its_prompt(module):
    path = module(
        "from stretto.vime import Sample\n"
        "class Source:\n"
        "    def __init__(self, args): self.args = args\n"
        "    def __len__(self): return 1\n"
        "    def get_samples(self, num_samples):\n"
        "        return [[Sample(prompt='ours', label='o', metadata={'prompt': 'theirs', 'level': 3})]]\n"
    )
    env = dataset(None, path=None, data_source=f"{path}:Source", metadata_key=["level"])
    task = env.tasks("train").task(0)
    assert "ours" in str(task.data) and "theirs" not in str(task.data)
