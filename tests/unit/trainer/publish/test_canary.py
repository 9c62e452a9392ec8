"""The canary finds an engine whose weights differ from the trainer's."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
import numpy as np
import pytest
import torch

from stretto.base.errors import EngineError
from stretto.config.sections.model import ModelSection, ScratchSection, ScratchVisionSection
from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler
from stretto.families.table import FAMILIES, VISION_FAMILIES
from stretto.models.attention import PackedLayout
from stretto.models.hub import export_tensors, load_tensors, random_model
from stretto.models.tensor_map import as_whole_slices
from stretto.orchestrator.versions.canary_check import CanaryCheck, describe_suspects, tolerance_of
from stretto.orchestrator.versions.loader import VersionLoader
from stretto.records.weight_manifest import (
    BFLOAT16_TOLERANCE,
    Canary,
    CanaryImage,
    TensorEntry,
    WeightManifest,
    probe_scale,
)
from stretto.trainer.learner import Learner
from stretto.trainer.network import scaled
from stretto.trainer.publish.canary import fixed_tokens, is_canary_due, score_canary
from stretto.transports.engine.proof import CanaryScores
from stretto.transports.engine.updates import Updated
from stretto.transports.weights.sums import GroupSums, compare_sums


def scored(prompt: np.ndarray, gap: float = 0.0) -> CanaryScores:
    return CanaryScores(prompt=prompt, decoded=np.full(5, -1.0), read=np.full(5, -1.0 - gap))


class Engines:
    """Two engines that score with an error of their own."""

    def __init__(self, canary: Canary, *errors: float) -> None:
        self.logprobs = np.array(canary.logprobs, np.float32)
        self.errors = errors
        self.updated = {"http://engine-0": Updated(0.0, 4), "http://engine-1": Updated(0.0, 9)}

    async def update_weights(self, manifest: WeightManifest) -> None:
        pass

    async def score_canary(
        self, token_ids: np.ndarray, name: str, image: CanaryImage | None
    ) -> dict[str, CanaryScores]:
        assert name.startswith("canary-") and image is None
        return {f"http://engine-{i}": scored(self.logprobs + error) for i, error in enumerate(self.errors)}


class Log:
    loaded: tuple[int, ...] = ()

    def version_published(self, version: int, fingerprint: str | None = None) -> None:
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
    assert policy.canary_tolerance == 1e-3
    assert (policy.num_checked, policy.num_compared) == (1, 4)


def test_one_engine_that_holds_other_bits_stops_the_run_and_names_the_layer():
    engines = Engines(CANARY, 0.0, 0.0)
    engines.updated = {**engines.updated, "http://engine-1": Updated(0.0, 4, ("model.layers.3",))}
    with pytest.raises(
        EngineError, match=r"engine-1 has loaded version 0, .* in 1 of 4 groups .*: model\.layers\.3\. The"
    ):
        load(engines, TIED)


def test_one_engine_that_does_not_agree_stops_the_run_and_names_the_tensors():
    with pytest.raises(EngineError, match=r"engine-1 does not compute with version 0.*0\.28") as caught:
        load(Engines(CANARY, 0.0, 0.28), TIED)
    assert "the output matrix (model.embed_tokens.weight here)" in str(caught.value)


def test_numbers_that_are_none_do_not_pass():
    with pytest.raises(EngineError, match="differ from the trainer's by nan"):
        load(Engines(CANARY, float("nan")), TIED)


def test_the_tolerance_is_that_of_the_numbers_or_the_users():
    assert tolerance_of(TIED) == 1e-3
    assert tolerance_of(manifest("a", dtype="bfloat16")) == BFLOAT16_TOLERANCE
    load(Engines(CANARY, 0.02), TIED, tolerance=0.05)
    with pytest.raises(EngineError, match=r"tolerance 0.001"):
        load(Engines(CANARY, 0.02), TIED)


def test_experts_are_suspected_where_there_are_some_and_all_where_nothing_stands_out():
    experts = manifest("lm_head.weight", "model.layers.0.mlp.experts.0.up_proj.weight")
    assert "1 tensors of experts" in describe_suspects(experts) and "output matrix" not in describe_suspects(experts)
    assert "all 2 tensors" in describe_suspects(manifest("lm_head.weight", "model.norm.weight"))


def test_the_trainers_half_is_a_plain_forward_pass_over_tokens_that_never_change():
    model = random_model(ScratchSection(seed=4), 112, eos_token_id=2)
    learner = Learner(
        model, model=ModelSection(), optim=AdamWOptim(), scheduler=ConstantScheduler(warmup_steps=0), max_steps=None
    )
    canary = score_canary(learner, 40)
    ids = torch.tensor(canary.token_ids)
    with torch.no_grad():
        hidden = model.hidden(ids, PackedLayout((0, len(ids)), ids.device))
        logits = hidden @ model.output_weight.T
    expected = torch.log_softmax(logits, -1)[:-1].gather(1, ids[1:, None]).squeeze(1)
    np.testing.assert_allclose(canary.logprobs[1:], expected, atol=1e-5)
    assert canary.logprobs[0] == 0.0
    assert fixed_tokens(112, 40).tolist() == list(canary.token_ids) == list(score_canary(learner, 40).token_ids)
    assert msgspec.convert(msgspec.to_builtins(canary), Canary) == canary


@pytest.mark.parametrize(("interval", "expected"), [(10, [*range(1, 11), 20]), (1, [*range(1, 26)]), (None, [])])
def test_versions_are_checked_densely_at_first_and_then_now_and_then(interval, expected):
    due = [version for version in range(1, 26) if is_canary_due(version, version - 1, interval, is_wanted=False)]
    assert due == expected


def test_a_version_is_checked_when_the_orchestrator_asks_but_not_where_checks_are_off():
    assert not is_canary_due(17, 16, 10, is_wanted=False) and is_canary_due(17, 16, 10, is_wanted=True)
    assert not is_canary_due(17, 16, None, is_wanted=True)
    assert is_canary_due(517, 3, 10, is_wanted=False), "a resumed run begins densely again"
    due = [
        version for version in range(40, 80, 4) if is_canary_due(version, 99, 10, is_wanted=False, since=version - 4)
    ]
    assert due == [40, 52, 60, 72], "the first that is sent after each tenth"


def test_a_check_is_asked_for_until_the_engines_that_are_there_have_passed_one():
    generation = 0
    policy = VersionLoader(Engines(CANARY, 0.0), Log(), start=0, timeout_s=5.0, generation=lambda: generation)

    def next_version(version: int, canary: Canary | None) -> None:
        told = msgspec.structs.replace(TIED, version=version, canary=canary)
        assert version == 0 or policy.decide(version)
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


# -- changes from version to version --

BFLOAT16 = manifest("a", dtype="bfloat16")


def checks(*versions: tuple[np.ndarray, np.ndarray], told: WeightManifest = BFLOAT16) -> None:
    """Check versions 0, 1, ... of which trainer and engine have these log-probabilities."""
    check = CanaryCheck()
    for version, (trainer, engine) in enumerate(versions):
        canary = Canary(tuple(range(len(trainer))), tuple(trainer.tolist()))
        check(msgspec.structs.replace(told, version=version, canary=canary), canary, {"http://e": scored(engine)})


def noise(seed: int, scale: float) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, 64).astype(np.float32)


def test_an_engine_that_stands_still_is_found_in_16_bits_however_little_the_trainer_moves():
    start = noise(0, 3.0)
    engine = start + noise(1, 0.013)
    with pytest.raises(EngineError, match=r"stands still: .*version 1 .*version 0, .*100%"):
        checks((start, engine), (start + noise(2, 1e-5), engine))


def test_an_engine_that_stands_still_because_the_trainer_does_is_let_pass():
    start = noise(0, 3.0)
    checks((start, start), (start, start), (start, start))


def test_weights_in_8_bits_may_round_to_the_same_ones():
    start = noise(0, 3.0)
    checks((start, start), (start + noise(2, 1e-5), start), told=manifest("a", dtype="float8_e4m3fn"))


def test_a_part_that_stays_behind_is_found_once_it_is_more_than_rounding():
    """One of two parts of the trainer's change is missing; no single version differs by the tolerance of 16 bits."""
    start, behind, ahead = noise(0, 3.0), noise(1, 0.0025), noise(2, 0.0025)

    def version(n: int, *, is_whole: bool) -> tuple[np.ndarray, np.ndarray]:
        trainer = start + n * (behind + ahead)
        engine = trainer if is_whole else start + n * ahead
        return trainer, engine + noise(100 + n, 0.01)

    checks(*[version(n, is_whole=True) for n in range(400)])
    found = []
    for n in range(1, 40):
        try:
            checks(*[version(m, is_whole=False) for m in range(n)])
        except EngineError as error:
            found.append((n, str(error)))
            break
    [(n, message)] = found
    assert "does not follow the trainer" in message and "tolerance" not in message and 8 < n < 30


