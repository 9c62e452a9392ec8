"""Requests of functions to the policy: how they sample, what is answered, and whom the engines' key is sent to."""

from __future__ import annotations

import numpy as np
import pytest
from http_site import build_directory, open_site

from stretto.base.errors import EngineError, EnvError
from stretto.envs.base import Reply
from stretto.transports.engine import api
from stretto.vime import post
from stretto_vime.hooks.engine import requests_as_turns, requests_to_engines


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty = 1.1"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"3": 1}}, "logit_bias"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"min_tokens": 3}, r"min_tokens = 3.*\[orchestrator\.train\.replay\]"),
        ({"bad_words": ["a"]}, r"bad_words.*\[orchestrator\.train\.replay\]"),
        ({"allowed_token_ids": [3]}, r"allowed_token_ids.*\[orchestrator\.train\.replay\]"),
    ],
)
async def test_a_rollout_function_may_not_change_the_distribution_that_is_trained(sampling, words):
    url = "http://127.0.0.1:9/inference/v1/generate"

    async def ask(**settings):
        with requests_to_engines(["http://127.0.0.1:9/v1"], lambda: 3, **settings):
            await post(url, {"token_ids": [1], "sampling_params": sampling}, max_retries=0)

    with pytest.raises(EnvError, match=words):
        await ask(is_truncated_sampling_refused=True, is_trained=True)
    with pytest.raises(EngineError, match="no answer"):  # an eval's; nobody listens there
        await ask()


async def test_a_hooks_request_gets_the_stop_that_ended_its_turn():
    class Ctx:
        async def generate(self, prompt_ids, **sampling):
            self.sampling = sampling
            ids = np.array([ord(char) for char in "a</s>"], np.int32)
            return Reply(message={}, text="a</s>", token_ids=ids, finish_reason="stop", stop_reason="</s>")

    ctx = Ctx()
    settings = {"stop": ["</s>"], "min_tokens": 2, "bad_words": ["x"], "logit_bias": {"3": 1.0}}
    with requests_as_turns(ctx, ["http://127.0.0.1:9/v1"]):
        answer = await post("http://127.0.0.1:9/inference/v1/generate", {"token_ids": [1], "sampling_params": settings})
    assert answer["choices"][0]["stop_reason"] == "</s>" and ctx.sampling == settings


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return build_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def site(directory):
    async with open_site(directory) as site:
        yield site


async def test_a_request_of_a_rollout_function_carries_the_key_to_the_policy_alone(site):
    body = {"token_ids": [20], "sampling_params": {"max_tokens": 2, "ignore_eos": True}}
    with requests_to_engines([site.url + "/v1"], lambda: 3, key="secret"):
        answer = await post(site.url + api.GENERATE, body)
    assert len(answer["choices"][0]["token_ids"]) == 2
    with requests_to_engines(["http://127.0.0.1:9"], lambda: 3, key="secret"), pytest.raises(EngineError, match="401"):
        await post(site.url + api.GENERATE, body)
