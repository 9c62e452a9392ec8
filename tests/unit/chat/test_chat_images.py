"""Pictures become the patches that transformers makes of them; messages with images become exact tokens."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as pillow

from stretto.base.errors import ConfigError, DataError
from stretto.chat.patches import ImageProcessor, load_image_processor, refuse_paths
from stretto.chat.placeholders import VISION_TOKENS
from stretto.chat.render import Renderer, build_renderer
from stretto.chat.tokenizer import build_letters_tokenizer, load_tokenizer
from stretto.config.sections.model import RendererSection
from stretto.config.sections.sft import LossMaskSection
from stretto.data.pictures import data_url, openai_messages
from stretto.records.images import image_hash, placeholder_spans

TINY = ImageProcessor(patch_size=4, min_pixels=64, max_pixels=64 * 64)
QWEN3_VL = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "merge_size": 2,
            "temporal_patch_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
            "size": {"shortest_edge": 65536, "longest_edge": 16777216}}  # fmt: skip


def picture(width: int = 20, height: int = 12, seed: int = 0, mode: str = "RGB") -> pillow.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, len(mode)), np.uint8)
    return pillow.fromarray(pixels.squeeze(), mode)


def png(**shape: Any) -> bytes:
    file = io.BytesIO()
    picture(**shape).save(file, "png")
    return file.getvalue()


@pytest.mark.heavy
@pytest.mark.parametrize("config", [QWEN3_VL, {"merge_size": 2, "min_pixels": 3136, "max_pixels": 50_000}])
@pytest.mark.parametrize("size", [(20, 12), (300, 77), (640, 480), (33, 500)])
def test_patches_are_those_of_transformers(config, size, tmp_path: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    theirs = Qwen2VLImageProcessorPil(**{k: v for k, v in config.items() if k != "image_processor_type"})
    for mode in ("RGB", "L", "RGBA"):
        shown = picture(*size, mode=mode)
        wanted = theirs(images=[shown], return_tensors="np")
        found = load_image_processor(tmp_path).process(shown)
        assert list(found.grid) == wanted["image_grid_thw"][0].tolist()
        assert found.patches.dtype == np.float32
        np.testing.assert_allclose(found.patches, wanted["pixel_values"], atol=1e-5)


def test_the_parameters_are_read_from_either_file_and_written_back(tmp_path: Path) -> None:
    assert load_image_processor(tmp_path) is None
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": QWEN3_VL}))
    found = load_image_processor(tmp_path)
    assert (found.patch_size, found.min_pixels, found.mean) == (16, 65536, (0.5, 0.5, 0.5))
    found.save(tmp_path)
    assert load_image_processor(tmp_path) == found


def test_a_model_with_another_processor_takes_text_only(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "CLIPImageProcessor"}')
    assert load_image_processor(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not JSON"), ('{"merge_size": 2, "do_resize": false}', "do_resize = false")]
)
def test_parameters_that_cannot_be_followed_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(DataError, match=message):
        load_image_processor(tmp_path)


def test_every_form_of_one_picture_is_one_image_and_is_processed_once(tmp_path: Path) -> None:
    encoded, file = png(), tmp_path / "a.png"
    file.write_bytes(encoded)
    sources = (
        {"image": str(file)}, {"image": file}, {"image": f"file://{file}"}, {"image": encoded},
        {"image": data_url(encoded)}, {"image_url": {"url": data_url(encoded)}}, {"image_url": data_url(encoded)},
        {"image": {"bytes": encoded, "path": None}}, {"image": {"bytes": None, "path": str(file)}},
        {"path": str(file)}, {"bytes": encoded}, {"image": pillow.open(io.BytesIO(encoded))},
    )  # fmt: skip
    processor = ImageProcessor(patch_size=4, min_pixels=64, max_pixels=4096)
    found = [processor.image({"type": "image", **source}, "here") for source in sources]
    assert len({image.hash for image in found}) == 1
    assert found[0].hash == image_hash(found[0].patches, found[0].grid)
    assert processor.image({"type": "image", "image": encoded}, "here").patches is found[3].patches
    assert not found[0].patches.flags.writeable


def test_a_photo_that_lies_on_its_side_is_turned() -> None:
    shown, file = picture(16, 8), io.BytesIO()
    exif = pillow.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    shown.save(file, "png", exif=exif)
    assert TINY.image({"image": file.getvalue()}, "here").grid == (1, 4, 2)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"image": "nowhere.png"}, "here: the image cannot be read from nowhere.png: No such file"),
        ({"image": b"no picture"}, "here: the image cannot be read from its data: no image format"),
        ({"image": "data:image/png;base64,%%"}, "here: the data URL is not base64"),
        ({"image": "data:image/png,abc"}, "must be `data:image/...;base64,...`"),
        ({"image": "https://example.org/a.png"}, "is not fetched"),
        ({"image": 3}, "here: an image is a path, a data URL, bytes"),
        ({}, "here: an image part has no picture"),
        ({"image": picture(401, 2)}, "here: 401 x 2 pixels; one side may be at most 200 times"),
    ],
)
def test_an_image_that_cannot_be_read_is_one_message(part, message: str) -> None:
    with pytest.raises(DataError, match=message.replace("(", r"\(")):
        TINY.image({"type": "image", **part}, "here")


def test_half_a_picture_is_named_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "half.png").write_bytes(png(width=200)[:900])
    with pytest.raises(DataError, match=r"row 3: .*image.*half\.png"):
        TINY.image({"image": str(tmp_path / "half.png")}, "row 3")


# -- tokens --


@pytest.fixture(scope="module", params=["qwen3", "qwen3-vl", "qwen3.5"])
def renderer(request, tmp_path_factory) -> Renderer:
    directory = build_letters_tokenizer(tmp_path_factory.mktemp("letters"), phrases=VISION_TOKENS)
    return build_renderer(load_tokenizer(directory), RendererSection(name=request.param), images=TINY)


def shows(seed: int = 0, **shape: int) -> dict[str, Any]:
    return {"type": "image", "image": picture(seed=seed, **shape)}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


CONVERSATION = [
    {"role": "system", "content": "Look."},
    {"role": "user", "content": [said("what "), shows(0), said(" and"), shows(1, width=40)]},
]


def spans_of(renderer: Renderer, ids: np.ndarray, messages: list[dict]) -> list[tuple[int, int]]:
    counts = [image.num_tokens(2) for image in renderer.images_of(messages)]
    spans = placeholder_spans(ids, renderer.image_token_id, counts)
    assert spans is not None
    return spans


@pytest.mark.parametrize("renderer", ["qwen3-vl", "qwen3.5"], indirect=True)  # qwen3 is one of text
def test_tokens_are_those_of_the_library_with_transformers_processor(renderer: Renderer) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class Processor:
        image_processor = Qwen2VLImageProcessorPil(
            patch_size=4, size={"shortest_edge": 64, "longest_edge": 4096}, image_mean=TINY.mean, image_std=TINY.std
        )

    backend = renderer._backend._backend
    backend._processor = Processor()
    tool = {"role": "tool", "content": [said("see "), shows(2)]}
    whole = [*CONVERSATION, {"role": "assistant", "content": "ok"}, tool, {"role": "user", "content": "so?"}]
    for messages in (CONVERSATION, whole):
        theirs = backend.render(messages, add_generation_prompt=True)
        assert renderer.render_prompt(messages).tolist() == theirs.token_ids
        items = theirs.multi_modal_data.mm_items["image"]
        for image, item in zip(renderer.images_of(messages), items, strict=True):
            np.testing.assert_allclose(image.patches, item["pixel_values"], atol=1e-5)
    prompt = renderer.render_prompt(CONVERSATION)
    reply = np.array([*renderer.encode("ok"), renderer.stop_ids[0]], np.int32)
    theirs = backend.bridge_to_next_turn(prompt.tolist(), reply.tolist(), [tool])
    assert (
        renderer.extend(prompt, reply, [*CONVERSATION, renderer.parse(reply, prompt)], [tool]).tolist()
        == theirs.token_ids
    )


def test_each_image_has_its_number_of_placeholders(renderer: Renderer) -> None:
    ids = renderer.render_prompt(CONVERSATION)
    spans = spans_of(renderer, ids, CONVERSATION)
    assert [stop - start for start, stop in spans] == [2 * 2, 5 * 2]  # 16 x 16, 40 x 16 pixels
    start, end = (renderer.tokenizer.token_id(token) for token in VISION_TOKENS[:2])
    assert [(ids[a - 1], ids[b]) for a, b in spans] == [(start, end)] * 2


def test_earlier_tokens_never_change_over_turns_with_images(renderer: Renderer) -> None:
    messages, images = list(CONVERSATION), renderer.images_of(CONVERSATION)
    prompt = renderer.render_prompt(messages)
    for turn, role in enumerate(("tool", "user", "tool")):
        reply = np.array([*renderer.encode(f"reply {turn}"), renderer.stop_ids[0]], np.int32)
        new = [{"role": role, "content": [said("now "), shows(turn, height=30)]}]
        history = [*messages, renderer.parse(reply, prompt)]
        extended = renderer.extend(prompt, reply, history, new)
        if extended is None:  # the family renders the conversation anew here
            assert renderer.name == "qwen3.5" and role == "user"
            return
        seen = np.concatenate((prompt, reply))
        np.testing.assert_array_equal(extended[: len(seen)], seen)
        images = (*images, *renderer.images_of(new))
        renderer.check_images(extended, images)
        owners = renderer.text_owners(new, after=(prompt, reply, history))
        assert len(owners) == len(extended) and not (owners >= 0)[extended == renderer.image_token_id].any()
        prompt, messages = extended, [*history, *new]


def test_images_are_never_trained(renderer: Renderer) -> None:
    messages = [*CONVERSATION, {"role": "assistant", "content": "a b"}]
    [(ids, mask, _)] = renderer.render_sft(messages, LossMaskSection(user=True, assistant=True)).examples
    spans_of(renderer, ids, messages)
    assert mask.any() and not mask[ids == renderer.image_token_id].any()
    [only] = renderer.render_sft(messages, LossMaskSection()).examples
    np.testing.assert_array_equal(only[0], ids)
    assert renderer.decode(only[0][only[1]]).startswith("a b")


def test_a_sampled_placeholder_does_not_move_the_next_images(renderer: Renderer) -> None:
    prompt = renderer.render_prompt(CONVERSATION[1:])
    reply = np.array([renderer.image_token_id, *renderer.encode("x"), renderer.stop_ids[0]], np.int32)
    new = [{"role": "tool", "content": [shows(3)]}]
    history = [*CONVERSATION[1:], renderer.parse(reply, prompt)]
    extended = renderer.extend(prompt, reply, history, new)
    assert (extended == renderer.image_token_id).sum() == (prompt == renderer.image_token_id).sum() + 1 + 4


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ([{"role": "user", "content": "a <|image_pad|>"}], DataError, "0 images, and 1 placeholders"),
        ([{"role": "system", "content": [shows()]}], DataError, "the role 'system' has an image"),
        ([{"role": "user", "content": [shows(), {"type": "audio"}]}], DataError, "may have only text parts and images"),
    ],
)
def test_images_and_placeholders_that_do_not_fit_are_refused(renderer, messages, error, message) -> None:
    with pytest.raises(error, match=message):
        renderer.render_prompt(messages)


def test_tokens_without_their_images_are_refused(renderer: Renderer) -> None:
    ids, images = renderer.render_prompt(CONVERSATION), renderer.images_of(CONVERSATION)
    renderer.check_images(ids, images)
    with pytest.raises(DataError, match=r"has 14 placeholders .* its 1 images need 4,"):
        renderer.check_images(ids, images[:1])
    with pytest.raises(DataError, match=r"has 0 placeholders .* its 2 images need 14,"):
        renderer.check_images(ids[:5], images)


def test_a_text_model_takes_no_images(tmp_path: Path) -> None:
    text = build_renderer(build_letters_tokenizer(tmp_path), model_type="qwen3")
    with pytest.raises(ConfigError, match=r"messages\[1\].content\[1\] is an image"):
        text.render_prompt(CONVERSATION)
    with pytest.raises(ConfigError, match="its tokenizer has no"):
        build_renderer(build_letters_tokenizer(tmp_path), model_type="qwen3", images=TINY)


def test_base64_of_a_picture_is_a_data_url() -> None:
    encoded = png()
    assert base64.b64decode(data_url(encoded).removeprefix("data:image/png;base64,")) == encoded


def test_a_picture_comes_back_from_its_patches() -> None:
    shown = picture(40, 24)
    back = pillow.open(io.BytesIO(TINY.png(TINY.process(shown))))
    np.testing.assert_array_equal(np.asarray(back), np.asarray(shown))


def test_people_see_one_placeholder_per_image(renderer: Renderer) -> None:
    text = renderer.readable(renderer.render_prompt(CONVERSATION))
    assert text.count("<|image_pad|>") == 2 and "what <|vision_start|><|image_pad|><|vision_end|> and" in text
    assert len(renderer.pictures(renderer.images_of(CONVERSATION))) == 2


def test_messages_from_a_network_name_no_files_of_this_host() -> None:
    refuse_paths([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(png())}}]}])
    for source in ("/etc/hostname", "file:///etc/hostname", "a.png", {"path": "/etc/hostname"}):
        with pytest.raises(DataError, match="must be a data URL here"):
            refuse_paths([{"role": "user", "content": [{"type": "image", "image": source}]}])


def test_openai_messages_hold_every_picture_as_a_data_url(tmp_path: Path) -> None:
    encoded = png()
    (tmp_path / "a.png").write_bytes(encoded)
    for source in (str(tmp_path / "a.png"), encoded, data_url(encoded)):
        messages = [{"role": "user", "content": [{"type": "image", "image": source}, said("?")]}]
        (message,) = openai_messages(messages)
        assert message["content"] == [{"type": "image_url", "image_url": {"url": data_url(encoded)}}, said("?")]
    (message,) = openai_messages([{"role": "user", "content": [shows(0)]}])
    assert TINY.image(message["content"][0], "here") == TINY.process(picture())
    assert openai_messages([{"role": "user", "content": "a"}]) == [{"role": "user", "content": "a"}]
