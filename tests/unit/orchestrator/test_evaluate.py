import asyncio
import itertools
import json
import os
import random
import signal
import threading

import numpy as np
import pytest
from aiohttp import web
from cases.metric_names import unlisted
from fakes import CharRenderer, EchoEnv, FakeEngine, FakeTrainer, GuessEnv, parrot, run_virtual
from hypothesis import given
from hypothesis import strategies as st
from orchestrator_runs import ECHO, config, train
from processes.add_ons import needs

from stretto.base.errors import ConfigError, DataError, EngineError, EnvError
from stretto.base.paths import RunDir
from stretto.config.load import load
from stretto.config.root import EvalConfig
from stretto.config.sections.orchestrator import EvalSection, SamplingSection
from stretto.ledger.reader import LedgerReader
from stretto.orchestrator.eval import verb as eval_verb
from stretto.orchestrator.eval.evaluator import Evaluator
from stretto.orchestrator.eval.results import build_eval_score, format_table, pass_all_k, pass_at_k, shortened
from stretto.orchestrator.eval.verb import evaluate_engine
from stretto.orchestrator.eval_scores import eval_row
from stretto.orchestrator.rollout.player import Player
from stretto.records.rollout import Group, Rollout, RolloutStatus, Task
from stretto.transports.engine.chat import ChatClient

# -- estimators --


@pytest.mark.heavy
@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_the_estimators_are_means_over_all_choices_of_k(numbers):
    n, solved, k = numbers
    choices = list(itertools.combinations([1] * solved + [0] * (n - solved), k))
    assert pass_at_k(n, solved, k) == pytest.approx(np.mean([any(c) for c in choices]))
    assert pass_all_k(n, solved, k) == pytest.approx(np.mean([all(c) for c in choices]))


def test_by_hand():
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)
    assert pass_at_k(4, 3, 2) == 1.0
    assert pass_all_k(4, 3, 2) == pytest.approx(0.5)


# -- an eval --


def test_the_best_the_worst_and_others_of_an_eval_go_to_the_log_in_short(caplog):
    caplog.set_level("INFO", logger="stretto.orchestrator.eval.results")
    each = evaluator([EchoEnv()], FakeEngine(parrot(0.5)), group_size=5, greedy=True, log_samples=3)
    run_virtual(each.evaluate(4))
    sampled = [row for row in each.examples if row["mode"] == "sampled"]
    assert [row["reward"] for row in sampled[:2]] == [1.0, 0.0] and len(sampled) == 3
    assert len(each.examples) == 6 and {row["version"] for row in each.examples} == {4}
    assert len({(row["task"], row["prompt"], row["reply"], id(row)) for row in sampled}) == 3
    lines = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert len(lines) == 6 and "version 4, echo eval-" in lines[0] and "reward 1.000: " in lines[0]
    none = evaluator([EchoEnv()], FakeEngine(parrot(0.5)), log_samples=0)
    run_virtual(none.evaluate(0))
    assert none.examples == []
    assert shortened("a" * 1000, 101) == f"{'a' * 49} … {'a' * 49}" and shortened("short", 10) == "short"


def evaluator(envs, engine, run_dir=None, **section):
    section = EvalSection.model_validate({"num_examples": 6, "greedy": False} | section)
    player = Player(engine, CharRenderer(), SamplingSection(), seq_len=64)
    return Evaluator(envs, section, player, run_dir=run_dir)


def test_avg_and_pass_at_k_come_from_the_samples_that_are_kept(tmp_path):
    run_dir = RunDir(tmp_path)
    engine = FakeEngine(parrot(0.5))
    (score,) = run_virtual(evaluator([EchoEnv()], engine, run_dir, group_size=5).evaluate(0))
    lines = [json.loads(line) for line in (run_dir.eval(0) / "echo-sampled.jsonl").read_text().splitlines()]
    assert len(lines) == 30 and score.mean == pytest.approx(np.mean([line["reward"] for line in lines]))
    assert set(score.pass_at_k) == {1, 2, 4} and score.pass_at_k[1] == pytest.approx(score.mean)
    solved = [sum(line["reward"] for line in lines if line["task_id"] == f"eval-{i}") for i in range(6)]
    assert score.pass_at_k[4] == pytest.approx(np.mean([pass_at_k(5, int(c), 4) for c in solved]))
    first = lines[0]
    assert first["branches"] == [{"prompt": "Ueval0.A", "reply": first["branches"][0]["reply"]}]
    assert (first["branches"][0]["reply"] == "eval0.") == (first["reward"] == 1.0)
    assert score.version == 0 and score.versions == (0, 0)
    (row,) = json.loads((run_dir.eval(0) / "results.json").read_text())
    assert row["mean"] == score.mean and row["version"] == 0


