"""An environment that shows a picture, and another one in a tool's answer; an engine that looks at both."""

from __future__ import annotations

import random

import numpy as np
from fakes import FakeEngine

from stretto.chat.patches import ImageProcessor
from stretto.chat.placeholders import VISION_TOKENS
from stretto.chat.render import Renderer, build_renderer
from stretto.chat.tokenizer import build_letters_tokenizer, load_tokenizer
from stretto.data.pictures import data_url
from stretto.envs.base import Reply, TaskSource
from stretto.envs.bundled.count_shapes import CountShapes, draw_shapes
from stretto.envs.multi_turn import Episode, MultiTurnEnv
from stretto.records.generate import Completion, GenerateRequest, VersionSpan, member_seed
from stretto.records.rollout import Task
from stretto.transports.engine import api
from stretto.transports.engine.images import VisionSizes, refusal_reason

PROCESSOR = ImageProcessor(patch_size=4, min_pixels=64, max_pixels=4096)
SIZES = VisionSizes.of({"vision_config": {"patch_size": 4}})


def build(directory) -> Renderer:
    tokenizer = load_tokenizer(build_letters_tokenizer(directory, phrases=VISION_TOKENS))
    return build_renderer(tokenizer, model_type="qwen3", images=PROCESSOR)


class Looks(MultiTurnEnv):
    """Two turns: the second picture comes in a tool's answer. Reward: share of right first digits."""

    def __init__(self) -> None:
        self.name = "looks"
        self.shapes = CountShapes()

    def tasks(self, split: str) -> TaskSource:
        return self.shapes.tasks(split)

    def prompt(self, task: Task) -> list[dict]:
        return self.shapes.prompt(task)

    def respond(self, episode: Episode, reply: Reply) -> list[dict] | None:
        if episode.num_turns == 2:
            return None
        encoded = draw_shapes(2, episode.task.data["places"], 4, 24)
        part = {"type": "image_url", "image_url": {"url": data_url(encoded)}}
        return [{"role": "tool", "content": [part, {"type": "text", "text": "and now?"}]}]

    def score(self, episode: Episode) -> float:
        return float(episode.messages[1]["content"].startswith(str(episode.task.data["num_shapes"])))


class SeeingEngine(FakeEngine):
    """Replies depend on the pixels of all images of the prompt, which come through the HTTP body and are checked."""

    def __init__(self, renderer: Renderer, *, placeholder_rate: float = 0.0, **settings) -> None:
        super().__init__(lambda prompt, rng, version: "", **settings)
        self.renderer, self.placeholder_rate = renderer, placeholder_rate
        self.requests: list[GenerateRequest] = []

    def _sample(self, request: GenerateRequest, index: int, first_version: int, share: float) -> Completion:
        sent, _ = api.decode_generate(api.encode_generate(request))
        assert refusal_reason(sent, SIZES) is None
        assert [i.hash for i in sent.images] == [i.hash for i in request.images]
        self.requests.append(sent)
        seen = [float(image.patches.sum()) for image in sent.images]
        rng = random.Random(f"{member_seed(sent.sampling.seed, index)}/{first_version}/{seen}")
        reply = [*self.renderer.encode("".join(rng.choice("1234") for _ in range(6))), self.renderer.stop_ids[0]]
        if rng.random() < self.placeholder_rate:
            reply[1] = self.renderer.image_token_id
        logprobs = [-rng.random() for _ in reply]
        prefix = self.renderer._backend._reply_prefix
        starts = [
            at + len(prefix)
            for at in range(len(sent.prompt_ids) - len(prefix) + 1)
            if np.array_equal(sent.prompt_ids[at : at + len(prefix)], prefix)
        ]
        begun = len(sent.prompt_ids) - starts[-1]
        reply, logprobs = reply[begun:], logprobs[begun:]
        is_cut = share < 1 and int(share * len(reply)) < len(reply)
        end = int(share * len(reply)) if is_cut else len(reply)
        return Completion(
            token_ids=np.array(reply[:end], np.int32),
            logprobs=np.array(logprobs[:end], np.float32),
            finish_reason="abort" if is_cut else "stop",
            versions=(VersionSpan(first_version, 0, end),) if end else (),
        )
