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
from stretto.trainer.network import Network
from stretto.trainer.parallel.scores import compute_logprobs
from stretto.trainer.ranks.mesh import Mesh, find_degrees, process_group, training_device

NUM_PASSES = 4
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "num_layers": 8,
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
    """Bytes that are there after a forward pass of a network, and were not before it.

    Buffers of collectives may still be there when a pass ends: the least of several passes counts.
    """
    section = ModelSection(tp=2, **settings)
    policy = build_policy(**SHAPE)
    mesh = Mesh(find_degrees(section, 2, policy.config), training_device())
    network = Network(policy, model=section, optim=AdamWOptim(lr=1e-3), mesh=mesh)
    inputs = network.build_inputs(pack(documents(num_groups=64)))
    compute_logprobs(policy, inputs, mesh, section)[0].sum().backward()
    cpu, kept = torch.profiler.ProfilerActivity.CPU, []
    for _ in range(NUM_PASSES):
        network.weights.zero_grad()
        torch.distributed.barrier()
        gc.collect()
        with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
            logprobs = compute_logprobs(policy, inputs, mesh, section)[0]
            time.sleep(0.1)  # gloo's threads let go of buffers a little later
            gc.collect()
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        kept.append(sum(event.nbytes() for event in events))
        logprobs.sum().backward()
    least = torch.tensor(min(each for each in kept if each > 0))
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)  # every rank keeps as much
    return int(least)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with process_group(timeout_s=60.0):
        found = {name: kept_bytes(settings) for name, settings in SETTINGS.items()}
        print(found, flush=True)
        if torch.distributed.get_rank() == 0:
            Path(sys.argv[1], "kept.json").write_text(json.dumps(found))
