"""A reward model that is served: scores over HTTP, as an environment asks for them, are those of the network alone."""

from __future__ import annotations

import asyncio
import json
import math
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest
import torch
from aiohttp import ClientSession, web
from processes.add_ons import needs
from tiny import build_policy

from stretto.base.errors import ConfigError, EngineError
from stretto.chat.render import build_renderer
from stretto.chat.tokenizer import build_letters_tokenizer
from stretto.config.root import InferenceConfig
from stretto.config.sections.distill import FrozenModelPlace
from stretto.config.sections.model import ScratchSection
from stretto.envs.base import RunInfo, load_environment
from stretto.envs.workers.pool import open_workers
from stretto.launch.plan.beside import engines_beside
from stretto.models import hub
from stretto.models.attention import PackedLayout
from stretto.models.value_head import HEAD_NAME, SCORE_NAME, classification_config, load_value_model, with_value_head
from stretto_frozen.clients import open_models
from stretto_preference.scorer import ScoreServer, score_texts

SCRATCH = ScratchSection(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
USER = {"role": "user", "content": "sort dcab"}


def conversation(reply):
    return [USER, {"role": "assistant", "content": reply}]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """A directory for sequence classification with one label, whose scores differ."""
    torch.manual_seed(4)
    folder = tmp_path_factory.mktemp("reward")
    tokenizer = build_letters_tokenizer(folder / "tokenizer")
    module = with_value_head(hub.random_model(SCRATCH, 112, eos_token_id=2))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    tensors = ((SCORE_NAME if name == HEAD_NAME else name, t) for name, t in hub.export_tensors(module))
    hub.save_model_directory(torch.float32, folder / "model", tokenizer, classification_config(module), tensors)
    return folder / "model"


def alone(directory, reply):
    """The score of one conversation, by itself."""
    model = load_value_model(directory, dtype=torch.float32, device="cpu")
    ids = torch.from_numpy(build_renderer(directory).render_leading(conversation(reply)).astype(np.int64))
    with torch.no_grad():
        return (model.hidden(ids, PackedLayout((0, len(ids)), ids.device)) @ model.output_weight.T)[-1, 0].item()


@asynccontextmanager
async def served(directory, **settings):
    cfg = InferenceConfig(model=str(directory), dtype="float32", device="cpu", **settings)
    server = ScoreServer(cfg, directory)
    runner = web.AppRunner(server.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    work = asyncio.create_task(server.run())
    try:
        yield server, f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        work.cancel()
        await runner.cleanup()


def place(url):
    return FrozenModelPlace(base_url=url, timeout_s=60.0)


@pytest.mark.heavy
def test_scores_of_many_at_once_are_those_of_each_alone(reward_model):
    replies = ["abcd", "acbd", "dcba", "a", "abcdabcdabcd", ""]

    async def ask():
        async with served(reward_model, max_num_batched_tokens=64) as (server, url), AsyncExitStack() as stack:
            client = open_models({"rm": place(url)}, stack)["rm"]
            await client.wait_ready(60)
            found = await asyncio.gather(*(client.score(conversation(each)) for each in replies * 2))
            return found, server._num_scored, server._num_passes

    found, num_scored, num_passes = asyncio.run(ask())
    assert found == pytest.approx([alone(reward_model, each) for each in replies] * 2, abs=1e-4)
    assert len(set(found)) == len(replies)
    assert num_scored == len(replies), "equal conversations are scored once"
    assert num_passes < num_scored


@pytest.mark.heavy
def test_the_route_is_that_of_vllm(reward_model):
    async def ask():
        async with served(reward_model) as (_, url), ClientSession() as http, AsyncExitStack() as stack:
            await open_models({"rm": place(url)}, stack)["rm"].wait_ready(60)
            answers = []
            for body in (
                {"messages": conversation("abcd")},
                {"input": ["sort", [5, 6, 7]], "use_activation": False},
                {"messages": conversation("a"), "input": "a"},
                {"input": [9999]},
                {"model": "other", "input": "a"},
                {"messages": conversation("a"), "chat_template_kwargs": {"x": 1}},
            ):
                async with http.post(f"{url}/classify", json=body) as answer:
                    answers.append((answer.status, await answer.json()))
            return answers

    (status, whole), (_, raw), both, unknown, other, kwargs = asyncio.run(ask())
    assert status == 200 and whole["data"][0]["num_classes"] == 1
    assert whole["data"][0]["probs"] == pytest.approx([1 / (1 + math.exp(-alone(reward_model, "abcd")))], abs=1e-4)
    assert [each["index"] for each in raw["data"]] == [0, 1]
    assert [each[0] for each in (both, unknown, other, kwargs)] == [400, 400, 404, 400]
    assert "either `messages` or `input`" in json.dumps(both[1])


@pytest.mark.heavy
@pytest.mark.parametrize("num_workers", [None, pytest.param(1, marks=pytest.mark.heavy)])
def test_a_reward_by_name_is_the_score_also_in_worker_processes(reward_model, tmp_path, num_workers):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": [USER], "label": "abcd"}) + "\n")
    args = {"path": str(path), "rewards": {"models.rm": 2.0, "exact": 1.0}}

    async def ask():
        async with served(reward_model) as (_, url), AsyncExitStack() as stack:
            clients = open_models({"rm": place(url)}, stack)
            await clients["rm"].wait_ready(60)
            if num_workers is None:
                env = load_environment("dataset", args, "test", RunInfo(models=clients))
            else:
                env = open_workers("dataset", args, "test", num_workers=num_workers, models=clients)
                stack.push_async_callback(env.close)
            return await env.score(env.tasks("train").task(0), "abcd")

    result = asyncio.run(ask())
    score = alone(reward_model, "abcd")
    assert result.reward == pytest.approx(2 * score + 1.0, abs=1e-4)
    assert result.metrics == pytest.approx({"reward_rm": score, "reward_exact": 1.0}, abs=1e-4)


def test_a_reward_by_a_name_that_the_run_does_not_have_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "label": "b"}) + "\n")
    with pytest.raises(
        ConfigError, match=r'reward = "models.rm": no model .rm. in this run; add a table \[models.rm\]'
    ):
        load_environment("dataset", {"path": str(path), "reward": "models.rm"}, "test", RunInfo())


