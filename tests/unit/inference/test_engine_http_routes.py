import asyncio
import json
import logging

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer
from engine_runs import build_core
from http_site import MESSAGES, build_directory, open_site
from processes.add_ons import needs
from processes.forked import fork_children_of

from stretto.base import process
from stretto.base.errors import EngineError
from stretto.chat.tokenizer import load_tokenizer
from stretto.config.root import EvalConfig
from stretto.inference.boundary import build_app
from stretto.monitors.file import read_metrics
from stretto.orchestrator.eval.verb import evaluate_engine
from stretto.records.generate import GenerateRequest, SamplingParams
from stretto.transports.engine import api
from stretto.transports.engine.client import EngineClient


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return build_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def site(directory):
    async with open_site(directory) as site:
        yield site


async def test_generate_speaks_vllms_schema(site):
    body = {
        "token_ids": [20, 21, 22],
        "sampling_params": {
            "n": 2,
            "max_tokens": 5,
            "seed": 1,
            "logprobs": 0,
            "prompt_logprobs": 0,
            "ignore_eos": True,
        },
        "request_id": "abc",
        "model": "tiny",
    }
    status, answer = await site.post(api.GENERATE, body)
    assert status == 200
    assert answer["request_id"] == "abc"
    assert answer["usage"]["prompt_tokens"] == 3 and answer["usage"]["completion_tokens"] == 10
    assert answer["prompt_logprobs"][0] is None and list(answer["prompt_logprobs"][1]) == ["21"]
    for index, choice in enumerate(answer["choices"]):
        assert choice["index"] == index
        assert choice["finish_reason"] == "length" and choice["stop_reason"] is None
        assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 5}]
        assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]


async def test_the_client_gets_exactly_what_the_engine_made(site):
    request = GenerateRequest(
        request_id="r", prompt_ids=np.array([20, 30], np.int32), n=3, prompt_logprobs=True, cache_salt="4",
        top_prompt_logprobs=5, prompt_targets=np.array([[7, -1, 9]], np.int32),
        sampling=SamplingParams(
            temperature=0.8, top_p=0.95, top_k=50, min_p=0.01, max_tokens=9, seed=5, stop_token_ids=(7,)
        ),
    )  # fmt: skip
    async with EngineClient([site.url + "/v1"], api_key="secret", model="tiny") as client:
        completions = await client.generate(request)
    direct = build_core(site.engine.core.model, eos_ids=site.engine.core.settings.eos_ids)
    engine_request = direct.build_request(request)
    direct.submit(engine_request)
    while direct.has_work:
        direct.step()
    for got, made in zip(completions, engine_request.completions):
        assert got.token_ids.tobytes() == made.token_ids.tobytes()
        assert got.logprobs.tobytes() == made.logprobs.tobytes()
        for name in ("prompt_logprobs", "top_prompt_ids", "top_prompt_logprobs"):
            assert getattr(got, name).tobytes() == getattr(made, name).tobytes()
        np.testing.assert_array_equal(got.target_prompt_logprobs, made.target_prompt_logprobs)
        assert (got.finish_reason, got.versions) == (made.finish_reason, made.versions)


BAD = [
    (b"{not json", 400, "not JSON"),
    (b"\xff\xfe", 400, "not JSON"),
    ({}, 400, "token_ids"),
    ({"token_ids": "abc"}, 400, "token_ids"),
    ({"token_ids": []}, 400, "empty"),
    ({"token_ids": [1, 99999]}, 400, "99999 is out of vocabulary"),
    ({"token_ids": [1, 2**40]}, 400, "out of vocabulary"),
    ({"token_ids": [-1]}, 400, "-1 is out of vocabulary"),
    ({"token_ids": [1] * 512}, 400, "512"),
    ({"token_ids": [1], "tokens": []}, 400, "unknown field `tokens`"),
    ({"token_ids": [1], "sampling_params": {"temprature": 1}}, 400, "unknown field `temprature`"),
    ({"token_ids": [1], "sampling_params": {"temperature": -0.5}}, 400, "temperature: -0.5"),
    ({"token_ids": [1], "sampling_params": {"temperature": "hot"}}, 400, "temperature"),
    ({"token_ids": [1], "sampling_params": {"n": 0}}, 400, "n: 0"),
    ({"token_ids": [1], "sampling_params": {"logprobs": 5}}, 400, "logprobs"),
    ({"token_ids": [1], "sampling_params": {"presence_penalty": 0.5}}, 400, "presence_penalty"),
    ({"token_ids": [1], "features": {"x": 1}}, 400, "features"),
    ({"token_ids": [1], "stream": True}, 400, "stream"),
    ({"token_ids": [1], "cache_salt": ""}, 400, "cache_salt"),
    ({"token_ids": [1], "model": "gpt-5"}, 404, "gpt-5"),
]