def test_rounding_that_grows_with_the_policy_is_no_lag():
    start, drift = noise(0, 3.0), noise(1, 0.05)
    checks(*[(start + n * drift, start + n * drift + noise(50 + n, 0.013 * (1 + n / 20))) for n in range(60)])


def test_an_engine_that_samples_with_other_weights_than_it_reads_with_is_found():
    canary = Canary((3, 1, 2), (0.0, -1.0, -2.0))
    told = msgspec.structs.replace(manifest("a"), canary=canary)
    with pytest.raises(EngineError, match=r"other weights than version 0: 5 tokens"):
        CanaryCheck()(told, canary, {"http://e": scored(np.array(canary.logprobs), gap=0.2)})


# -- the probe --


class Stale:
    """An engine that loads what it is sent into a real model, but for tensors of which it keeps a copy."""

    updated: Mapping[str, Updated] = MappingProxyType({})

    def __init__(self, seed: int, kept: str) -> None:
        self.model, self.kept = random_model(ScratchSection(seed=seed), 112, eos_token_id=2), kept
        self.sent: dict[str, torch.Tensor] = {}

    async def update_weights(self, told: WeightManifest) -> None:
        for name, tensor in self.model.state_dict().items():
            if self.kept not in name:
                tensor.copy_(self.sent[name] * (probe_scale(tensor.shape) if told.is_probe else 1.0))

    async def score_canary(
        self, token_ids: np.ndarray, name: str, image: CanaryImage | None
    ) -> dict[str, CanaryScores]:
        ids = torch.from_numpy(token_ids).long()
        with torch.no_grad():
            hidden = self.model.hidden(ids, PackedLayout((0, len(ids)), ids.device))
            found = torch.log_softmax(hidden @ self.model.output_weight.T, -1)[:-1].gather(1, ids[1:, None])
        return {"http://e": scored(np.concatenate([[0.0], found.squeeze(1).numpy()]))}


