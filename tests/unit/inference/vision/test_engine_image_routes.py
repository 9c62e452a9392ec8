"""Images over the engine's HTTP routes: what the client sends is what is computed, and each fault is one message."""

from __future__ import annotations

import asyncio
import gc

import msgspec
import numpy as np
import pytest
from http_site import build_directory, open_site

from stretto.chat.patches import load_image_processor
from stretto.chat.placeholders import PLACEHOLDER
from stretto.chat.render import build_renderer
from stretto.config.sections.model import ScratchVisionSection
from stretto.data.pictures import data_url
from stretto.envs.bundled.count_shapes import draw_shapes
from stretto.records.generate import GenerateRequest, SamplingParams
from stretto.records.images import image_of
from stretto.transports.engine import api
from stretto.transports.engine.client import EngineClient

PICTURE = data_url(draw_shapes(3, 1, 4, 32))


def show(url: str = PICTURE, text: str = "how many?") -> list[dict]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return build_directory(tmp_path_factory.mktemp("model"), family="qwen3_vl", vision=ScratchVisionSection())


@pytest.fixture
async def site(directory):
    async with open_site(directory) as site:
        yield site


@pytest.fixture(scope="module")
def request_of(directory):
    """A request for the reply to `show`, with pixels beside the tokens."""
    renderer = build_renderer(directory, model_type="qwen3_vl", images=load_image_processor(directory))
    return GenerateRequest(
        request_id="r",
        prompt_ids=renderer.render_prompt(show()),
        n=2,
        sampling=SamplingParams(max_tokens=5, temperature=0, ignore_eos=True),
        cache_salt="0",
        prompt_logprobs=True,
        images=renderer.images_of(show()),
        image_token_id=renderer.image_token_id,
    )


