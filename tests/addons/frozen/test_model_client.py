"""A frozen model beside the policy: how it is asked, cached, limited, and what its failures become."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
from aiohttp import web
from fakes import CharRenderer, FakeEngine, parrot

from stretto.base.errors import ConfigError, EngineError, EnvError
from stretto.config.root import AskedModelSection, OrchestratorConfig
from stretto.config.sections.distill import FrozenModelPlace
from stretto.config.sections.orchestrator import SamplingSection
from stretto.envs.base import RunInfo, load_environment
from stretto.envs.models import Unreachable
from stretto.envs.workers.pool import open_workers
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto.records.rollout import RolloutStatus
from stretto_frozen.clients import ModelClient, chat_url, open_models
from stretto_frozen.run import open_beside

HERE = Path(__file__).parent
ASK = [{"role": "user", "content": "is it right?"}]


class Judge:
    """An API whose answers are given one after the other: a text, a status, or a status with seconds to wait."""

    def __init__(self, *answers: str | int | tuple[int, float], delay_s: float = 0.0, has_list: bool = True) -> None:
        self.answers, self.delay_s, self.has_list = list(answers), delay_s, has_list
        self.bodies: list[dict] = []
        self.keys: list[str | None] = []
        self.num_running = self.most_running = 0

    async def chat(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(self.delay_s)
        self.num_running -= 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, tuple):
            return web.json_response({"error": "busy"}, status=answer[0], headers={"Retry-After": str(answer[1])})
        if isinstance(answer, int):
            return web.json_response({"error": {"message": "no"}}, status=answer)
        choice = {"message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 2}})

    async def models(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization"))
        if self.has_list is None:
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        return web.json_response({"data": [{"id": "first"}]}, status=200 if self.has_list else 404)


@asynccontextmanager
async def served(judge: Judge) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", judge.chat)
    app.router.add_get("/v1/models", judge.models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


def asked(judge: Judge, ask, **settings):
    """What `ask(client)` returns, with a client of the judge."""

    async def run():
        async with served(judge) as url, AsyncExitStack() as stack:
            place = FrozenModelPlace(base_url=url, **{"model": "big", "timeout_s": 20.0} | settings)
            return await ask(open_models({"judge": place}, stack)["judge"])

    return asyncio.run(run())


def test_a_request_is_greedy_unless_it_says_otherwise_and_names_the_model():
    judge = Judge("1")
    reply = asked(judge, lambda client: client.chat(ASK, max_tokens=4, seed=None))
    assert judge.bodies == [{"model": "big", "messages": ASK, "temperature": 0.0, "max_tokens": 4}]
    assert (reply.text, reply.num_prompt_tokens, reply.num_completion_tokens, reply.is_cached) == ("1", 5, 2, False)


def test_the_same_greedy_request_is_sent_once_also_if_both_are_asked_at_once():
    judge = Judge("1", delay_s=0.05)
    replies = asked(judge, lambda client: asyncio.gather(*(client.chat(ASK) for _ in range(8))))
    assert len(judge.bodies) == 1
    assert [reply.is_cached for reply in replies] == [False] + [True] * 7


def test_sampled_requests_are_not_cached_and_a_failed_one_is_asked_again():
    judge = Judge("1", "2", 500, "3")

    async def ask(client: ModelClient):
        sampled = [(await client.chat(ASK, temperature=1.0)).text for _ in range(2)]
        with pytest.raises(EngineError, match=r"models.judge.*500.*after 1 attempts"):
            await client.chat(ASK)
        return [*sampled, (await client.chat(ASK)).text]

    assert asked(judge, ask, max_retries=0) == ["1", "2", "3"]


@pytest.mark.parametrize("wrong", [401, 500])
def test_the_first_failure_and_their_number_are_said_though_an_environment_catches_them(wrong, caplog):
    async def ask(client: ModelClient):
        for word in "abc":
            with suppress(EngineError):
                await client.chat([{"role": "user", "content": word}])

    with caplog.at_level("INFO"):
        asked(Judge(wrong), ask, max_retries=0)
        asked(Judge("1"), lambda client: asyncio.gather(*(client.chat(ASK) for _ in range(3))))
    first, number = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert first.startswith("models.judge: ") and "models/judge/failed" in first
    assert number == "models.judge: 3 requests, 3 failed"
    last = caplog.records[-1]
    assert last.levelname == "INFO" and last.getMessage().startswith("models.judge: 3 requests, 2 cached")


def test_the_cache_forgets_what_was_used_longest_ago():
    async def ask(client: ModelClient):
        for word in "abacab":
            await client.chat([{"role": "user", "content": word}])

    judge = Judge("1")
    asked(judge, ask, cache_size=2)
    assert [body["messages"][0]["content"] for body in judge.bodies] == list("abcb")


def test_a_rollout_that_is_cancelled_leaves_its_request_to_those_who_wait_for_the_same():
    async def ask(client: ModelClient):
        first = asyncio.create_task(client.chat(ASK))
        await asyncio.sleep(0.02)
        second = asyncio.create_task(client.chat(ASK))
        await asyncio.sleep(0.02)
        first.cancel()
        return (await second).text

    judge = Judge("1", delay_s=0.2)
    assert asked(judge, ask) == "1" and len(judge.bodies) == 1


@pytest.mark.heavy
def test_a_request_that_fails_after_its_rollout_was_cancelled_is_asked_again():
    async def ask(client: ModelClient):
        first = asyncio.create_task(client.chat(ASK))
        await asyncio.sleep(0.02)
        first.cancel()
        await asyncio.sleep(0.3)
        return (await client.chat(ASK)).is_cached

    judge = Judge(500, "1", delay_s=0.1)
    assert asked(judge, ask, max_retries=0) is False and len(judge.bodies) == 2


ANSWERS = {
    "parts": ('{"choices": [{"message": {"content": [{"type": "text", "text": "a"}]}}]}', "a"),
    "a number": ('{"choices": [{"message": {"content": 5}}]}', None),
    "parts without a type": ('{"choices": [{"message": {"content": ["a"]}}]}', None),
    "a reason that is none": ('{"choices": [{"message": {"content": "a"}, "finish_reason": 5}]}', None),
    "a count that is none": ('{"choices": [{"message": {"content": "a"}}], "usage": {"prompt_tokens": "x"}}', None),
    "an error": ('{"error": {"message": "quota"}}', None),
    "a page": ("<html>", None),
    "no HTTP": (None, None),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_is_no_reply_is_the_servers_fault_and_not_kept(name):
    body, text = ANSWERS[name]
    raw = "GARBAGE\r\n\r\n" if body is None else f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}"

    async def answer(reader, writer):
        await reader.read(65536)
        writer.write(raw.encode())
        writer.close()

    async def run():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, AsyncExitStack() as stack:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            place = FrozenModelPlace(base_url=url, model="big", timeout_s=20.0, max_retries=0)
            client = open_models({"judge": place}, stack)["judge"]
            if text is not None:
                return (await client.chat(ASK)).text
            for _ in range(2):
                with pytest.raises(EngineError, match=r"models\.judge"):
                    await client.chat(ASK)
            assert not client.counts["cached"] and client.counts["failed"] == 2
            return None

    assert asyncio.run(run()) == text


def test_an_address_that_leads_in_a_circle_is_named_and_not_asked_again():
    async def turn(request):
        raise web.HTTPTemporaryRedirect("/v1/chat/completions")

    judge = Judge("1")
    judge.chat = turn
    with pytest.raises(EngineError, match=r"models.judge.*TooManyRedirects.*correct the address"):
        asked(judge, lambda client: client.chat(ASK))


def test_no_more_requests_run_at_once_than_max_concurrent():
    judge = Judge("1", delay_s=0.02)
    asked(judge, lambda client: asyncio.gather(*(client.chat(ASK, temperature=1) for _ in range(9))), max_concurrent=3)
    assert judge.most_running == 3 and len(judge.bodies) == 9


def test_requests_per_minute_spaces_the_requests():
    judge, began = Judge("1"), time.monotonic()
    ask = lambda client: asyncio.gather(*(client.chat(ASK, temperature=1) for _ in range(4)))
    asked(judge, ask, requests_per_minute=1200)
    assert time.monotonic() - began >= 3 * 60 / 1200


@pytest.mark.heavy
def test_too_many_requests_are_asked_again_after_the_time_that_the_server_names():
    judge, began = Judge((429, 0.4), (503, 0.1), "1"), time.monotonic()
    assert asked(judge, lambda client: client.chat(ASK), max_retries=0).text == "1"
    assert time.monotonic() - began >= 0.5


@pytest.mark.heavy
def test_a_server_that_stays_full_fails_after_timeout_s_with_its_last_answer():
    with pytest.raises(EngineError, match=r"no reply in 0.5 s.*429.*busy"):
        asked(Judge((429, 0.1)), lambda client: client.chat(ASK), timeout_s=0.5)


def test_a_refused_request_is_the_environments_error_and_not_repeated():
    judge = Judge(400)
    with pytest.raises(EnvError, match=r"models.judge refuses the request.*400"):
        asked(judge, lambda client: client.chat(ASK))
    assert len(judge.bodies) == 1


@pytest.mark.parametrize("messages", [[{"role": "usr", "content": "a"}], [{"role": "user", "content": 5}]])
def test_messages_are_checked_before_they_are_sent(messages):
    judge = Judge("1")
    with pytest.raises(EnvError, match=r"models\.judge"):
        asked(judge, lambda client: client.chat(messages))
    assert not judge.bodies


def test_a_key_goes_to_the_server_and_one_that_is_not_set_is_named(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    judge = Judge("1")
    asked(judge, lambda client: client.chat(ASK), api_key_var="JUDGE_KEY")
    assert judge.keys == ["Bearer s3cret"]
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match=r"models.judge.client.api_key_var.*JUDGE_KEY"):
        asked(judge, lambda client: client.chat(ASK), api_key_var="JUDGE_KEY")


def test_a_server_is_ready_when_it_lists_its_models_or_has_no_list():
    for has_list, expected in ((True, "first"), (False, "big")):
        judge = Judge("1", has_list=has_list)

        async def ask(client: ModelClient):
            await client.wait_ready(5.0)
            return await client.chat(ASK)

        asked(judge, ask, model=None if has_list else "big")
        assert judge.bodies[0]["model"] == expected


def test_a_wrong_key_ends_the_wait_at_once(monkeypatch):
    judge = Judge("1", has_list=None)
    monkeypatch.setenv("JUDGE_KEY", "x")
    with pytest.raises(EngineError, match=r"401.*correct the key in JUDGE_KEY"):
        asked(judge, lambda client: client.wait_ready(30.0), api_key_var="JUDGE_KEY")


def test_one_that_is_not_there_is_named_after_the_wait(tmp_path):
    places = {"judge": FrozenModelPlace(base_url="http://127.0.0.1:9", model="m", ready_timeout_s=0.2)}
    cfg = OrchestratorConfig(frozen_models=places, env=[{"id": "sort-letters"}], output_dir=tmp_path)

    async def run():
        async with AsyncExitStack() as stack:
            await open_beside(cfg, stack).wait_ready()

    with pytest.raises(EngineError, match=r"\[models.judge\] not ready after 0.2 s"):
        asyncio.run(run())


def test_an_address_without_a_path_gets_v1():
    assert chat_url("http://h:8000/") == "http://h:8000/v1"
    assert chat_url("https://h/api/openai/v1") == "https://h/api/openai/v1"


def test_the_table_of_eval_says_the_same_as_that_of_rl():
    place = AskedModelSection(base_url="http://h/v1", served_model_name="m", client={"max_concurrent": 3}).place
    assert (place.base_url, place.model, place.max_concurrent, place.timeout_s) == ("http://h/v1", "m", 3, 120.0)


# -- in environments --


def played(env_id: str, models, monkeypatch, num_workers: int = 0, **args):
    """The rollouts of one group; `models` are the clients, or a judge that is served for it."""
    monkeypatch.syspath_prepend(str(HERE))

    async def run():
        async with AsyncExitStack() as stack:
            clients = models
            if isinstance(models, Judge):
                url = await stack.enter_async_context(served(models))
                place = FrozenModelPlace(base_url=url, model="big", max_retries=0)
                clients = open_models({"judge": place}, stack)
            if num_workers:
                env = open_workers(env_id, args, "test", num_workers=num_workers, models=clients)
                stack.push_async_callback(env.close)
            else:
                env = load_environment(env_id, args, "test", RunInfo(models=clients))
            engine, sampling = FakeEngine(parrot(1.0)), SamplingSection()
            player = Player(engine, CharRenderer(), sampling, seq_len=4000, max_retries=0, models=clients)
            return (await player.play(env, Draw(0, env.tasks("train").task(0), 2, version=0))).rollouts

    return asyncio.run(run())


ENVS = ("judge_envs:Judged", "judge_envs:JudgedTurns")


@pytest.mark.parametrize("env_id", ENVS)
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.heavy)])
def test_the_answer_of_a_judge_is_the_reward_also_in_worker_processes(env_id, num_workers, monkeypatch):
    judge = Judge("0.25")
    rollouts = played(env_id, judge, monkeypatch, num_workers)
    assert [rollout.reward for rollout in rollouts] == [0.25, 0.25], [rollout.error for rollout in rollouts]
    assert len(judge.bodies) == 1  # the cache is that of the run, not of a worker


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.heavy)])
def test_a_judge_that_does_not_answer_fails_the_rollout_unless_it_is_caught(num_workers, monkeypatch):
    failed = played("judge_envs:Judged", Judge(500), monkeypatch, num_workers)
    assert {rollout.status for rollout in failed} == {RolloutStatus.FAILED}
    assert "models.judge" in failed[0].error
    caught = played("judge_envs:JudgedTurns", Judge(500), monkeypatch, num_workers)
    assert [rollout.reward for rollout in caught] == [-1.0, -1.0]


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("env_id", ENVS)
def test_a_model_that_the_run_has_not_is_named_with_those_that_it_has(env_id, num_workers, monkeypatch):
    known = {"judge": Unreachable("judge")}
    rollouts = played(env_id, known, monkeypatch, num_workers, model="jugde")
    assert "did you mean 'judge'?" in rollouts[0].error