def probed(seed: int) -> tuple[Learner, WeightManifest]:
    learner = Learner(
        random_model(ScratchSection(seed=seed), 112, eos_token_id=2),
        model=ModelSection(),
        optim=AdamWOptim(),
        scheduler=ConstantScheduler(warmup_steps=0),
        max_steps=None,
    )
    return learner, manifest("a", canary=score_canary(learner, 64, with_probe=True))


@pytest.mark.parametrize("kept", ["embed_tokens", "v_proj", "o_proj", "gate_proj", "down_proj", "norm"])
def test_a_probe_finds_a_kind_of_tensors_that_is_never_loaded_before_anything_is_trained(kept):
    """The engine started from the same weights, so that version 0 alone shows nothing."""
    learner, told = probed(4)
    for each in (Stale(4, kept), Stale(4, "nothing")):
        each.sent = dict(learner.policy.state_dict())
        if each.kept == "nothing":
            load(each, told)
            continue
        with pytest.raises(EngineError, match="does not compute with a probe of version 0"):
            load(each, told)
        load(each, msgspec.structs.replace(told, canary=msgspec.structs.replace(told.canary, probe=None)))


def test_a_model_that_was_scaled_has_its_bits_again():
    model = random_model(ScratchSection(seed=4), 112, eos_token_id=2)
    model.state_dict()["model.norm.weight"].fill_(1e-40)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with scaled(as_whole_slices(model.named_parameters()).values()):
        assert all(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_trainer_and_engine_scale_the_tensors_of_every_family_alike(family):
    """Engines scale what is published, the trainer its parameters, which are stacked or split otherwise."""
    vision = ScratchVisionSection() if family in VISION_FAMILIES else None
    section = ScratchSection(family=family, seed=1, num_experts=4, vision=vision)
    model = random_model(section, 112, eos_token_id=2, image_token_id=5)
    published = {name: tensor.clone() for name, tensor in export_tensors(model)}
    with scaled(as_whole_slices(model.named_parameters()).values()):
        for name, tensor in export_tensors(model):
            torch.testing.assert_close(tensor, published[name] * probe_scale(published[name].shape), msg=name)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")])
def test_an_engine_of_every_family_holds_the_bits_that_were_published(family: str, dtypes: tuple[str, str]) -> None:
    vision = ScratchVisionSection() if family in VISION_FAMILIES else None
    section = ScratchSection(family=family, seed=5, num_experts=4, vision=vision)
    published, kept = (getattr(torch, name) for name in dtypes)
    learner = Learner(
        random_model(section, 112, eos_token_id=2, image_token_id=5).to(published),
        model=ModelSection(dtype=dtypes[0]),
        optim=AdamWOptim(),
        scheduler=ConstantScheduler(warmup_steps=0),
        max_steps=None,
    )
    sums = GroupSums()
    sent = list(sums.of(learner.export_tensors()))
    entries = [
        TensorEntry(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), 0, 0, t.nbytes) for name, t in sent
    ]
    told = msgspec.structs.replace(
        manifest(canary=msgspec.structs.replace(CANARY, sums=sums.by_group)), tensors=tuple(entries)
    )
    engine = random_model(section, 112, eos_token_id=2, image_token_id=5).to(kept)
    load_tensors(engine, sent)
    num_compared, differing = compare_sums(told, export_tensors(engine))
    assert num_compared == len(sums.by_group) >= 4 and not differing
    with torch.no_grad():
        list(engine.parameters())[-1].view(-1)[0] += 1
    assert len(compare_sums(told, export_tensors(engine))[1]) == 1
