"""The canary finds an engine whose weights differ from the trainer's."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
import torch

from stretto.base.errors import EngineError
from stretto.config.sections.model import ModelSection, ScratchSection
from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler
from stretto.models.attention import PackedLayout
from stretto.models.hub import random_model
from stretto.orchestrator.versions import VersionLoader, default_tolerance, describe_suspects
from stretto.records.weights import Canary, CanaryImage, TensorEntry, WeightManifest
from stretto.trainer.learner import Learner
from stretto.trainer.state.canary import fixed_tokens, is_canary_due, score_canary


class Engines:
    """Two engines that score with an error of their own."""

    def __init__(self, canary: Canary, *errors: float) -> None:
        self.logprobs = np.array(canary.logprobs, np.float32)
        self.errors = errors

    async def update_weights(self, manifest: WeightManifest) -> None:
        pass

    async def prompt_logprobs(
        self, token_ids: np.ndarray, name: str, image: CanaryImage | None
    ) -> dict[str, np.ndarray]:
        assert name.startswith("canary-") and image is None
        return {f"http://engine-{i}": self.logprobs + error for i, error in enumerate(self.errors)}


class Log:
    loaded: tuple[int, ...] = ()

    def version_published(self, version: int) -> None:
        pass

    def version_loaded(self, version: int) -> None:
        self.loaded += (version,)


def entry(name: str, dtype: str = "float32") -> TensorEntry:
    return TensorEntry(name, dtype, (1,), 0, 0, 4)


def manifest(*names: str, dtype: str = "float32", canary: Canary | None = None) -> WeightManifest:
    return WeightManifest(
        version=0,
        transport="shm",
        location="x",
        shards=("x",),
        tensors=tuple(entry(name, dtype) for name in names),
        checksum=0,
        canary=canary,
    )


CANARY = Canary((3, 1, 2), (0.0, -1.0, -2.0))
TIED = manifest("model.embed_tokens.weight", "model.norm.weight", canary=CANARY)


def load(engines: Engines, told: WeightManifest, tolerance: float | None = None) -> tuple[VersionLoader, Log]:
    log = Log()
    policy = VersionLoader(engines, log, start=0, timeout_s=5.0, tolerance=tolerance)
    policy.on_published(told)
    asyncio.run(policy.load_next())
    return policy, log


def test_engines_that_agree_are_let_pass_and_the_error_is_known():
    policy, log = load(Engines(CANARY, 1e-6, 2e-6), TIED)
    assert log.loaded == (0,) and policy.canary_error == pytest.approx(2e-6, rel=0.2)


def test_one_engine_that_does_not_agree_stops_the_run_and_names_the_tensors():
    with pytest.raises(
        EngineError, match=r"engine-1 does not compute with version 0.*0\.28 on average"
    ) as caught:
        load(Engines(CANARY, 0.0, 0.28), TIED)
    assert "the output matrix (model.embed_tokens.weight here)" in str(caught.value)


def test_numbers_that_are_none_do_not_pass():
    with pytest.raises(EngineError, match="differ from the trainer's by nan"):
        load(Engines(CANARY, float("nan")), TIED)


def test_the_tolerance_is_that_of_the_numbers_or_the_users():
    assert default_tolerance(TIED) == 1e-3
    assert default_tolerance(manifest("a", dtype="bfloat16")) == 0.1
    load(Engines(CANARY, 0.02), TIED, tolerance=0.05)
    with pytest.raises(EngineError, match=r"tolerance 0.001"):
        load(Engines(CANARY, 0.02), TIED)


def test_experts_are_suspected_where_there_are_some_and_all_where_nothing_stands_out():
    experts = manifest("lm_head.weight", "model.layers.0.mlp.experts.0.up_proj.weight")
    assert "1 tensors of experts" in describe_suspects(experts) and "output matrix" not in describe_suspects(
        experts
    )
    assert "all 2 tensors" in describe_suspects(manifest("lm_head.weight", "model.norm.weight"))


def test_the_trainers_half_is_a_plain_forward_pass_over_tokens_that_never_change():
    model = random_model(ScratchSection(seed=4), 112, eos_token_id=2)
    learner = Learner(
        model,
        model=ModelSection(),
        optim=AdamWOptim(),
        scheduler=ConstantScheduler(warmup_steps=0),
        max_steps=None,
    )
    canary = score_canary(learner, 40)
    ids = torch.tensor(canary.token_ids)
    with torch.no_grad():
        hidden = model.hidden(ids, PackedLayout((0, len(ids)), ids.device))
        logits = hidden @ model.output_weight.T
    expected = torch.log_softmax(logits, -1)[:-1].gather(1, ids[1:, None]).squeeze(1)
    np.testing.assert_allclose(canary.logprobs[1:], expected, atol=1e-5)
    assert canary.logprobs[0] == 0.0
    assert (
        fixed_tokens(112, 40).tolist() == list(canary.token_ids) == list(score_canary(learner, 40).token_ids)
    )
    assert msgspec.convert(msgspec.to_builtins(canary), Canary) == canary


@pytest.mark.parametrize(
    ("interval", "expected"), [(10, [*range(1, 11), 20]), (1, [*range(1, 26)]), (None, [])]
)
def test_versions_are_checked_densely_at_first_and_then_now_and_then(interval, expected):
    due = [
        version for version in range(1, 26) if is_canary_due(version, version - 1, interval, is_wanted=False)
    ]
    assert due == expected


def test_a_version_is_checked_when_the_orchestrator_asks_but_not_where_checks_are_off():
    assert not is_canary_due(17, 16, 10, is_wanted=False) and is_canary_due(17, 16, 10, is_wanted=True)
    assert not is_canary_due(17, 16, None, is_wanted=True)
    assert is_canary_due(517, 3, 10, is_wanted=False), "a resumed run begins densely again"


def test_a_check_is_asked_for_until_the_engines_that_are_there_have_passed_one():
    generation = 0
    policy = VersionLoader(Engines(CANARY, 0.0), Log(), start=0, timeout_s=5.0, generation=lambda: generation)

    def next_version(version: int, canary: Canary | None) -> None:
        told = msgspec.structs.replace(TIED, version=version, canary=canary)
        policy.on_published(told)
        asyncio.run(policy.load_next())

    assert policy.wants_canary
    next_version(0, None)
    assert policy.wants_canary
    next_version(1, CANARY)
    assert not policy.wants_canary
    next_version(2, None)
    assert not policy.wants_canary
    generation += 1  # an engine went, or one was let in again
    assert policy.wants_canary
    next_version(3, CANARY)
    assert not policy.wants_canary


def test_an_engine_that_goes_while_a_version_is_loaded_is_checked_with_the_next():
    class Leaving(Engines):
        generation = 0

        async def update_weights(self, manifest: WeightManifest) -> None:
            self.generation += 1

    engines = Leaving(CANARY, 0.0)
    policy = VersionLoader(engines, Log(), start=0, timeout_s=5.0, generation=lambda: engines.generation)
    policy.on_published(TIED)
    asyncio.run(policy.load_next())
    assert policy.wants_canary
