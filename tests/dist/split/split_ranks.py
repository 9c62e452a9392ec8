"""What a forward pass keeps on a rank of tp, with whole and with split tokens; run by every rank.

`python split_ranks.py OUT` writes OUT/kept.json from rank 0: by setting, the bytes that torch's allocator has handed
out between the beginning and the end of a forward pass.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tiny import build_policy, documents, pack

from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import AdamWOptim
from stretto.trainer.batch.pass_inputs import PassInputs
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
    "whole, groups": {"ac": {"group_size": 4}},
    "split, groups": {"ac": {"group_size": 4}, "sequence_parallel": True},
}


def kept_bytes(settings: dict) -> int:
    """The least that a forward pass of a network keeps, in bytes; every rank keeps as much.

    Threads of gloo let go of the buffers of collectives when they get to it.
    """
    section = ModelSection(tp=2, **settings)
    policy = build_policy(**SHAPE)
    mesh = Mesh(find_degrees(section, 2, policy.config), training_device())
    network = TorchNetwork(policy, model=section, optim=AdamWOptim(lr=1e-3), mesh=mesh)
    inputs = network.build_inputs(pack(documents(num_groups=16)))
    least = torch.tensor(min(kept for _ in range(3) if (kept := _kept_by_pass(network, inputs)) > 0))
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
    return int(least)


def _kept_by_pass(network: TorchNetwork, inputs: PassInputs) -> int:
    """Bytes that a forward pass adds; what is freed by chance while it runs, or later, changes them."""
    torch.distributed.barrier()
    time.sleep(SETTLE_S)
    gc.collect()
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        logprobs = compute_logprobs(network.module, inputs, network.mesh, ModelSection())[0]
        time.sleep(SETTLE_S)
        gc.collect()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    del logprobs
    return sum(event.nbytes() for event in events)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with process_group(timeout_s=60.0):
        found = {name: kept_bytes(settings) for name, settings in SETTINGS.items()}
        print(found, flush=True)
        if torch.distributed.get_rank() == 0:
            Path(sys.argv[1], "kept.json").write_text(json.dumps(found))
