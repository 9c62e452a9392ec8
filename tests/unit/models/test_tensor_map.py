"""The tensor map: export and load are inverse, and a slice of a parameter is read as a slice."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import build_policy

from stretto.base.errors import DataError
from stretto.families.family import WeightRule
from stretto.models import hub
from stretto.models.safetensors_file import read_file
from stretto.models.tensor_map import TensorMap, TensorSlice, as_whole_slices

RULES = (
    WeightRule(("b.{layer}.renamed",), ("x.{layer}.old.weight",)),
    WeightRule(("b.{layer}.q", "b.{layer}.k", "b.{layer}.v"), ("x.{layer}.qkv",)),
    WeightRule(("b.{layer}.gate_up",), ("x.{layer}.gate", "x.{layer}.up")),
    WeightRule(("b.{layer}.experts",), ("x.{layer}.e.{expert}.gate", "x.{layer}.e.{expert}.up")),
    WeightRule(("b.{layer}.down",), ("x.{layer}.e.{expert}.down",)),
)


def ours() -> dict[str, torch.Tensor]:
    shapes = {"same": (3,), "head.weight": (5, 4)}
    for layer in (0, 11):
        shapes |= {
            f"b.{layer}.renamed": (2, 3), f"b.{layer}.q": (6, 4), f"b.{layer}.k": (2, 4), f"b.{layer}.v": (2, 4),
            f"b.{layer}.gate_up": (8, 4), f"b.{layer}.experts": (3, 6, 4), f"b.{layer}.down": (3, 4, 3),
        }  # fmt: skip
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def build_tensor_map(tensors):
    return TensorMap({name: tuple(t.shape) for name, t in tensors.items()}, RULES)


def test_names_and_contents_are_what_the_rules_say():
    tensors = ours()
    theirs = dict(build_tensor_map(tensors).export(tensors))
    assert theirs["same"] is not None and torch.equal(theirs["x.11.old.weight"], tensors["b.11.renamed"])
    assert torch.equal(theirs["x.0.qkv"], torch.cat([tensors[f"b.0.{n}"] for n in "qkv"]))
    assert torch.equal(theirs["x.0.up"], tensors["b.0.gate_up"][4:])
    assert torch.equal(theirs["x.11.e.2.up"], tensors["b.11.experts"][2, 3:])
    assert torch.equal(theirs["x.11.e.1.down"], tensors["b.11.down"][1])
    assert len(theirs) == 2 + 2 * (1 + 1 + 2 + 6 + 3)
    assert {name: tuple(t.shape) for name, t in theirs.items()} == build_tensor_map(tensors).their_shapes


def test_there_and_back_is_the_same_bits_in_any_order():
    tensors = ours()
    table, empty = (build_tensor_map(tensors), {name: torch.full_like(t, torch.nan) for name, t in tensors.items()})
    for name, tensor in reversed(list(table.export(tensors))):
        table.copy_in(name, tuple(tensor.shape), tensor, as_whole_slices(empty.items()))
    assert all(torch.equal(tensors[name], empty[name]) for name in tensors)


class Reader:
    """A tensor that counts how many of its elements are read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.num_read = tensor, 0

    def __getitem__(self, region):
        part = self.tensor[region]
        self.num_read += part.numel()
        return part


@pytest.mark.parametrize(("parts", "dim"), list(itertools.product((2, 3), (0, 1))))
def test_a_rank_gets_its_slice_and_reads_no_more(parts, dim):
    """Dim 0 of stacked experts is cut by ep, of other weights by FSDP and tp columns; dim 1 by tp rows."""
    tensors = ours()
    table = build_tensor_map(tensors)
    for rank in range(parts):
        targets, expected = {}, {}
        for name, tensor in tensors.items():
            if tensor.dim() <= dim:
                continue
            chunks = tensor.tensor_split(parts, dim)
            start = [0] * tensor.dim()
            start[dim] = sum(chunk.shape[dim] for chunk in chunks[:rank])
            expected[name] = chunks[rank]
            targets[name] = TensorSlice(torch.full_like(chunks[rank], torch.nan), tuple(start), tuple(tensor.shape))
        num_read = 0
        for name, tensor in table.export(tensors):
            reader = Reader(tensor)
            table.copy_in(name, tuple(tensor.shape), reader, targets)
            num_read += reader.num_read
            assert (reader.num_read > 0) == (name in table.find_needed(targets))
        assert all(torch.equal(targets[name].tensor, expected[name]) for name in expected)
        assert num_read == sum(t.numel() for t in expected.values())


