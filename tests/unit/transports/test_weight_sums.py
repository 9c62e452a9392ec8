"""The sums of tensors name the group in which engine and trainer differ, by any bit."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from stretto.base.errors import EngineError
from stretto.records.weight_manifest import Canary, TensorEntry, WeightManifest
from stretto.transports.engine.updates import Updated, decode_updated, encode_updated
from stretto.transports.weights.sums import GroupSums, compare_sums, merge_sums

SHAPES = {
    "model.embed_tokens.weight": (40, 24),
    "model.layers.0.self_attn.q_proj.weight": (24, 24),
    "model.layers.0.input_layernorm.weight": (24,),
    "model.layers.10.mlp.experts.3.up_proj.weight": (24, 50),
    "model.layers.10.mlp.gate.bias": (7,),
    "model.norm.weight": (25,),
    "model.empty": (0,),
}
GROUPS = ("model.embed_tokens.weight", "model.layers.0", "model.layers.10", "model.norm.weight", "model.empty")


def tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in SHAPES.items()}


def sums_of(named: dict[str, torch.Tensor]) -> dict[str, int]:
    sums = GroupSums()
    assert list(sums.of(named.items())) == list(named.items()), "they are passed on"
    return sums.by_group


def manifest(sums: dict[str, int], named: dict[str, torch.Tensor], **more) -> WeightManifest:
    entries = [
        TensorEntry(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), 0, 0, t.nbytes)
        for name, t in named.items()
    ]
    canary = Canary((1, 2), (0.0, -1.0), sums=sums)
    where = {"version": 1, "transport": "shm", "location": "x", "shards": ("x",), "checksum": 0}
    return WeightManifest(**where, tensors=tuple(entries), canary=canary, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_bit_of_every_tensor_is_in_the_sum_of_its_group(dtype: torch.dtype) -> None:
    known = tensors(dtype)
    expected = sums_of(known)
    assert set(expected) == set(GROUPS)
    random = np.random.default_rng(0)
    for name, tensor in known.items():
        for _ in range(20 if tensor.numel() else 0):
            changed = tensor.clone()
            at, bit = random.integers(tensor.nbytes), 1 << int(random.integers(8))
            changed.view(-1).view(torch.uint8)[at] ^= bit
            group = next(group for group in GROUPS if name.startswith(group))
            assert compare_sums(manifest(expected, known), (known | {name: changed}).items()) == (5, [group])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_changes_its_place_changes_the_sum(dtype: torch.dtype) -> None:
    """Loading goes wrong by order: halves that are swapped, gates and ups that are interleaved."""
    norm, matrix = torch.randn(2048).to(dtype), torch.randn(8, 1024).to(dtype)
    moved = [
        (norm, norm.roll(1024)),
        (norm, norm.flip(0)),
        (matrix, matrix.view(4, 2, 1024).flip(1).reshape(8, 1024)),
        (matrix, matrix.view(2, 4, 1024).mT.reshape(8, 1024)),
        (matrix[:, :256].contiguous(), matrix[:, :256].flip(0)),
    ]
    for before, after in moved:
        assert sums_of({"a": before}) != sums_of({"a": after})


def test_neither_the_order_nor_the_ranks_that_sum_make_a_difference() -> None:
    known = tensors()
    whole, names = sums_of(known), list(known)
    assert sums_of({name: known[name] for name in reversed(names)}) == whole
    parts = [sums_of({name: known[name] for name in names[rank::3]}) for rank in range(3)]
    assert merge_sums(parts) == whole
    swapped = dict(zip(known, [known[n] for n in [names[0], names[2], names[1], *names[3:]]]))
    assert sums_of(swapped)["model.layers.0"] != whole["model.layers.0"], "a name belongs to its bits"


def test_where_a_tensor_lies_in_memory_makes_no_difference() -> None:
    stacked = torch.randn(3, 5, 7).bfloat16()
    for part in (stacked[1], stacked[2], stacked[:, 2], stacked.mT[1], stacked[1, 1:, 3:]):
        assert sums_of({"a": part}) == sums_of({"a": part.clone(memory_format=torch.contiguous_format)})


def test_an_engine_in_a_wider_type_is_compared_and_one_in_a_narrower_is_not() -> None:
    known = tensors(torch.bfloat16)
    told = manifest(sums_of(known), known)
    wider = {name: tensor.float() for name, tensor in known.items()}
    assert compare_sums(told, wider.items()) == (5, [])
    wider["model.norm.weight"][3] *= 1.01
    assert compare_sums(told, wider.items()) == (5, ["model.norm.weight"])
    exact = tensors()
    assert compare_sums(manifest(sums_of(exact), exact), known.items()) == (0, [])
    halves = {name: tensor.half() for name, tensor in known.items()}
    assert compare_sums(told, halves.items()) == (0, [])


def test_tied_matrices_are_left_out_and_missing_tensors_differ() -> None:
    known = tensors()
    told = manifest(sums_of(known), known)
    assert compare_sums(told, (known | {"lm_head.weight": torch.ones(3)}).items()) == (5, [])
    lacking = {name: tensor for name, tensor in known.items() if name != "model.norm.weight"}
    assert compare_sums(told, lacking.items()) == (5, ["model.norm.weight"])
    assert len(compare_sums(told, tensors(seed=1).items())[1]) == 4, "all but the empty one"


def test_an_engine_with_other_bits_is_named_with_the_first_groups() -> None:
    Updated(0.0, 7).check("http://e", 3)
    with pytest.raises(
        EngineError, match=r"http://e has loaded version 3, .* in 5 of 7 groups of tensors: a, b, c, d \.\.\.\. The"
    ):
        Updated(0.0, 7, tuple("abcde")).check("http://e", 3)
    assert decode_updated(encode_updated("3", Updated(0.5, 7, ("a",)))) == Updated(0.5, 7, ("a",))
    assert decode_updated(b"{}") == decode_updated(b"no json") == decode_updated(b"[]") == Updated()


def test_nothing_is_compared_without_sums_and_in_a_probe() -> None:
    known = tensors()
    other = tensors(seed=1).items()
    assert compare_sums(manifest({}, known), other) == (0, [])
    assert compare_sums(manifest(sums_of(known), known, is_probe=True), other) == (0, [])
    bare = msgspec.structs.replace(manifest({}, known), canary=None)
    assert compare_sums(bare, other) == (0, [])
