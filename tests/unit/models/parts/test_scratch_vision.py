"""Random networks with a vision tower, and the files beside them: transformers computes the same from them."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from cases.vision import logprobs_alone

from stretto.chat.patches import load_image_processor
from stretto.chat.placeholders import PLACEHOLDER
from stretto.chat.render import build_renderer
from stretto.chat.scratch import build_scratch_files
from stretto.chat.tokenizer import load_tokenizer
from stretto.config.sections.model import ScratchSection, ScratchVisionSection
from stretto.envs.bundled.count_shapes import CountShapes
from stretto.families.table import VISION_FAMILIES
from stretto.models import hub


def build(family: str, directory) -> ScratchSection:
    """A model directory of this family, made from scratch."""
    scratch = ScratchSection(
        family=family, num_layers=4, num_experts=4, moe_intermediate_size=48, vision=ScratchVisionSection(),
        phrases=("how many?",),
    )  # fmt: skip
    files = build_scratch_files(directory / "files", scratch)
    tokenizer = load_tokenizer(files)
    model = hub.random_model(
        scratch,
        tokenizer.vocab_size,
        eos_token_id=list(tokenizer.eos_ids),
        image_token_id=tokenizer.token_id(PLACEHOLDER),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    hub.save_hf(model, directory / "model", files)
    return scratch


def test_experts_are_written_as_checkpoints_have_them_and_read_again(tmp_path):
    """[experts, in, out]; transformers turns them round: the test below."""
    build("qwen3_vl_moe", tmp_path)
    first = hub.load_model(tmp_path / "model", dtype=torch.float32)
    hub.save_hf(first, tmp_path / "again")
    again = hub.load_model(tmp_path / "again", dtype=torch.float32)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name


@pytest.mark.heavy
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_transformers_sees_the_same_in_a_picture(family, tmp_path):
    from transformers import AutoModelForImageTextToText

    build(family, tmp_path)
    directory = tmp_path / "model"
    renderer = build_renderer(directory, model_type=family, images=load_image_processor(directory))
    env = CountShapes()
    messages = env.prompt(env.tasks("train").task(0))
    ids, images = renderer.render_prompt(messages), renderer.images_of(messages)
    assert (ids == renderer.image_token_id).sum() == 4 and images[0].grid == (1, 4, 4)
    ours = hub.load_model(directory, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theirs, info = AutoModelForImageTextToText.from_pretrained(
            directory, dtype=torch.float32, output_loading_info=True
        )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.from_numpy(ids).long()[None]
    with torch.no_grad():
        logits = theirs(
            input_ids=tokens, mm_token_type_ids=(tokens == renderer.image_token_id).int(), use_cache=False,
            pixel_values=torch.from_numpy(np.array(images[0].patches)), image_grid_thw=torch.tensor([images[0].grid]),
        ).logits[0]  # fmt: skip
    expected = logits[:-1].log_softmax(-1).gather(1, tokens[0, 1:, None]).squeeze(1).numpy()
    got = logprobs_alone(ours, ids, images, image_token_id=renderer.image_token_id)
    np.testing.assert_allclose(got, expected, atol=2e-5)


def test_the_image_processor_is_the_one_that_transformers_finds_there(tmp_path):
    from transformers import AutoImageProcessor

    build("qwen3_vl", tmp_path)
    ours, theirs = (
        load_image_processor(tmp_path / "model"),
        AutoImageProcessor.from_pretrained(tmp_path / "model", backend="pil"),
    )
    pixels = np.random.default_rng(0).integers(0, 256, (32, 48, 3)).astype(np.uint8)
    from PIL import Image

    picture = Image.fromarray(pixels)
    wanted = theirs(images=[picture], return_tensors="np")
    found = ours.process(picture)
    np.testing.assert_allclose(found.patches, wanted["pixel_values"], atol=1e-5)
    assert found.grid == (1, 4, 6) == tuple(wanted["image_grid_thw"][0].tolist())


def test_tokens_of_images_follow_all_others(tmp_path):
    plain = load_tokenizer(build_scratch_files(tmp_path / "text", ScratchSection(phrases=("how many?",))))
    section = ScratchSection(family="qwen3_vl", phrases=("how many?",), vision=ScratchVisionSection())
    seeing = load_tokenizer(build_scratch_files(tmp_path / "vision", section))
    assert seeing.vocab_size == plain.vocab_size + 4
    assert seeing.token_id("how many?") == plain.token_id("how many?")
    assert plain.token_id(PLACEHOLDER) is None and load_image_processor(tmp_path / "text") is None
    text = f"a{PLACEHOLDER}b"
    assert seeing.encode(text)[1] == seeing.token_id(PLACEHOLDER) and seeing.decode(seeing.encode(text)) == text
