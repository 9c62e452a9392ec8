"""What a forward pass keeps on a rank of tp, with whole and with split tokens; run by every rank.

`python split_ranks.py OUT` writes OUT/kept.json from rank 0: by setting, the bytes that operators of a forward pass
returned and that are alive at its end.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[2]))

from tiny import build_policy, documents, pack

from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import AdamWOptim
from stretto.trainer.network import TorchNetwork
from stretto.trainer.parallel.scores import compute_logprobs
from stretto.trainer.ranks.mesh import Mesh, find_degrees, process_group, training_device

SETTLE_S = 0.05
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "num_layers": 16,
}
SETTINGS = {
    "whole": {},
    "split": {"sequence_parallel": True},
    "whole, ac": {"ac": {}},
    "split, ac": {"ac": {}, "sequence_parallel": True},
    "split, groups": {"ac": {"group_size": 4}, "sequence_parallel": True},
}


class Made(TorchDispatchMode):
    """The storages that operators make while it is entered, by weak references; none that they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, StorageWeakRef] = {}
        self.made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.given |= {place: found for place, found in _storages((args, kwargs)) if place not in self.made}
        result = func(*args, **(kwargs or {}))
        self.made |= {place: found for place, found in _storages(result) if place not in self.given}
        return result

    def alive(self) -> int:
        """Bytes of the storages that somebody still holds; FSDP holds some that it has emptied."""
        storages = [torch.UntypedStorage._new_with_weak_ptr(place) for place in self.made]
        return sum(storage.nbytes() for storage in storages if storage is not None)


def _storages(tree: object) -> Iterator[tuple[int, StorageWeakRef]]:
    """By address the storages of a tree's tensors; while there is a weak reference, no other gets that address."""
    for tensor in pytree.tree_leaves(tree):
        if isinstance(tensor, torch.Tensor):
            reference = StorageWeakRef(tensor.untyped_storage())
            yield reference.cdata, reference


def kept_bytes(settings: dict) -> int:
    """What a forward pass of a network keeps, in bytes; every rank keeps as much.

    Threads of gloo let go of the buffers of collectives when they get to it: bytes are read until they no longer fall.
    """
    section = ModelSection(tp=2, **settings)
    policy = build_policy(**SHAPE)
    mesh = Mesh(find_degrees(section, 2, policy.config), training_device())
    network = TorchNetwork(policy, model=section, optim=AdamWOptim(lr=1e-3), mesh=mesh)
    inputs = network.build_inputs(pack(documents(num_groups=16)))
    with Made() as made:
        logprobs = compute_logprobs(network.module, inputs, network.mesh, ModelSection())[0]
    kept, last = made.alive(), None
    while kept != last:
        time.sleep(SETTLE_S)
        gc.collect()
        kept, last = made.alive(), kept
    del logprobs
    return kept


if __name__ == "__main__":
    torch.set_num_threads(1)
    with process_group(timeout_s=60.0):
        found = {name: kept_bytes(settings) for name, settings in SETTINGS.items()}
        print(found, flush=True)
        if torch.distributed.get_rank() == 0:
            Path(sys.argv[1], "kept.json").write_text(json.dumps(found))