def test_failed_rollouts_are_left_out_of_pass_at_k():
    """A task with only one counted rollout does not count towards pass@2."""
    failing = lambda request: "no" if request.n == 4 and request.prompt_ids[5] == ord("3") else None
    engine = FakeEngine(parrot(1.0), fail=failing)
    (score,) = run_virtual(evaluator([EchoEnv()], engine, group_size=4).evaluate(0))
    assert score.num_failed == 4 and score.pass_at_k[4] == 1.0


def test_rewards_between_zero_and_one_have_no_pass_at_k():
    (score,) = run_virtual(evaluator([GuessEnv()], FakeEngine(parrot(0.5)), group_size=4).evaluate(0))
    assert score.pass_at_k == {} and 0 < score.mean < 1


def test_environments_of_an_eval_have_their_own_sampling_size_and_interval():
    requests = []

    def delay(request):
        requests.append((request.n, request.sampling.temperature))
        return 0.0

    envs = [EchoEnv(), EchoEnv()]
    envs[1].name = "other"
    own = {
        "id": ECHO,
        "name": "other",
        "sampling": {"temperature": 0.3},
        "group_size": 2,
        "interval": 3,
        "num_examples": 2,
    }
    mine = evaluator(envs, FakeEngine(parrot(0.5), delay=delay), env=[{"id": ECHO, "name": "echo"}, own], interval=2)
    scores = run_virtual(mine.evaluate(6, end=None))
    assert [(s.env, s.k, s.num_tasks) for s in scores] == [("echo", 1, 6), ("other", 2, 2)]
    assert set(requests) == {(1, 1.0), (2, 0.3)}
    assert [s.env for s in run_virtual(mine.evaluate(4, end=None))] == ["echo"]
    assert [s.env for s in run_virtual(mine.evaluate(3, end=None))] == ["other"]
    assert [v for v in range(8) if mine.section.is_due(v, end=7)] == [0, 2, 3, 4, 6, 7]


def test_greedy_rollouts_end_where_sampled_ones_end():
    """The key `greedy` changes the temperature alone, and what is moot without chance."""
    seen = []

    def delay(request):
        seen.append(request.sampling)
        return 0.0

    ends = {"stop": ["x"], "stop_token_ids": [7], "min_tokens": 2, "bad_words": ["no"], "max_completion_tokens": 9}
    own = {"id": ECHO, "name": "echo", "sampling": {"logit_bias": {"3": -1.0}, "ignore_eos": True}}
    sampling = ends | {"temperature": 0.7, "top_p": 0.5, "top_k": 5, "min_p": 0.1}
    each = evaluator([EchoEnv()], FakeEngine(parrot(1.0), delay=delay), env=[own], sampling=sampling, greedy=True)
    run_virtual(each.evaluate(0))
    sampled, greedy = (next(s for s in seen if (s.temperature == 0) is is_greedy) for is_greedy in (False, True))
    assert (greedy.top_p, greedy.top_k, greedy.min_p) == (1.0, None, 0.0)
    same = ("stop", "stop_token_ids", "min_tokens", "bad_words", "max_tokens", "logit_bias", "ignore_eos")
    assert [getattr(greedy, key) for key in same] == [getattr(sampled, key) for key in same]
    assert sampled.stop and sampled.stop_token_ids and sampled.min_tokens and sampled.bad_words and sampled.ignore_eos


