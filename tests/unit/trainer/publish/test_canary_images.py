"""The canary of a model with images shows one, and finds a vision tower that differs from the trainer's."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
import numpy as np
import pytest
import torch
from cases.vision import END, IMAGE, START, build_vision_policy

from stretto.base.errors import EngineError
from stretto.config.sections.model import ModelSection, VisionSection
from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler
from stretto.inference.embedded.core import CoreSettings, EngineCore
from stretto.models.decoder import Decoder
from stretto.orchestrator.versions.loader import VersionLoader
from stretto.records.generate import GenerateRequest, SamplingParams
from stretto.records.weight_manifest import Canary, CanaryImage, TensorEntry, WeightManifest
from stretto.trainer.learner import Learner
from stretto.trainer.publish.canary import score_canary
from stretto.transports.engine.proof import CanaryScores
from stretto.transports.engine.updates import Updated


class CoreEngine:
    """One embedded engine, as the orchestrator asks it."""

    updated: Mapping[str, Updated] = MappingProxyType({})

    def __init__(self, model: Decoder) -> None:
        self.core = EngineCore(model, CoreSettings(kv_cache_tokens=1024, max_num_seqs=4))

    async def update_weights(self, manifest: WeightManifest) -> None:
        """It has its weights."""

    async def score_canary(
        self, token_ids: np.ndarray, name: str, image: CanaryImage | None
    ) -> dict[str, CanaryScores]:
        spec = GenerateRequest(
            request_id=name,
            prompt_ids=token_ids,
            sampling=SamplingParams(max_tokens=1),
            prompt_logprobs=True,
            images=() if image is None else (image.draw(),),
            image_token_id=None if image is None else image.token_id,
        )
        assert self.core.refusal_reason(spec) is None
        request = self.core.build_request(spec)
        self.core.submit(request)
        while self.core.has_work:
            self.core.step()
        scores, none = request.completions[0].prompt_logprobs, np.zeros(0, np.float32)
        return {"http://engine": CanaryScores(prompt=scores, decoded=none, read=none)}


class Log:
    def version_published(self, version: int, fingerprint: str | None = None) -> None:
        """Not kept."""

    version_loaded = version_published


def score(num_tokens: int = 48) -> Canary:
    learner = Learner(
        build_vision_policy("qwen3_vl"), model=ModelSection(vlm=VisionSection()), optim=AdamWOptim(lr=1e-2),
        scheduler=ConstantScheduler(warmup_steps=0), max_steps=None,
    )  # fmt: skip
    return score_canary(learner, num_tokens)


def load(engine: CoreEngine, canary: Canary) -> float:
    manifest = WeightManifest(
        version=0, transport="shm", location="x", shards=("x",), checksum=0, canary=canary,
        tensors=(TensorEntry("x", "float32", (1,), 0, 0, 4),),
    )  # fmt: skip
    loader = VersionLoader(engine, Log(), start=0, timeout_s=30.0)
    loader.on_published(manifest)
    asyncio.run(loader.load_next())
    return loader.canary_error


def test_the_canary_shows_an_image_and_survives_the_wire():
    canary = score()
    assert canary.token_ids.count(IMAGE) == 4 and START in canary.token_ids and END in canary.token_ids
    assert {p for i, p in zip(canary.token_ids, canary.logprobs) if i == IMAGE} == {0.0}
    again = msgspec.json.decode(msgspec.json.encode(canary), type=Canary)
    assert again == canary and again.image.draw() == canary.image.draw()


def test_an_engine_with_the_same_weights_passes():
    assert load(CoreEngine(build_vision_policy("qwen3_vl")), score()) < 1e-5


def test_an_engine_with_another_tower_is_found():
    model = build_vision_policy("qwen3_vl")
    with torch.no_grad():
        model.model.visual.merger.linear_fc2.weight.mul_(1.5)
    with pytest.raises(EngineError, match="does not compute with version 0"):
        load(CoreEngine(model), score())


def test_few_tokens_have_no_room_for_an_image_and_no_placeholder():
    canary = score(12)
    assert canary.image is None and IMAGE not in canary.token_ids
    assert load(CoreEngine(build_vision_policy("qwen3_vl")), canary) < 1e-5
