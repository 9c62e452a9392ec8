"""Encodes and decodes the images beside the tokens of a request: `features` of the generate route.

The form is vLLM's: hashes, positions of the placeholders, and per image a msgpack of its arrays in base64. The prompt's
token ids are sent unchanged, so that the engine sees exactly what the orchestrator rendered. Reading executes nothing,
and every shape is checked.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec
import numpy as np

from stretto.base.errors import DataError
from stretto.records.generate import GenerateRequest
from stretto.records.images import Image, image_of, placeholder_spans

_RAW_ARRAY = 3  # msgpack extension code of vLLM: the bytes of an array
_DTYPES: dict[str, type[np.generic]] = {"float32": np.float32, "int64": np.int64}


class PlaceBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Position of one image's placeholders in the prompt."""

    offset: int
    length: int


class FeaturesBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`features` of the generate route; each list has one entry per image, under the key `image`."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[PlaceBody]]
    kwargs_data: dict[str, list[str]] | None = None
    mm_metadata: None = None


@dataclass(frozen=True)
class VisionSizes:
    """Sizes of the images that a model takes, from its config.json."""

    dim: int  # numbers of one patch
    merge_size: int  # patches along one side of what becomes one token

    @classmethod
    def of(cls, hf: Mapping[str, Any]) -> VisionSizes | None:
        """The sizes in a config.json of the Qwen-VL families; None for a model of text."""
        vision = hf.get("vision_config")
        if not vision:
            return None
        area = vision.get("temporal_patch_size", 2) * vision.get("patch_size", 16) ** 2
        return cls(vision.get("in_channels", 3) * area, vision.get("spatial_merge_size", 2))

    @property
    def bytes_per_token(self) -> int:
        """Bytes in a request for the pixels of one placeholder: float32 in base64."""
        return -(-4 * self.dim * self.merge_size**2 * 4 // 3) + 8


def refusal_reason(request: GenerateRequest, sizes: VisionSizes | None) -> str | None:
    """Why a model of these sizes cannot take the images of a request; None if it can."""
    if not request.images:
        return None
    if sizes is None:
        return "features: this model is one of text; it takes no images"
    for i, image in enumerate(request.images):
        dim = 0 if image.patches is None else image.patches.shape[1]
        if dim != sizes.dim or any(side % sizes.merge_size for side in image.grid[1:]):
            return (
                f"features.kwargs_data.image[{i}]: patches of {dim} numbers in a grid of {list(image.grid)}; this "
                f"model takes {sizes.dim} numbers, in rows and columns of a multiple of {sizes.merge_size}"
            )
    counts = [image.num_tokens(sizes.merge_size) for image in request.images]
    assert request.image_token_id is not None
    if placeholder_spans(request.prompt_ids, request.image_token_id, counts) is None:
        return f"features: the placeholders in token_ids are not those of the images, {counts} in this order"
    return None


def encode_features(request: GenerateRequest) -> FeaturesBody | None:
    """The images of a request; None if it has none. Raises: DataError if images and placeholders do not fit.

    An engine caches the output of its vision tower by the image's hash. So the hash includes the cache salt, because
    weights may have changed.
    """
    if not request.images:
        return None
    places = _places(request)
    salt = "" if request.cache_salt is None else f"{request.cache_salt}-"
    return FeaturesBody(
        mm_hashes={"image": [salt + image.hash for image in request.images]},
        mm_placeholders={"image": places},
        kwargs_data={"image": [_encode_item(image) for image in request.images]},
    )


def decode_features(features: FeaturesBody | None, token_ids: Sequence[int]) -> tuple[tuple[Image, ...], int | None]:
    """The images of a request and their placeholder; () and None if it has none.

    Their hashes are computed from the pixels, not taken from the sender, because engines cache results by hash.

    Raises: DataError that names the field, if the images are damaged or their placeholders are not in the prompt.
    """
    if features is None or not any(features.mm_hashes.values()):
        return (), None
    if features.mm_hashes.keys() != {"image"}:
        raise DataError(f"features: {', '.join(features.mm_hashes)}; only `image` is served")
    hashes = features.mm_hashes["image"]
    places = features.mm_placeholders.get("image", [])
    items = (features.kwargs_data or {}).get("image", [])
    if not len(hashes) == len(places) == len(items):
        raise DataError(
            f"features: {len(hashes)} hashes, {len(places)} placeholders and {len(items)} entries of kwargs_data; "
            "give one of each per image"
        )
    placeholder = _placeholder(places, token_ids)
    images = [_decode_item(text, f"features.kwargs_data.image[{i}]") for i, text in enumerate(items)]
    return tuple(images), placeholder


def _places(request: GenerateRequest) -> list[PlaceBody]:
    """The runs of placeholders, one per image."""
    at = np.flatnonzero(request.prompt_ids == request.image_token_id)
    runs = np.split(at, np.flatnonzero(np.diff(at) != 1) + 1) if len(at) else []
    if len(runs) != len(request.images):
        raise DataError(
            f"request {request.request_id}: {len(request.images)} images, and {len(runs)} runs of their placeholder "
            f"{request.image_token_id} in the prompt"
        )
    return [PlaceBody(int(run[0]), len(run)) for run in runs]


def _placeholder(places: list[PlaceBody], token_ids: Sequence[int]) -> int:
    """The token at all these places."""
    end, tokens = 0, set()
    for i, place in enumerate(places):
        if place.offset < end or place.length < 1 or place.offset + place.length > len(token_ids):
            raise DataError(
                f"features.mm_placeholders.image[{i}]: {place.offset} + {place.length} is not after the place before "
                f"it and in the prompt of {len(token_ids)} tokens"
            )
        end = place.offset + place.length
        tokens |= set(token_ids[place.offset : end])
    if len(tokens) != 1:
        raise DataError(
            f"features.mm_placeholders: the tokens there are {sorted(tokens)[:8]}; all placeholders are one token"
        )
    return tokens.pop()


def _encode_item(image: Image) -> str:
    """One image as vLLM's MultiModalKwargsItem of the Qwen-VL families."""
    patches = image.patches
    assert patches is not None, f"image {image.hash} was sent without its patches"
    fields = _fields(len(patches))
    item = {
        "pixel_values": {
            "data": _array(np.ascontiguousarray(patches, "<f4"), "float32"),
            "field": fields["pixel_values"],
        },
        "image_grid_thw": {"data": _array(np.array(image.grid, "<i8"), "int64"), "field": fields["image_grid_thw"]},
    }
    return b64encode(msgspec.msgpack.encode(item)).decode()


def _fields(num_patches: int) -> dict[str, Any]:
    """How vLLM batches the arrays of an image."""
    return {
        "pixel_values": ["flat", {"slices": [[0, num_patches, None]], "dim": 0, "keep_on_cpu": False}],
        "image_grid_thw": ["batched", {"keep_on_cpu": True}],
    }


def _array(values: np.ndarray, dtype: str) -> tuple[Any, ...]:
    return dtype, values.shape, msgspec.msgpack.Ext(_RAW_ARRAY, values.tobytes())


def _decode_item(text: str, where: str) -> Image:
    try:
        item = msgspec.msgpack.decode(b64decode(text, validate=True), ext_hook=_raw)
        fields = {name: entry["field"] for name, entry in item.items()}
        if fields != _fields(item["pixel_values"]["data"][1][0]):
            raise ValueError(f"fields {fields}")
        patches = _read(item["pixel_values"]["data"], 2)
        grid = _read(item["image_grid_thw"]["data"], 1)
    except (ValueError, TypeError, KeyError, msgspec.MsgspecError, RecursionError) as cause:
        raise DataError(f"{where} is not an image in vLLM's form: {cause!r}") from cause
    sides = [int(side) for side in grid]
    if len(sides) != 3 or min(sides) < 1 or prod(sides) != len(patches):
        raise DataError(f"{where}: {len(patches)} patches do not fit the grid {sides} (time, height, width)")
    return image_of(patches, (sides[0], sides[1], sides[2]))


def _raw(code: int, data: memoryview) -> memoryview:
    if code != _RAW_ARRAY:
        raise ValueError(f"extension {code}")
    return data


def _read(entry: Any, num_dims: int) -> np.ndarray:
    dtype, shape, data = entry
    if len(shape) != num_dims:
        raise ValueError(f"an array of shape {shape}")
    values: np.ndarray = np.frombuffer(data, dtype=_DTYPES[dtype])
    return values.reshape(shape)
