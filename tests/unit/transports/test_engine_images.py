"""Images in the body of a request: what the engine reads is what was sent, and what does not fit is refused."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest

from stretto.base.errors import DataError
from stretto.records.generate import GenerateRequest
from stretto.records.images import Image, image_of
from stretto.transports.engine import api
from stretto.transports.engine.images import VisionSizes, refusal_reason

PAD = 9
SIZES = VisionSizes.of({"vision_config": {"patch_size": 4, "spatial_merge_size": 2}})


def image(seed: int, grid: tuple[int, int, int] = (1, 4, 2)) -> Image:
    size = grid[0] * grid[1] * grid[2]
    return image_of(np.random.default_rng(seed).random((size, 96), np.float32), grid)


def ask(*images: Image, ids: list[int] | None = None, **more) -> GenerateRequest:
    if ids is None:
        ids = [1]
        for each in images:
            ids += [2] + [PAD] * each.num_tokens(2) + [3]
    settings = {"cache_salt": "7"} | more
    return GenerateRequest(
        request_id="r", prompt_ids=np.array(ids, np.int32), images=images, image_token_id=PAD, **settings
    )


def body(request: GenerateRequest) -> dict:
    return json.loads(api.encode_generate(request))


def read(changed: dict) -> GenerateRequest:
    return api.decode_generate(json.dumps(changed).encode())[0]


def test_images_arrive_as_they_were_sent() -> None:
    sent = ask(image(0), image(1, (1, 2, 8)), image(0))
    got, _ = api.decode_generate(api.encode_generate(sent))
    assert got.images == sent.images and got.image_token_id == PAD
    assert [each.grid for each in got.images] == [each.grid for each in sent.images]
    for had, has in zip(sent.images, got.images, strict=True):
        np.testing.assert_array_equal(had.patches, has.patches)
    assert refusal_reason(got, SIZES) is None


def test_the_hash_of_an_image_is_that_of_its_pixels_whatever_it_is_called() -> None:
    renamed = changed(("mm_hashes", "image"), [image(1).hash], ask(image(0)))
    assert read(renamed).images[0].hash == image(0).hash


def test_a_request_without_images_has_no_features() -> None:
    sent = body(ask())
    assert "features" not in sent and read(sent).images == ()


def test_the_salt_of_the_weights_is_in_the_hash_on_the_wire() -> None:
    first, second = (body(ask(image(0), cache_salt=salt))["features"]["mm_hashes"] for salt in "12")
    assert first != second


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")  # those of vLLM's imports
def test_vllm_reads_the_same_arrays() -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import decode_mm_kwargs_item

    sent = ask(image(0), image(1, (1, 2, 8)))
    features = body(sent)["features"]
    for had, text in zip(sent.images, features["kwargs_data"]["image"], strict=True):
        item = decode_mm_kwargs_item(text)
        np.testing.assert_array_equal(item["pixel_values"].data.numpy(), had.patches)
        assert item["image_grid_thw"].data.tolist() == list(had.grid)
        assert item["image_grid_thw"].field.keep_on_cpu and not item["pixel_values"].field.keep_on_cpu
    assert features["mm_placeholders"]["image"] == [{"offset": 2, "length": 2}, {"offset": 6, "length": 4}]


def test_images_without_placeholders_are_not_sent() -> None:
    with pytest.raises(DataError, match="1 images, and 0 runs of their placeholder 9"):
        api.encode_generate(ask(image(0), ids=[1, 2, 3]))


def changed(path: tuple, value: object, request: GenerateRequest) -> dict:
    whole = body(request)
    inner = whole["features"]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return whole


PLACE = ("mm_placeholders", "image", 0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("mm_hashes",), {"video": ["a"]}, "only `image` is served"),
        (("mm_hashes", "image"), ["a", "b"], "2 hashes, 1 placeholders and 1 entries"),
        (("kwargs_data",), None, "1 hashes, 1 placeholders and 0 entries"),
        (("kwargs_data", "image", 0), "%%", r"kwargs_data.image\[0\] is not an image in vLLM's form"),
        (("kwargs_data", "image", 0), "gA==", r"kwargs_data.image\[0\] is not an image"),
        ((*PLACE, "offset"), 99, "is not after the place before it and in the prompt"),
        ((*PLACE, "length"), 0, "is not after the place before it"),
        ((*PLACE, "offset"), 1, r"the tokens there are \[2, 9\]"),
        (("surprise",), 1, "unknown field"),
    ],
)
def test_damaged_images_are_refused_with_their_field(path, value, message: str) -> None:
    with pytest.raises(api.Refusal, match=message):
        read(changed(path, value, ask(image(0))))


def test_arrays_that_are_none_of_an_image_are_refused() -> None:
    from base64 import b64decode, b64encode

    whole = body(ask(image(0)))
    item = msgspec.msgpack.decode(b64decode(whole["features"]["kwargs_data"]["image"][0]))
    item["pixel_values"]["field"][1]["slices"] = [[0, 10**9, None]]
    whole["features"]["kwargs_data"]["image"][0] = b64encode(msgspec.msgpack.encode(item)).decode()
    with pytest.raises(api.Refusal, match="is not an image in vLLM's form"):
        read(whole)


def test_a_model_refuses_images_that_it_cannot_take() -> None:
    assert "one of text" in refusal_reason(ask(image(0)), VisionSizes.of({"hidden_size": 8}))
    larger = VisionSizes.of({"vision_config": {"patch_size": 16}})
    assert "takes 1536 numbers" in refusal_reason(ask(image(0)), larger)
    odd = ask(image(0, (1, 4, 3)), ids=[PAD] * 3)
    assert "a multiple of 2" in refusal_reason(odd, SIZES)
    few = ask(image(0), ids=[1, PAD, 2])
    assert "not those of the images, [2]" in refusal_reason(few, SIZES)
    assert refusal_reason(ask(), None) is None


def test_a_body_has_room_for_the_pixels_of_a_whole_context() -> None:
    from stretto.inference.boundary import max_body_bytes

    whole = ask(image(0, (1, 64, 64)), ids=[PAD] * 1024)
    assert len(api.encode_generate(whole)) < max_body_bytes(1024, vision=SIZES)
    assert max_body_bytes(1024, vision=None) < max_body_bytes(1024, vision=SIZES)