def requests_of(path, **settings):
    """Prompt, sampling and whether it is an eval of every request of a run of two steps."""
    seen = []

    def delay(request):
        text = "".join(map(chr, request.prompt_ids))
        seen.append((text, request.sampling, "eval" in request.request_id))
        return 0.0

    cfg = config(path, max_steps=2, **settings)
    train(cfg, FakeEngine(parrot(0.5), delay=delay), FakeTrainer(max_steps=2))
    return seen


def test_an_eval_and_training_on_one_environment_have_system_prompts_of_their_own(tmp_path):
    trained = {"id": ECHO, "name": "echo", "system_prompt": "think"}
    for number, prompt in enumerate(("judge", None)):
        held_out = {"num_examples": 3, "env": [{"id": ECHO, "name": "echo", "system_prompt": prompt}]}
        seen = requests_of(tmp_path / str(number), env=[trained], eval=held_out)
        for is_eval, start in ((False, "Sthink.U"), (True, "Sjudge.U" if prompt else "U")):
            texts = [text for text, _, of_eval in seen if of_eval is is_eval]
            assert texts and all(text.startswith(start) for text in texts)


def test_held_out_tasks_of_training_are_played_under_the_limits_of_their_environment(tmp_path):
    env = [{"id": ECHO, "name": "echo", "system_prompt": "think", "sampling": {"max_completion_tokens": 9}}]
    settings = {"env": env, "train": {"sampling": {"max_completion_tokens": 20}}}
    seen = requests_of(tmp_path / "a", eval={"num_examples": 3}, **settings)
    assert {(sampling.max_tokens, text[:8]) for text, sampling, _ in seen} == {(9, "Sthink.U")}
    own = {"num_examples": 3, "sampling": {"max_completion_tokens": 30}}
    seen = requests_of(tmp_path / "b", eval=own, **settings)
    assert {sampling.max_tokens for _, sampling, of_eval in seen if of_eval} == {30}


def test_held_out_tasks_of_training_have_the_deadline_and_retries_of_their_environment(tmp_path):
    env = [{"id": ECHO, "name": "echo", "rollout_timeout_s": 5.0, "max_rollout_retries": 7}]
    for retries, expected in ((None, 7), (0, 0)):
        cfg = config(tmp_path, env=env, eval={"max_rollout_retries": retries})
        (section,) = cfg.eval_as_trained().env
        assert (section.rollout_timeout_s, section.max_rollout_retries) == (5.0, expected)
    named = config(tmp_path, env=env, eval={"env": [{"id": ECHO}]}).eval_as_trained()
    assert [each.rollout_timeout_s for each in named.env] == [None]


def test_an_eval_waits_with_the_next_version_whatever_the_trainer_does(tmp_path):
    cfg = config(tmp_path, eval={"num_examples": 10, "interval": 1}, max_async_level=2, max_steps=6)
    rng = random.Random(0)
    engine = FakeEngine(parrot(0.5), delay=lambda request: rng.random() * 3)
    train(cfg, engine, FakeTrainer(max_steps=6, step_delay=lambda step: 0.1))
    for version in range(7):
        for row in json.loads((cfg.run_dir.eval(version) / "results.json").read_text()):
            assert row["versions"] == [version, version] and row["num_failed"] == 0


def test_a_resumed_run_repeats_an_eval_only_if_configured(tmp_path):
    settings = {"eval": {"num_examples": 10, "interval": 2}, "max_async_level": 0}
    cfg = config(tmp_path, **settings)
    with pytest.raises(EngineError, match="killed"):
        train(cfg, FakeEngine(parrot(0.5)), FakeTrainer(max_steps=5, checkpoint_every=2, die_after=4))
    step = cfg.run_dir.latest_complete_checkpoint()
    result = cfg.run_dir.eval(step) / "results.json"
    assert result.exists()
    rows = json.loads(result.read_text())
    for row in rows:
        row["mean"] = 0.125  # not what another eval would give
    for again, expected in ((False, True), (True, False)):
        result.write_text(json.dumps(rows))
        own = settings | {"eval": settings["eval"] | {"retrigger_on_resume": again}, "resume": {"step": step}}
        engine = FakeEngine(parrot(0.5))
        engine.version = step
        loop = train(config(tmp_path, **own), engine, FakeTrainer(max_steps=5, start=step))
        assert (json.loads(result.read_text()) == rows) is expected
        if not again:
            assert sorted(loop.progress.sampled) == [0, 2, 4, 5]


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_resumed_run_repeats_an_eval_whose_results_a_power_cut_has_cut(tmp_path, share):
    settings = {"eval": {"num_examples": 10, "interval": 2}, "max_async_level": 0}
    cfg = config(tmp_path, **settings)
    with pytest.raises(EngineError, match="killed"):
        train(cfg, FakeEngine(parrot(0.5)), FakeTrainer(max_steps=5, checkpoint_every=2, die_after=4))
    step = cfg.run_dir.latest_complete_checkpoint()
    result = cfg.run_dir.eval_results(step)
    whole = result.read_text()
    result.write_text(whole[: int(len(whole) * share)])
    engine = FakeEngine(parrot(0.5))
    engine.version = step
    again = config(tmp_path, **settings | {"resume": {"step": step}})
    loop = train(again, engine, FakeTrainer(max_steps=5, start=step))
    assert len(json.loads(result.read_text())) == len(json.loads(whole))
    assert sorted(loop.progress.sampled) == [0, 2, 4, 5]