@pytest.mark.heavy
@pytest.mark.parametrize(("body", "code", "words"), BAD, ids=[str(i) for i in range(len(BAD))])
async def test_bad_input_is_a_clear_error(site, body, code, words):
    status, answer = await site.post(api.GENERATE, body)
    assert status == code == answer["error"]["code"]
    assert words in answer["error"]["message"]
    assert answer["error"]["type"]
    assert not site.engine.core.requests


async def test_settings_with_their_neutral_value_are_fine(site):
    neutral = {
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "top_k": -1,
        "max_tokens": 1,
        "logit_bias": None,
    }
    status, _ = await site.post(api.GENERATE, {"token_ids": [1], "sampling_params": neutral, "features": None})
    assert status == 200


async def test_before_the_model_is_loaded_everything_but_liveness_is_503(site):
    engine, site.server.engine = site.server.engine, None
    assert (await site.get(api.LIVENESS))[0] == 200
    assert (await site.get(api.HEALTH))[0] == 503
    assert (await site.post(api.GENERATE, {"token_ids": [1]}))[0] == 503
    async with EngineClient([site.url]) as client:
        with pytest.raises(EngineError, match=r"not ready after 0.2 s.*being loaded"):
            await client.wait_ready(0.2)
        site.server.engine = engine
        await client.wait_ready(5)


async def test_too_many_requests_are_429_and_the_client_tries_again(site):
    async with EngineClient([site.url], api_key="secret", max_retries=20) as client:
        await client._all("POST", f"{api.PAUSE}?mode=keep")
        specs = [
            GenerateRequest(
                request_id=f"r{i}", prompt_ids=np.array([20], np.int32), sampling=SamplingParams(max_tokens=2)
            )
            for i in range(12)
        ]
        tasks = [asyncio.create_task(client.generate(spec)) for spec in specs]
        while site.engine.num_waiting < 8:
            await asyncio.sleep(0.001)
        status, answer = await site.post(api.GENERATE, {"token_ids": [1]})
        assert status == 429 and "max_waiting_requests" in answer["error"]["message"]
        await client._all("POST", api.RESUME)
        assert len(await asyncio.gather(*tasks)) == 12


