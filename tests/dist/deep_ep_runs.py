"""A mixture over two ranks with DeepEPDispatcher and a gloo stand-in for deep_ep; run by every rank.

`python deep_ep_runs.py OUT`. deep_ep itself needs GPUs; `Buffer` here keeps its documented interface:
rows come in no order of experts, a dispatch leaves a handle, a combine adds up, and both are called alike on
every rank.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from mesh_runs import MOE, section_of, train
from tiny import build_policy

from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler
from stretto.trainer.learner import Learner
from stretto.trainer.parallel import shard, token_dispatcher
from stretto.trainer.ranks.mesh import Mesh, find_degrees, process_group, training_device


class Config:
    def get_nvl_buffer_size_hint(self, row_bytes: int, ranks: int) -> int:
        return row_bytes * ranks

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


class Buffer:
    """deep_ep.Buffer over gloo; it reverses the rows received, so that no code can rely on their order."""

    num_sms = 0
    num_dispatches = 0

    def __init__(self, group, num_nvl_bytes, num_rdma_bytes):
        assert num_nvl_bytes > 0
        self.group, self.world = group, dist.get_world_size(group)

    @staticmethod
    def set_num_sms(number):
        Buffer.num_sms = number

    @staticmethod
    def get_dispatch_config(ranks):
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx, num_experts):
        local = num_experts // self.world
        per_rank = torch.bincount(topk_idx[:, 0] // local, minlength=self.world)
        return per_rank, None, torch.bincount(topk_idx[:, 0], minlength=num_experts), None, None

    def dispatch(self, x, handle=None, topk_idx=None, topk_weights=None, num_tokens_per_rank=None, **layout):
        Buffer.num_dispatches += 1
        if handle is None:
            sent = num_tokens_per_rank
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent, group=self.group)
            expert = torch.empty(int(received.sum()), dtype=torch.int64)
            sizes = sent.tolist(), received.tolist()
            local = len(layout["num_tokens_per_expert"]) // self.world
            dist.all_to_all_single(expert, topk_idx[:, 0] % local, sizes[1], sizes[0], group=self.group)
            handle = sizes
        sent, received = handle
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x, received, sent, group=self.group)
        if topk_idx is None:
            return out.flip(0), None, None, None, handle, None
        return out.flip(0), expert.flip(0)[:, None], None, None, handle, None

    def combine(self, x, handle):
        sent, received = handle
        out = x.new_empty(sum(sent), x.shape[1])
        dist.all_to_all_single(out, x.flip(0), sent, received, group=self.group)
        return out, None, None


def main(out: Path) -> None:
    torch.set_num_threads(1)
    sys.modules["deep_ep"] = types.SimpleNamespace(Buffer=Buffer)
    results = {}
    with process_group(timeout_s=60.0):
        for chunk in (None, 5):
            section = section_of("replay", ep=2)
            mesh = Mesh(find_degrees(section, 2, build_policy(**MOE).config), training_device())
            wire = token_dispatcher.DeepEPDispatcher(mesh, 24, chunk)
            shard.build_token_dispatcher = lambda section, mesh, wire=wire: wire
            learner = Learner(
                build_policy(**MOE),
                model=section,
                optim=AdamWOptim(lr=1e-3, max_norm=0.5, eps=1e-3),
                scheduler=ConstantScheduler(warmup_steps=0),
                max_steps=None,
                enable_router_replay=True,
                mesh=mesh,
            )
            metrics = train(learner, "replay")["metrics"]
            results[chunk] = metrics, Buffer.num_dispatches, Buffer.num_sms
    if mesh.is_lead:
        torch.save(results, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