# -- evals that fail --


def test_an_environment_that_fails_all_of_an_eval_costs_the_eval_and_not_the_run(tmp_path):
    broken = {"id": ECHO, "name": "judged", "args": {"broken": True}}
    cfg = config(tmp_path, eval={"env": [broken], "num_examples": 3, "interval": 2}, max_steps=4)
    loop = train(cfg, FakeEngine(parrot(0.5)), FakeTrainer(max_steps=4))
    assert loop.progress.step == 4 and loop.progress.sampled == {}
    with LedgerReader(cfg.run_dir) as ledger:
        rows = ledger.rows("SELECT data FROM events WHERE kind = 'eval_lost'")
    lost = [row["data"] for row in rows]
    assert sorted(each["version"] for each in lost) == [0, 2, 4]
    assert all("judged: none of 3 rollouts succeeded" in each["error"] for each in lost)
    lines = (cfg.run_dir.eval(2) / "judged-sampled.jsonl").read_text().splitlines()
    assert all("the scorer is on strike" in json.loads(line)["error"] for line in lines) and len(lines) == 3
    assert not cfg.run_dir.eval_results(2).exists()


def test_an_engine_that_fails_all_of_an_eval_ends_the_run(tmp_path):
    cfg = config(tmp_path, eval={"num_examples": 3}, max_steps=2)
    engine = FakeEngine(parrot(0.5), fail=lambda request: "out of memory" if "eval" in request.request_id else None)
    with pytest.raises(EngineError, match=r"eval of echo: none of 3 rollouts.*out of memory"):
        train(cfg, engine, FakeTrainer(max_steps=2))


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        ("EnvError: no", EnvError),
        ("OutOfContext: a prompt of 90 tokens", EnvError),
        ("ConfigError: no", ConfigError),
        ("DataError: no", DataError),
        ("EngineError: not done after 3 s", EngineError),
        ("unknown", EngineError),
    ],
)
def test_the_cause_of_the_last_rollout_says_who_must_act(cause, kind):
    task = Task(env="echo", task_id="t", data={})
    failed = Rollout(rollout_id="g0.0", group_id=0, member=0, task=task, status=RolloutStatus.FAILED, error=cause)
    with pytest.raises(kind, match="eval of echo: none of 1 rollouts succeeded"):
        build_eval_score("echo", "greedy", 1, [Group(group_id=0, task=task, rollouts=(failed,))], 1.0)


# -- any server with /chat/completions --


class TextServer:
    """A real HTTP server that has only /models and /chat/completions; the first answers are 503."""

    def __init__(self, refusals=0, listed=b'{"data": [{"id": "some-model"}]}'):
        """listed: the answer to /models; None: 404."""
        self.refusals, self.listed, self.bodies = refusals, listed, []

    async def chat(self, request):
        if self.refusals:
            self.refusals -= 1
            return web.json_response({"error": {"message": "busy"}}, status=503)
        body = await request.json()
        self.bodies.append(body)
        text = body["messages"][-1]["content"]
        message = {"role": "assistant", "content": text if body["seed"] % 2 else "no", "tool_calls": None}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": 7}})

    async def models(self, request):
        return web.Response(status=404) if self.listed is None else web.Response(body=self.listed)

    async def start(self):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/v1/models", self.models)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"