async def test_the_client_gets_what_the_engine_makes_of_an_image(site, request_of):
    async with EngineClient([site.url], api_key="secret", model="tiny") as client:
        got = await client.generate(request_of)
    made = await site.engine.generate(msgspec.structs.replace(request_of, request_id="direct", cache_salt="1"))
    for one, other in zip(got, made.completions, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_array_equal(one.prompt_logprobs, other.prompt_logprobs)
    assert site.engine.core.images.num_encoded == 1


@pytest.mark.heavy
async def test_requests_that_show_the_same_image_keep_its_pixels_once(site, request_of, monkeypatch):
    """They do so while they wait, and no longer."""
    generate, seen = site.engine.generate, []
    monkeypatch.setattr(site.engine, "generate", lambda request: seen.append(request) or generate(request))
    for name in "ab":
        status, answer = await site.post(
            api.GENERATE, api.encode_generate(msgspec.structs.replace(request_of, request_id=name), "tiny")
        )
        assert status == 200, answer
    assert len(seen) == 2 and seen[0].images[0] is seen[1].images[0]
    assert len(site.engine.core.images._in_use) == 1
    seen.clear()
    async with asyncio.timeout(10):  # the engine's thread may hold its last result a moment longer
        while site.engine.core.images._in_use:
            gc.collect()
            await asyncio.sleep(0.01)


def noise(request: GenerateRequest, count: int) -> list[GenerateRequest]:
    """The request with so many other images in turn."""
    rng, [shown] = np.random.default_rng(0), request.images
    images = [image_of(rng.random(shown.patches.shape, np.float32), shown.grid) for _ in range(count)]
    return [msgspec.structs.replace(request, request_id=f"r{i}", images=(x,)) for i, x in enumerate(images)]


@pytest.mark.heavy
async def test_a_flood_of_images_is_refused_beyond_a_bound_in_bytes_and_served_later(directory, request_of):
    bodies = [api.encode_generate(request, "tiny") for request in noise(request_of, 40)]
    size = len(bodies[0])
    async with open_site(directory, max_waiting=100, max_open_bytes=10 * size) as site:
        await site.post(f"{api.PAUSE}?mode=keep")
        waiting = [asyncio.ensure_future(site.post(api.GENERATE, body)) for body in bodies]
        while sum(each.done() for each in waiting) + site.engine.num_waiting < len(bodies):
            await asyncio.sleep(0.01)
        pixels = sum(image.patches.nbytes for image in site.engine.core.images._in_use.values())
        assert 5 * size < pixels <= 10 * size
        refused = [n for n, each in enumerate(waiting) if each.done()]
        for n in refused:
            status, answer = waiting[n].result()
            assert status == 429 and "server.max_open_bytes" in answer["error"]["message"], answer
        picture = {"messages": show(), "max_tokens": 2}
        assert len(refused) > 20 and (await site.post(api.CHAT_COMPLETIONS, picture))[0] == 429
        await site.post(api.RESUME)
        served = [(await each)[0] for n, each in enumerate(waiting) if n not in refused]
        served += [(await site.post(api.GENERATE, bodies[n]))[0] for n in refused]
        assert served == [200] * len(bodies)


@pytest.mark.heavy
async def test_the_client_waits_while_images_fill_an_engine(directory, request_of):
    requests = noise(request_of, 12)
    size = len(api.encode_generate(requests[0], "tiny"))
    async with (
        open_site(directory, max_open_bytes=2 * size) as site,
        EngineClient([site.url], api_key="secret", model="tiny") as client,
    ):
        got = await asyncio.gather(*map(client.generate, requests))
    assert all(len(completions) == 2 for completions in got)


async def test_an_image_that_is_alone_is_served_however_large_it_is(directory, request_of):
    async with open_site(directory, max_open_bytes=1) as site:
        for _ in range(2):
            status, answer = await site.post(api.GENERATE, api.encode_generate(request_of, "tiny"))
            assert status == 200, answer


async def test_a_conversation_with_a_picture_is_answered_as_its_tokens_are(site, request_of):
    body = {"messages": show(), "max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    status, answer = await site.post(api.CHAT_COMPLETIONS, body)
    assert status == 200, answer
    assert answer["prompt_token_ids"] == request_of.prompt_ids.tolist()
    made = await site.engine.generate(request_of)
    assert answer["choices"][0]["token_ids"] == made.completions[0].token_ids.tolist()


def features_without_placeholders(request: GenerateRequest) -> dict:
    body = msgspec.json.decode(api.encode_generate(request, "tiny"))
    ids = [i if i != request.image_token_id else 5 for i in body["token_ids"]]
    return body | {"token_ids": ids}


FAULTS = {
    "an image that cannot be read": ({"messages": show("data:image/png;base64,AAAA")}, "the image cannot be read"),
    "a data URL that is none": ({"messages": show("data:image/png,AAAA")}, "must be `data:image/...;base64,...`"),
    "a file of this host": ({"messages": show("/etc/hostname")}, "an image must be a data URL here"),
    "an address": ({"messages": show("http://localhost/a.png")}, "an image must be a data URL here"),
    "a placeholder as text": ({"messages": [{"role": "user", "content": PLACEHOLDER}]}, "0 images, and 1 placeholders"),
    "an image and a placeholder as text": ({"messages": show(text=PLACEHOLDER)}, "1 images, and 2 placeholders"),
    "an image of the system": ({"messages": [{**show()[0], "role": "system"}]}, "a message of the role 'system'"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_faults_of_conversations_are_messages_and_nothing_is_lost(site, fault):
    body, words = FAULTS[fault]
    status, answer = await site.post(api.CHAT_COMPLETIONS, body | {"max_tokens": 2})
    assert status == 400 and words in answer["error"]["message"], answer
    assert not site.engine.core.requests and not site.engine.core.slots.images
    status, _ = await site.post(api.CHAT_COMPLETIONS, {"messages": show(), "max_tokens": 2})
    assert status == 200


async def test_placeholders_without_images_and_the_reverse_are_messages(site, request_of):
    status, answer = await site.post(api.COMPLETIONS, {"prompt": f"a{PLACEHOLDER}b", "max_tokens": 2})
    assert status == 400 and "1 placeholders of images" in answer["error"]["message"], answer
    alone = msgspec.structs.replace(request_of, images=(), image_token_id=None)
    status, answer = await site.post(api.GENERATE, api.encode_generate(alone, "tiny"))
    assert status == 400 and "4 placeholders of images" in answer["error"]["message"]
    status, answer = await site.post(api.GENERATE, features_without_placeholders(request_of))
    assert status == 400 and "features" in answer["error"]["message"], answer
    assert not site.engine.core.requests


async def test_a_model_of_text_says_that_it_takes_no_images(tmp_path, request_of):
    async with open_site(build_directory(tmp_path)) as site:
        status, answer = await site.post(api.CHAT_COMPLETIONS, {"messages": show(), "max_tokens": 2})
        assert status == 400 and "is a model of text" in answer["error"]["message"], answer
        shown = request_of.prompt_ids == request_of.image_token_id
        ids = np.where(shown, 100, np.minimum(request_of.prompt_ids, 99))
        text = msgspec.structs.replace(request_of, prompt_ids=ids, image_token_id=100)
        status, answer = await site.post(api.GENERATE, api.encode_generate(text, "tiny"))
        assert status == 400 and "it takes no images" in answer["error"]["message"], answer