@needs("prime")
async def test_the_verb_eval_says_which_version_the_engine_has_and_logs_a_row(site, directory, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    site.engine.core.version = 7
    cfg = EvalConfig.model_validate(
        {"client": {"base_url": site.url}, "tokenizer": {"name": str(directory)}, "output_dir": tmp_path}
        | {"eval": {"env": [{"id": "sort-letters"}], "num_examples": 2, "sampling": {"max_tokens": 8}}}
    )
    scores = await evaluate_engine(cfg)
    assert [(score.mode, score.version, score.versions) for score in scores] == [
        ("sampled", 7, (7, 7)),
        ("greedy", 7, (7, 7)),
    ]
    assert cfg.run_dir.eval_results(7).exists()
    (row,) = read_metrics(cfg.run_dir.metrics("eval"))
    assert row["step"] == 7 and row["eval/sort-letters/greedy/mean"] == scores[1].mean


@pytest.mark.heavy
@pytest.mark.parametrize("is_in_config", [True, False])
async def test_the_verb_evals_own_engine_asks_for_the_key_its_client_sends_and_no_file_has_it(
    directory, tmp_path, monkeypatch, is_in_config
):
    fork_children_of(monkeypatch, process)
    start, keys = process.start, []
    monkeypatch.setattr(
        process, "start", lambda *args, env, **how: keys.append(env["VLLM_API_KEY"]) or start(*args, env=env, **how)
    )
    monkeypatch.setenv("VLLM_API_KEY", "of-another-server")
    if not is_in_config:
        monkeypatch.setenv("OURS", "s3cret")
    cfg = EvalConfig.model_validate(
        {"model": str(directory), "client": {"api_key_var": "OURS"}, "output_dir": tmp_path}
        | {"inference": {"engine": "embedded", "api_key": "s3cret" if is_in_config else None}}
        | {"eval": {"env": [{"id": "sort-letters"}], "num_examples": 1, "sampling": {"max_completion_tokens": 4}}}
    )
    assert await evaluate_engine(cfg)
    assert keys == ["s3cret"]
    files = [path for path in cfg.run_dir.path.rglob("*") if path.is_file()]
    assert files and not [path for path in files if b"s3cret" in path.read_bytes()]


async def test_admin_routes(site):
    async with EngineClient([site.url], api_key="secret") as client:
        await client._all("POST", f"{api.PAUSE}?mode=wait")
        assert json.loads((await site.get(api.IS_PAUSED))[1]) == {"is_paused": True}
        await client._all("POST", api.RESUME)
        assert json.loads((await site.get(api.IS_PAUSED))[1]) == {"is_paused": False}
        await client._all("POST", api.RESET_PREFIX_CACHE)
        await client.abort(["unknown"])
        await client.abort()
        with pytest.raises(EngineError, match="mode: 'now' is not one of"):
            await client._all("POST", f"{api.PAUSE}?mode=now")
    assert (await site.post(api.ABORT_REQUESTS))[0] == 200
    assert (await site.post(api.UPDATE_WEIGHTS, {"version": "x"}))[0] == 400


async def test_metrics_are_prometheus_text_under_vllms_names(site):
    await site.post(api.GENERATE, {"token_ids": [20] * 40, "sampling_params": {"max_tokens": 4, "ignore_eos": True}})
    await site.post(api.GENERATE, {"token_ids": [20] * 40, "sampling_params": {"max_tokens": 4, "ignore_eos": True}})
    status, text = await site.get(api.METRICS)
    assert status == 200
    for line in text.strip().splitlines():
        assert line.startswith("# TYPE vllm:") or float(line.rpartition(" ")[2]) >= 0
    async with EngineClient([site.url], api_key="secret") as client:
        metrics = await client.metrics()
    assert metrics["vllm:generation_tokens_total"] == 8
    assert metrics["vllm:prompt_tokens_total"] == 80
    assert metrics["vllm:prefix_cache_hits_total"] == 32
    assert metrics["vllm:request_success_total"] == 2
    assert metrics["vllm:time_to_first_token_seconds_count"] == 2
    assert metrics["vllm:num_requests_running"] == metrics["vllm:kv_cache_usage_perc"] == 0


async def test_completions_of_text_and_of_token_ids(site):
    base = {"max_tokens": 6, "seed": 3, "logprobs": 0, "return_token_ids": True}
    _, by_text = await site.post(api.COMPLETIONS, base | {"prompt": "abc"})
    _, by_ids = await site.post(api.COMPLETIONS, base | {"prompt": load_tokenizer(site.server.directory).encode("abc")})
    assert by_text["choices"][0]["text"] == by_ids["choices"][0]["text"]
    assert by_text["choices"][0]["logprobs"] == by_ids["choices"][0]["logprobs"]
    _, several = await site.post(api.COMPLETIONS, base | {"prompt": ["abc", "de"], "n": 2, "echo": True})
    assert [c["index"] for c in several["choices"]] == [0, 1, 2, 3]
    assert several["choices"][0]["text"] == "abc" + by_text["choices"][0]["text"]
    assert several["choices"][0]["logprobs"]["token_logprobs"][0] is None
    assert several["usage"]["prompt_tokens"] == 5


async def test_streamed_completions_add_up_to_the_whole(site):
    body = {"prompt": ["abc", "x"], "n": 2, "max_tokens": 12, "seed": 3, "stop": ["zz", "q"]}
    _, whole = await site.post(api.COMPLETIONS, body)
    events = await site.events(api.COMPLETIONS, body | {"stream": True, "stream_options": {"include_usage": True}})
    for choice in whole["choices"]:
        pieces = [e["choices"][0] for e in events if e["choices"] and e["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]
        assert all(piece["finish_reason"] is None for piece in pieces[:-1])
    assert events[-1]["usage"] == whole["usage"]


@pytest.mark.heavy
@pytest.mark.parametrize("length", [1, 3])
async def test_a_stop_text_is_not_streamed_unless_it_came_too_early_to_count(site, length):
    base = {"prompt": "abc", "max_tokens": 200, "seed": 3, "ignore_eos": True}
    _, free = await site.post(api.COMPLETIONS, base)
    text = free["choices"][0]["text"]
    late = text[60 : 60 + length]
    early = next(each for each in text[:4] if each in text[20:])
    for stops, min_tokens in (([late], 0), ([early, late], 8)):
        body = base | {"stop": stops, "min_tokens": min_tokens}
        _, whole = await site.post(api.COMPLETIONS, body)
        (choice,) = whole["choices"]
        assert choice["finish_reason"] == "stop" and text.startswith(choice["text"])
        assert not min_tokens or early in choice["text"]
        events = await site.events(api.COMPLETIONS, body | {"stream": True})
        assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]


@pytest.mark.heavy
async def test_chat_completions_stop_at_the_turns_end_and_stream_the_same(site):
    body = {"messages": MESSAGES, "max_tokens": 40, "n": 4, "seed": 2, "logprobs": True, "return_token_ids": True}
    _, whole = await site.post(api.CHAT_COMPLETIONS, body)
    assert whole["object"] == "chat.completion" and whole["usage"]["prompt_tokens"] == len(whole["prompt_token_ids"])
    _, tokens = await site.post(api.TOKENIZE, {"messages": MESSAGES})
    assert tokens["tokens"] == whole["prompt_token_ids"]
    for choice in whole["choices"]:
        assert choice["message"]["role"] == "assistant"
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    events = await site.events(api.CHAT_COMPLETIONS, body | {"stream": True})
    for choice in whole["choices"]:
        pieces = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert pieces[0]["delta"]["role"] == "assistant"
        assert [i for piece in pieces for i in piece.get("token_ids", [])] == choice["token_ids"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]


async def test_chat_with_tools_streams_one_whole_message(site):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    body = {"messages": MESSAGES, "max_tokens": 10, "seed": 2, "tools": tools, "stream": True}
    events = await site.events(api.CHAT_COMPLETIONS, body)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "empty"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": MESSAGES, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": MESSAGES, "top_logprobs": 3}, "top_logprobs"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"mood": 1}}, "mood"),
        ({"messages": MESSAGES, "temperature": -1}, "temperature"),
        ({"messages": MESSAGES, "stream": True, "temperature": -1}, "temperature"),
        ({"messages": MESSAGES, "stream_options": {"x": 1}}, "stream_options"),
    ],
)
async def test_bad_chat_input_is_a_clear_error(site, body, words):
    status, answer = await site.post(api.CHAT_COMPLETIONS, body)
    assert status == 400
    assert words in answer["error"]["message"]