def served(server):
    """The address of a text server in a thread of its own, and what ends it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    url = asyncio.run_coroutine_threadsafe(server.start(), loop).result(60)

    def stop():
        asyncio.run_coroutine_threadsafe(server.runner.cleanup(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()

    return url, stop


@needs("prime")
def test_the_verb_evaluates_any_server_that_speaks_text(tmp_path):
    async def scenario():
        server = TextServer(refusals=2)
        url = await server.start()
        envs = [{"id": ECHO, "name": "echo"}, {"id": "fakes:GuessEnv", "name": "guess"}]
        cfg = EvalConfig.model_validate(
            {"client": {"base_url": url, "api": "chat"}, "output_dir": tmp_path, "run": {"name": "e"}}
            | {"eval": {"env": envs, "num_examples": 4, "group_size": 4, "sampling": {"max_tokens": 32}}}
        )
        scores = await evaluate_engine(cfg)
        await server.runner.cleanup()
        return server, cfg, scores

    server, cfg, scores = asyncio.run(scenario())
    assert [(s.env, s.mode, s.num_failed) for s in scores] == [
        ("echo", "sampled", 0), ("echo", "greedy", 0), ("guess", "sampled", 0), ("guess", "greedy", 0),
    ]  # fmt: skip
    assert scores[0].mean == 0.5 and scores[0].completion_tokens == 7.0 and scores[0].pass_at_k[4] == 1.0
    assert {body["model"] for body in server.bodies} == {"some-model"}
    assert {body["max_tokens"] for body in server.bodies} == {32}
    assert max(len(body["messages"]) for body in server.bodies) == 5  # three turns and two replies
    lines = (cfg.run_dir.eval(0) / "guess-sampled.jsonl").read_text().splitlines()
    sample = json.loads(lines[0])
    assert len(sample["branches"]) == 3 and sample["branches"][0]["prompt"] == "user: w00"
    assert "avg@k" in format_table(scores) and "pass@4" in format_table(scores)


@pytest.mark.heavy
def test_an_eval_that_fails_leaves_what_it_has_found_and_the_next_one_says_what_it_replaces(tmp_path, capsys):
    """An hour of one environment is not lost by a mistake in the next one."""
    url, stop = served(TextServer())
    envs = [{"id": ECHO, "name": "echo"}, {"id": ECHO, "name": "judged", "args": {"broken": True}}]
    given = {"client": {"base_url": url, "api": "chat"}, "output_dir": tmp_path, "run": {"name": "e"}}
    given["inference"] = {"api_key": "s3cret"}
    cfg = EvalConfig.model_validate(given | {"eval": {"env": envs, "num_examples": 2, "greedy": False}})
    with pytest.raises(EnvError, match="judged: none of 2 rollouts"):
        eval_verb.main(cfg)
    path = cfg.run_path / "eval.json"
    assert [row["env"] for row in json.loads(path.read_text())] == ["echo"]
    printed = capsys.readouterr()
    assert printed.out.count("echo ") == 1 and "replaces it" not in printed.err
    assert "s3cret" not in cfg.run_dir.config("eval").read_text()
    again = load(EvalConfig, ["@", str(cfg.run_dir.config("eval"))], verb="eval")
    assert again.eval == cfg.eval
    whole = again.model_copy(update={"eval": again.eval.model_copy(update={"env": again.eval.env[:1]})})
    assert eval_verb.main(whole) == 0
    assert f"{path} is of an earlier eval, and this one replaces it" in capsys.readouterr().err
    stop()


@pytest.mark.heavy
def test_sigterm_ends_an_eval_in_order_with_the_scores_it_has(tmp_path, capsys):
    class Ends(TextServer):
        async def chat(self, request):
            if len(self.bodies) == 2:  # those of the first environment
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(3)
            return await super().chat(request)

    url, stop = served(Ends())
    envs = [{"id": ECHO, "name": "echo"}, {"id": ECHO, "name": "later"}]
    given = {"client": {"base_url": url, "api": "chat"}, "output_dir": tmp_path, "run": {"name": "e"}}
    cfg = EvalConfig.model_validate(given | {"eval": {"env": envs, "num_examples": 2, "greedy": False}})
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert eval_verb.main(cfg) == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [row["env"] for row in json.loads((cfg.run_path / "eval.json").read_text())] == ["echo"]
    assert capsys.readouterr().err.endswith("terminated\n")
    stop()


def test_an_eval_has_no_place_in_a_run_that_trains(tmp_path):
    cfg = EvalConfig.model_validate({"output_dir": tmp_path, "run": {"name": "e"}, "eval": {"env": [{"id": ECHO}]}})
    cfg.run_dir.configs.mkdir(parents=True)
    cfg.run_dir.config("run").write_text("{}")
    with pytest.raises(ConfigError, match=r"run\.name = 'e'.*--run\.name"):
        eval_verb.main(cfg)


def test_what_an_environment_reports_beside_the_reward_is_a_mean_of_each_mode():
    """A failed rollout is left out, and one that has no value does not count as 0."""
    task = Task(env="echo", task_id="t", data={})
    reported = {
        RolloutStatus.FINISHED: {"reward_right": 1.0, "reward_short": 0.5},
        RolloutStatus.TRUNCATED: {"reward_right": 0.0},
        RolloutStatus.FAILED: {"reward_right": 9.0},
    }
    rollouts = tuple(
        Rollout(rollout_id=f"g0.{at}", group_id=0, member=at, task=task, status=status, metrics=metrics, error="no")
        for at, (status, metrics) in enumerate(reported.items())
    )
    score = build_eval_score("echo", "sampled", 3, [Group(group_id=0, task=task, rollouts=rollouts)], 1.0)
    assert score.metrics == {"reward_right": 0.5, "reward_short": 0.5}
    row = eval_row([score])
    assert row["eval/echo/sampled/metrics/reward_right"] == 0.5
    assert not unlisted("orchestrator", row)
    assert format_table([score]).splitlines()[-1] == "echo, sampled: reward_right 0.5  reward_short 0.5"


def test_a_server_that_refuses_is_quoted_and_an_environment_of_tokens_is_refused():
    async def scenario():
        server = TextServer(refusals=100)
        url = await server.start()
        async with ChatClient(url, max_retries=1) as client:
            await client.wait_ready(5.0)
            player = Player(client, client, SamplingSection(), seq_len=64, max_retries=0)
            with pytest.raises(EngineError, match=r"none of 6 rollouts.*HTTP 503.*busy"):
                await Evaluator([EchoEnv()], EvalSection(num_examples=6, greedy=False), player).evaluate(0)

            class Raw(GuessEnv):
                async def rollout(self, task, ctx):
                    await ctx.generate(np.array([1, 2, 3]))

            with pytest.raises(EngineError, match="its own token ids"):
                await Evaluator([Raw()], EvalSection(num_examples=2, greedy=False), player).evaluate(0)
        await server.runner.cleanup()

    asyncio.run(scenario())


@pytest.mark.parametrize("listed", [None, b"<html>", b"[]", b'{"data": []}'])
def test_a_chat_server_without_a_list_of_models_needs_a_name(listed):
    async def scenario():
        server = TextServer(listed=listed)
        url = await server.start()
        async with ChatClient(url, model="named") as client, ChatClient(url) as unnamed:
            await client.wait_ready(5.0)
            assert client.model == "named"
            with pytest.raises(EngineError, match=r"client\.served_model"):
                await unnamed.wait_ready(5.0)
        await server.runner.cleanup()

    asyncio.run(scenario())


@pytest.mark.parametrize("content", ["", "[{", "{}", "[1]", '[{"mode": 1}]', "null"])
def test_an_eval_that_a_power_cut_left_incomplete_is_no_eval(tmp_path, content):
    from stretto.base.paths import RunDir
    from stretto.orchestrator.eval.results import load_mean_rewards

    run = RunDir(tmp_path)
    run.eval_results(3).parent.mkdir(parents=True)
    run.eval_results(3).write_text(content)
    assert not load_mean_rewards(run, 3)
