"""Training on rows with images: what a pass computes, what is shared, what is frozen, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases.vision import IMAGE, build_vision_policy, image, image_batches, image_group, logprobs_alone, pack_images
from msgspec.structs import replace
from processes.add_ons import needs

from stretto.base.errors import ConfigError, DataError
from stretto.config.sections.model import ModelSection, VisionSection
from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler
from stretto.models import hub
from stretto.trainer.batch.pass_inputs import build_pass_inputs
from stretto.trainer.learner import Learner, load_policy


def learner_of(case="qwen3_vl", *, is_frozen=True, **model):
    section = ModelSection(vlm=VisionSection(freeze_vision_encoder=is_frozen), **model)
    return Learner(
        build_vision_policy(case),
        model=section,
        optim=AdamWOptim(lr=1e-2),
        scheduler=ConstantScheduler(warmup_steps=0),
        max_steps=None,
    )


@pytest.mark.heavy
@pytest.mark.parametrize(
    "case", ["qwen3_vl", "qwen3_vl_moe", pytest.param("qwen3_5", marks=needs("families")), "qwen3_vl as a tree"]
)
def test_samples_in_a_row_have_the_logprobs_of_each_alone(case):
    sharing = "tree" if "tree" in case else "prompts"
    learner = learner_of(case.split()[0], shared_prefixes=sharing)
    small, large, other = image((1, 2, 4), 0), image((2, 4, 4), 1), image((1, 2, 4), 2)
    # The texts of the first two groups are equal and their images are not.
    samples = image_group(0, [small]) + image_group(0, [other]) + image_group(1, []) + image_group(2, [large, small])
    mb = pack_images(samples)
    scored, every = learner.trained_logprobs([mb])[0], learner.logprobs(mb)[0]
    for start, (sample, images) in zip(mb.cu_seqlens.tolist(), samples):
        ids, mask = sample["token_ids"], sample["loss_mask"]
        place = slice(start, start + len(ids))
        expected = np.concatenate(([0], logprobs_alone(learner.policy, ids, images)))
        is_hot = mb.temperatures[place] == 1.0
        shown = ids == IMAGE
        np.testing.assert_allclose(scored[place][mask & is_hot], expected[mask & is_hot], atol=2e-5)
        np.testing.assert_allclose(every[place][~shown & is_hot], expected[~shown & is_hot], atol=2e-5)
        assert not every[place][shown].any() and not scored[place][~mask].any()
    assert (mb.temperatures == 1.0).any()


@pytest.mark.parametrize("sharing", ["prompts", "tree"])
def test_equal_prompts_are_shared_with_their_images_and_not_without(sharing):
    policy = build_vision_policy("qwen3_vl")
    small, other = image((1, 2, 4), 0), image((1, 2, 4), 2)
    inputs = lambda mb: build_pass_inputs(
        mb, policy.config.vocab_size, torch.device("cpu"), sharing=sharing, vision=policy.config.vision
    )
    same = inputs(pack_images(image_group(0, [small]) + image_group(0, [small])))
    different = inputs(pack_images(image_group(0, [small]) + image_group(0, [other])))
    count = lambda found: sum(parent < 0 for parent in found.layout.parents)
    assert (count(same), count(different)) == (1, 2)
    assert len(same.images.grids) == 1 and len(different.images.grids) == 2, "an image is encoded once"


def test_a_frozen_tower_stays_as_it_is_and_is_published_and_a_trained_one_moves():
    mbs = image_batches(1)[0]
    for is_frozen in (True, False):
        learner = learner_of(is_frozen=is_frozen)
        before = {name: tensor.clone() for name, tensor in hub.export_tensors(learner.policy)}
        learner.forward_backward(mbs)
        learner.optim_step()
        after = dict(learner.export_tensors())
        assert after.keys() == before.keys()
        changed = {name for name in after if not torch.equal(after[name], before[name])}
        tower = {name for name in after if name.startswith("model.visual.")}
        assert changed == (after.keys() - tower if is_frozen else after.keys())


def test_blocks_of_a_trained_tower_are_recomputed_with_equal_gradients():
    found = []
    for model in ({}, {"ac": {}}):
        learner = learner_of(is_frozen=False, **model)
        learner.forward_backward(image_batches(1)[0])
        found.append({name: p.grad for name, p in learner.policy.named_parameters()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_batch_that_does_not_fit_the_model_is_refused():
    learner = learner_of()
    mb = image_batches(1)[0][1]
    name = mb.sample_ids[0]
    cases = [
        (replace(mb, images=(), num_images=()), f"sample {name} has 2 image tokens .id 50., and its 0 images take 0"),
        (replace(mb, images=tuple(i.without_patches() for i in mb.images)), f"sample {name}: image .* has no patches"),
        (replace(mb, loss_mask=mb.loss_mask | (mb.token_ids == IMAGE)), f"an image in sample {name} is trained"),
    ]
    for wrong, words in cases:
        with pytest.raises(DataError, match=words):
            learner.forward_backward([wrong])
    from tiny import build_learner

    with pytest.raises(DataError, match=r"images for a model of text"):
        build_learner().forward_backward([replace(mb, token_ids=mb.token_ids % 40)])


def test_a_model_with_a_tower_needs_its_section_and_one_without_refuses_it(tmp_path):
    hub.save_hf(build_vision_policy("qwen3_vl"), tmp_path / "vision")
    with pytest.raises(ConfigError, match=r"qwen3_vl .*add \[model.vlm\]"):
        load_policy(ModelSection(name=str(tmp_path / "vision")))
    assert load_policy(ModelSection(name=str(tmp_path / "vision"), vlm=VisionSection())).config.vision
    from tiny import build_policy

    hub.save_hf(build_policy(), tmp_path / "text")
    with pytest.raises(ConfigError, match=r"\[model.vlm\] .*vision tower .*qwen3;"):
        load_policy(ModelSection(name=str(tmp_path / "text"), vlm=VisionSection()))