async def test_a_malformed_call_is_text_of_the_answer(site, monkeypatch):
    said = {"role": "assistant", "content": "I look.", "unparsed_tool_calls": ['{"name": "look_up", ']}
    monkeypatch.setattr("stretto.chat.render.Renderer.parse", lambda *_: said)
    _, answer = await site.post(api.CHAT_COMPLETIONS, {"messages": MESSAGES, "max_tokens": 1})
    message = answer["choices"][0]["message"]
    assert message == {"role": "assistant", "content": 'I look.\n{"name": "look_up", '}


async def test_chats_that_come_at_once_build_their_renderer_once(site, caplog):
    caplog.set_level("INFO", logger="stretto.inference.openai")
    body = {"messages": MESSAGES, "max_tokens": 1}
    answers = await asyncio.gather(*(site.post(api.CHAT_COMPLETIONS, body) for _ in range(5)))
    assert {status for status, _ in answers} == {200} and caplog.text.count("chats are rendered by") == 1


async def test_a_chat_does_not_wait_for_the_renderers_of_others(site):
    body = {"messages": MESSAGES, "max_tokens": 1}
    assert (await site.post(api.CHAT_COMPLETIONS, body))[0] == 200
    async with site.server.openai._building:  # one with other settings is built
        assert (await asyncio.wait_for(site.post(api.CHAT_COMPLETIONS, body), 30))[0] == 200