def test_a_language_model_has_no_score(reward_model):
    async def refuse(request):
        return web.json_response({"error": {"message": "does not support this"}}, status=404)

    async def ask():
        app = web.Application()
        app.router.add_post("/classify", refuse)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        async with AsyncExitStack() as stack:
            stack.push_async_callback(runner.cleanup)
            with pytest.raises(EngineError, match="`score` asks a reward model"):
                await open_models({"rm": FrozenModelPlace(base_url=url, model="x")}, stack)["rm"].score(
                    conversation("a")
                )

    asyncio.run(ask())


@needs("frozen")
def test_a_reward_model_is_served_without_vllm(reward_model, tmp_path):
    from stretto.config.root import RLConfig

    base = {"max_steps": 1, "output_dir": str(tmp_path), "orchestrator": {"env": [{"id": "sort-letters"}]}}
    root = lambda **keys: RLConfig.model_validate(base | {"models": {"rm": {"model": str(reward_model), **keys}}})
    chosen = lambda cfg: engines_beside(cfg).with_engines(cfg)
    assert chosen(root()).models["rm"].engine == "embedded"
    with pytest.raises(ConfigError, match=r"start `vllm serve .*` yourself and give its address as models.rm.base_url"):
        chosen(root(engine="vllm"))


def test_texts_of_any_lengths_are_scored_in_one_pass():
    module = with_value_head(build_policy(3))
    module.lm_head.weight.data = torch.linspace(-1, 1, module.config.hidden_size)[None]
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 40, n).astype(np.int32) for n in (7, 1, 12, 7)]
    one_by_one = [score_texts(module, [each])[0] for each in texts]
    assert score_texts(module, texts) == pytest.approx(one_by_one, abs=1e-4)