def test_a_rank_loads_its_experts_from_files(tmp_path):
    policy = build_policy(family="qwen3_moe", num_experts=4)
    hub.save_hf(policy, tmp_path)
    stacked = dict(policy.named_parameters())["model.layers.1.mlp.experts.down_proj"]
    part = TensorSlice(torch.zeros(2, *stacked.shape[1:]), (2, 0, 0), tuple(stacked.shape))
    mine = {"model.layers.1.mlp.experts.down_proj": part}
    hub.load_slices(policy.tensor_map, mine, hub.read_tensors(tmp_path), policy.config, "test")
    assert torch.equal(mine["model.layers.1.mlp.experts.down_proj"].tensor, stacked[2:].detach())
    assert policy.tensor_map.find_needed(mine) == {f"model.layers.1.mlp.experts.{e}.down_proj.weight" for e in (2, 3)}


def test_a_slice_that_the_files_lack_is_named_and_others_are_not_missed(tmp_path):
    policy = build_policy(family="qwen3_moe", num_experts=4)
    hub.save_hf(policy, tmp_path)
    path = tmp_path / "model.safetensors"
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    lost = "model.layers.0.mlp.experts.3.down_proj.weight"
    del tensors[lost]
    save_file(tensors, path)
    shape = (1, *dict(policy.named_parameters())["model.layers.0.mlp.experts.down_proj"].shape[1:])
    for expert in range(4):
        part = TensorSlice(torch.zeros(shape), (expert, 0, 0), (4, *shape[1:]))
        mine = {"model.layers.0.mlp.experts.down_proj": part}
        sources = lambda: hub.read_tensors(tmp_path)
        load = lambda: hub.load_slices(policy.tensor_map, mine, sources(), policy.config, "here")  # noqa: B023
        if expert < 3:
            load()
            continue
        with pytest.raises(DataError, match=f"here: 1 of 1 tensors are missing: {lost}"):
            load()


def test_a_rule_that_cannot_be_inverted_is_not_built():
    for rule in ((("a", "b"), ("c", "d")), (("a", "b"), ("c.{expert}",))):
        with pytest.raises(AssertionError):
            WeightRule(*rule)


def test_files_are_read_as_the_library_reads_them(tmp_path):
    path = tmp_path / "a.safetensors"
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
    tensors = {f"t{i}": torch.randn(5, i + 1, 3).to(dtype) for i, dtype in enumerate(dtypes)}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4)}
    save_file(tensors, path, metadata={"format": "pt"})
    found = dict(read_file(path))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].shape == tuple(tensor.shape) and torch.equal(found[name][()], tensor)
    part = (slice(1, 3), slice(0, 1), slice(2, 3))
    assert torch.equal(found["t1"][part], tensors["t1"][part])


def test_a_file_that_is_being_read_stays_mapped_no_longer_than_a_read(tmp_path):
    """Mapped pages that were read count as this process's memory: loading would peak at twice the model."""
    hub.save_hf(build_policy(), tmp_path)
    held = []
    for _, _, source in hub.read_tensors(tmp_path):
        held.append((source, source[()]))
        assert f"{tmp_path}/model.safetensors" not in Path("/proc/self/maps").read_text()


def test_any_damage_to_a_header_is_a_message_or_changes_no_shape(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.randn(3, 4), "b": torch.ones(2)}, path)
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    num_refused = 0
    for _ in range(400):
        bad = bytearray(data)
        at = int(rng.integers(0, len(data) - 56))
        bad[at] = int(rng.integers(0, 256))
        path.write_bytes(bad)
        try:
            for _, tensor in read_file(path):
                assert tensor[()].shape == tensor.shape
        except DataError as error:
            assert str(path) in str(error)
            num_refused += 1
    assert num_refused > 100
    for header in (b"[]", b'{"a": 3}', b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}'):
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        with pytest.raises(DataError, match="truncated or damaged"):
            list(read_file(path))
    header = b'{"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(DataError, match="'a' is of dtype F4"):
        list(read_file(path))