async def test_tokenize_and_detokenize_are_inverse(site):
    _, tokens = await site.post(api.TOKENIZE, {"prompt": "hello world"})
    assert tokens["count"] == 11 and tokens["max_model_len"] == 512
    assert (await site.post(api.DETOKENIZE, {"tokens": tokens["tokens"]}))[1] == {"prompt": "hello world"}
    assert (await site.post(api.DETOKENIZE, {"tokens": [10**6]}))[0] == 400
    assert (await site.post(api.TOKENIZE, {}))[0] == 400


async def test_an_unexpected_error_is_a_500_with_an_id(site, caplog):
    site.server.openai._renderers["[]"] = object()  # no renderer at all
    status, answer = await site.post(api.CHAT_COMPLETIONS, {"messages": MESSAGES}, headers={"X-Request-Id": "id-7"})
    assert status == 500
    assert "id-7" in answer["error"]["message"] and "id-7" in caplog.text
    assert (await site.get(api.HEALTH))[0] == 200


async def test_sessions_stay_on_one_engine_and_others_spread():
    client = EngineClient(["http://a/v1", "http://b", "http://c/"])
    assert client.urls == ["http://a", "http://b", "http://c"]
    chosen = {client._dispatch.choose(f"session {i}", 0) for i in range(50)}
    assert chosen == set(client.urls)
    assert all(
        client._dispatch.choose(f"session {i}", 0) == client._dispatch.choose(f"session {i}", 0) for i in range(50)
    )
    client._dispatch.num_running = dict(zip(client.urls, [4, 1, 2]))
    assert client._dispatch.choose(None, 0) == "http://b"


async def test_an_engine_that_is_not_there_is_an_engine_error():
    async with EngineClient(["http://127.0.0.1:9"], max_retries=1, timeout_s=10) as client:
        request = GenerateRequest(request_id="r", prompt_ids=np.array([1], np.int32))
        with pytest.raises(EngineError, match=r"generate r: .*after 2 attempts"):
            await client.generate(request)
        with pytest.raises(EngineError, match=r"127\.0\.0\.1:9"):
            await client._all("POST", api.RESUME)


@pytest.mark.parametrize(
    ("error", "level"), [(EngineError("out of blocks"), "ERROR"), (api.EngineStopping("it ends"), "INFO")]
)
async def test_a_request_that_the_end_of_the_engine_cuts_is_answered_and_is_no_error_in_the_log(error, level, caplog):
    async def fail(http):
        raise error

    app = build_app(None)
    app.router.add_get("/work", fail)
    caplog.set_level(logging.INFO, "stretto.inference.boundary")
    async with TestClient(TestServer(app)) as client:
        reply = await client.get("/work")
        assert reply.status == 500
        assert (await reply.json())["error"]["message"] == str(error)
    [record] = [each for each in caplog.records if each.name == "stretto.inference.boundary"]
    assert record.levelname == level
