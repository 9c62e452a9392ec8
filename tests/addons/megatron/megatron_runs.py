"""A tiny policy on meshes of Megatron-Core, compared with our own trainer; run by test_megatron_network.py.

`python megatron_runs.py OUT CASE...`, with the folder on_cpu on the path of Python, imports once, forks the ranks of
each case, and writes OUT/<case>.json from rank 0: the largest differences of scores, gradients and weights from one
rank of our own trainer, and what else a case measures.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pickle
import sys
import traceback
from argparse import Namespace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from msgspec.structs import replace
from tiny import VOCAB, build_policy, documents, pack, save_checkpoint, with_streams

from stretto.base.paths import RunDir
from stretto.check.degrees import Degrees
from stretto.config.sections.algorithm import DefaultLoss
from stretto.config.sections.model import ActivationCheckpointSection, ModelSection
from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler, CriticSection, MegatronSection
from stretto.models import hub
from stretto.models.value_head import with_value_head
from stretto.records.sample import MicroBatch
from stretto.records.support import Support
from stretto.trainer.learner import Learner
from stretto.trainer.network import TorchNetwork
from stretto.trainer.ranks import exchange
from stretto.trainer.ranks.mesh import Mesh
from stretto.trainer.state.checkpoint import SavedState, Saver, load
from stretto_megatron.checks.limits import build_network
from stretto_megatron.moments import find_optimizer, write_state

if TYPE_CHECKING:
    from stretto_critic.critic import Critic

SHAPE = {"num_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEADLINE = timedelta(seconds=150)


def device() -> torch.device:
    """That of this rank: a GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["RANK"]))


def degrees_of(case: str) -> Degrees:
    """`qwen3_moe-tp2-pp2-ep2` -> its degrees; dp is named too."""
    sizes = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "dp": 1}
    for part in case.split("-")[1:]:
        if part[:2] in sizes and part[2:].isdigit():
            sizes[part[:2]] = int(part[2:])
    dp = sizes.pop("dp")
    return Degrees(dp_shard=dp, **sizes, splits_tokens=sizes["tp"] > 1)


def learner_of(case: str, mesh: Mesh | None, seed: int = 0, **more: Any) -> Learner:
    """mesh: None for one rank of our own trainer."""
    words = case.split("-")
    shape = SHAPE | {"tie_word_embeddings": "untied" not in words}
    hf = {key: value for word in words for key, value in SHAPES.get(word, {}).items()}
    build = lambda seed, **more: build_policy(seed, hf, family=words[0], **(shape | more))
    section, ac = section_of(case), None
    if mesh is not None and "full" in words:
        ac = ActivationCheckpointSection()
    dtype = torch.bfloat16 if "bf16" in words else torch.float32
    larger = {"num_layers": 8, "hidden_size": 80, "num_heads": 8} if "larger" in words else {}
    return Learner(
        build(seed).to(device(), dtype),
        model=ModelSection(dtype=str(dtype).removeprefix("torch."), ac=ac),
        optim=AdamWOptim(lr=1e-2, eps=1e-3, max_norm=0.5),
        scheduler=ConstantScheduler(warmup_steps=0),
        max_steps=None,
        loss=DefaultLoss(entropy_coef=0.01, reference_kl={"coef": 0.1}),
        reference=build(7, **larger).requires_grad_(False).to(device(), dtype),
        mesh=mesh,
        build=TorchNetwork if mesh is None else partial(build_network, section=section),
        **more,
    )


def section_of(case: str) -> MegatronSection:
    return MegatronSection(**{k: v for word in case.split("-") for k, v in OPTIONS.get(word, {}).items()})


OPTIONS: dict[str, dict[str, Any]] = {
    "interleaved": {"virtual_stages": 2},
    "uneven": {"first_stage_layers": 1},
    "etp2": {"etp": 2},
    "block": {"overrides": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}},
}
"""Settings of Megatron that a word of a case stands for; `larger` is a reference of another shape."""


SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {"n_group": 4, "topk_group": 1, "first_k_dense_replace": 1},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
            "mscale": 1.0, "mscale_all_dim": 0.5,
        }
    },
    "stretched": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16
        }
    },
    "clipped": {"swiglu_limit": 0.05, "sliding_window": 3},
}  # fmt: skip
"""Keys of config.json that a word of a case stands for."""


def batches(seed: int) -> list[MicroBatch]:
    """Three micro batches: some ranks of dp have fewer than others. In one, tokens are drawn from a part of all."""
    docs = documents(seed)
    found = [
        with_streams(pack(part, padding=pad), seed) for part, pad in ((docs[:5], 3), (docs[5:8], 0), (docs[8:], 0))
    ]
    tokens = len(found[1].token_ids)
    sizes = np.where(np.arange(tokens) % 3 == 0, 6, 0)
    ids = np.arange(int(sizes.sum())) * 7 % VOCAB
    support = Support(sizes=sizes.astype(np.int32), ids=ids.astype(np.int32))
    return [found[0], replace(found[1], support=support), found[2]]


def largest(found: dict[str, Any], wanted: dict[str, torch.Tensor]) -> float:
    """The largest difference between slices and whole tensors, relative to the largest value of each."""
    worst = 0.0
    for name, part in found.items():
        if part.tensor.numel():
            whole = wanted[name].to(part.tensor.device)
            difference = (part.tensor.float() - whole[part.region]).abs().max() / whole.abs().max().clamp(min=1e-6)
            worst = max(worst, float(difference))
    return worst


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.policy.named_parameters()}


def step(learner: Learner, seed: int) -> dict[str, float]:
    mbs = batches(seed)
    learner.forward_backward(mbs if learner.mesh.world_size == 1 else learner.mesh.local_items(mbs))
    return learner.optim_step()


def run_case(case: str, out: Path) -> dict[str, float]:
    degrees = degrees_of(case)
    mesh = Mesh(degrees, device(), is_sharded=False)
    own, theirs = learner_of(case, None), learner_of(case, mesh)
    found: dict[str, float] = {}
    network = theirs.network
    for given in (network.module, network.reference_module):  # what a user's function gets
        assert all("megatron" in type(chunk).__module__ for chunk in given) and len(given) == 1 + (
            "interleaved" in case
        )
    found["loaded"] = largest(network.weights.all_slices(), weights_of(own))
    exported = {name: tensor.cpu() for name, tensor in theirs.export_tensors()}
    wanted = {name: tensor.cpu() for name, tensor in hub.export_tensors(own.policy)}
    all_exported = {name: tensor for each in gather(exported) for name, tensor in each.items()}
    found["exported"] = float(all_exported.keys() == wanted.keys())
    found["exported"] *= all(torch.equal(all_exported[name], tensor) for name, tensor in wanted.items())

    mbs = batches(1)
    mine = mesh.local_items(mbs)
    scores = [theirs.trained_logprobs(mine, is_reference=is_it) for is_it in (False, True)]
    of_own = [own.trained_logprobs(mine, is_reference=is_it) for is_it in (False, True)]
    pairs = [pair for kind in zip(scores, of_own) for pair in zip(*kind)]
    found["logprobs"] = max((float(np.abs(a - b).max()) for a, b in pairs), default=0.0)

    own.forward_backward(mbs)
    theirs.forward_backward(mine)
    network.finish_gradients()
    norm = network.weights.clip_gradients(None)
    gradients = {name: p.grad for name, p in zip(own.network.weights.names, own.network.weights.parameters)}
    found["gradients"] = largest(network.weights.gathered("grad"), gradients)
    found["norm"] = abs(float(norm) / float(own.network.weights.clip_gradients(None)) - 1)
    metrics, of_own_step = theirs.optim_step(), own.optim_step()
    of_experts = {key for key in of_own_step if key.startswith(("max_vio/", "routing_confidence/"))}
    assert of_own_step.keys() - of_experts == metrics.keys(), of_own_step.keys() ^ metrics.keys()
    found["metrics"] = max(abs(of_own_step[key] - value) for key, value in metrics.items())
    found["updated"] = largest(network.weights.all_slices(), weights_of(own))

    # Each resumes what the other wrote, and Megatron's also its own.
    runs = {name: RunDir(out / case / name) for name in ("own", "theirs")}
    if mesh.is_lead:
        ranks = os.environ.pop("WORLD_SIZE")
        save_checkpoint(runs["own"], own)
        os.environ["WORLD_SIZE"] = ranks
    save_checkpoint(runs["theirs"], theirs)
    mesh.barrier()
    from_theirs, from_own, again = learner_of(case, None, 9), learner_of(case, mesh, 9), learner_of(case, mesh, 9)
    load(runs["theirs"], from_theirs, 1)
    load(runs["own"], from_own, 1)
    load(runs["theirs"], again, 1)
    for each in (own, theirs, from_theirs, from_own, again):
        step(each, 2)
    found["resumed"] = max(
        largest(from_own.network.weights.all_slices(), weights_of(own)),
        largest(theirs.network.weights.all_slices(), weights_of(from_theirs)),
    )
    states = [each.network.state() for each in (theirs, again)]
    is_same = all(torch.equal(part.tensor, states[1][name].tensor) for name, part in states[0].items())
    found["again"] = float(is_same and states[0].keys() == states[1].keys())
    ranks = gather(found)
    worst = {"exported": min, "again": min}
    return {key: worst.get(key, max)(each[key] for each in ranks) for key in found}


def run_saved(case: str, out: Path) -> dict[str, float]:
    """What Megatron's own checkpoint of a run makes of another learner: it goes on as the run does."""
    from megatron.core import dist_checkpointing, parallel_state

    mesh = Mesh(degrees_of(case), device(), is_sharded=False)
    theirs = learner_of(case, mesh)
    for seed in (1, 2):
        step(theirs, seed)
    network, place, run = theirs.network, out / case / "iter_0000002", RunDir(out / case / "begun")
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": "prefixed" not in case,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    weights = network.module[0].module.sharded_state_dict(metadata=metadata)
    state = {
        "model": weights,
        "optimizer": network.optimizer.sharded_state_dict(weights, metadata=metadata),
        "opt_param_scheduler": network.schedule.state_dict(),
        "iteration": 2,
        "checkpoint_version": 3.0,
        "args": Namespace(global_batch_size=3),
    }
    if mesh.is_lead:
        place.mkdir(parents=True)
    mesh.barrier()
    dist_checkpointing.save(state, str(place))
    if mesh.is_lead:
        assert find_optimizer(place) == "by_name"
        hub.save_hf(learner_of(case, None).policy, out / case / "model")
        write_state(place, out / case / "model", run)
    mesh.barrier()
    from_theirs, again = learner_of(case, None, 9), learner_of(case, mesh, 9)
    for each in (from_theirs, again):
        load(run, each, 2)
    for each in (theirs, from_theirs, again):
        each.begin_anew()
        step(each, 3)
    states = [each.network.state() for each in (theirs, again)]
    is_same = all(torch.equal(part.tensor, states[1][name].tensor) for name, part in states[0].items())
    found = {"resumed": largest(network.weights.all_slices(), weights_of(from_theirs)), "again": float(is_same)}
    found["steps"] = float(states[0].keys() == states[1].keys() and again.network.weights.num_updates == 3)
    ranks = gather(found)
    return {key: (max if key == "resumed" else min)(each[key] for each in ranks) for key in found}


def critic_of(case: str, mesh: Mesh | None, seed: int = 0) -> Critic:
    """A critic whose head is not 0; mesh: as in `learner_of`."""
    from stretto_critic.critic import Critic

    module = with_value_head(build_policy(seed, family=case.split("-")[0], tie_word_embeddings=False, **SHAPE))
    module.lm_head.weight.data = torch.linspace(-0.5, 0.5, module.config.hidden_size)[None]
    module.to(device())
    return Critic(
        module,
        section=CriticSection(value_clip=0.2),
        model=ModelSection(dtype="float32"),
        optim=AdamWOptim(lr=1e-2, eps=1e-3, max_norm=0.5),
        mesh=mesh,
        build=TorchNetwork if mesh is None else partial(build_network, section=section_of(case)),
    )


def run_critic(case: str, out: Path) -> dict[str, float]:
    mesh = Mesh(degrees_of(case), device(), is_sharded=False)
    own, theirs = critic_of(case, None), critic_of(case, mesh)
    mbs = [replace(pack(part), values=None) for part in (documents(4)[:5], documents(4)[5:])]
    found = {}
    values = own.values(mbs)
    of_theirs = theirs.values(mesh.local_items(mbs))
    found["values"] = max(float(np.abs(a - b).max()) for a, b in zip(mesh.local_items(values), of_theirs))
    mbs = [
        replace(mb, values=value, returns=np.where(value != 0, np.sin(np.arange(len(value))), 0).astype(np.float32))
        for mb, value in zip(mbs, values)
    ]
    own.forward_backward(mbs)
    theirs.forward_backward(mine := mesh.local_items(mbs))
    theirs.network.finish_gradients()
    theirs.network.weights.clip_gradients(None)  # which Megatron's optimizer then has
    of_own = own.network.weights
    gradients = {name: parameter.grad for name, parameter in zip(of_own.names, of_own.parameters)}
    found["gradients"] = largest(theirs.network.weights.gathered("grad"), gradients)
    for number in (1, 2):
        if number == 2:
            own.forward_backward(mbs)
            theirs.forward_backward(mine)
        for each in (own, theirs):
            each.optim_step(number)
            each.step = number
    found["updated"] = largest(theirs.network.weights.all_slices(), critic_weights(own))
    wanted, metrics = own.pop_metrics(), theirs.pop_metrics()
    found["metrics"] = max(abs(metrics[key] - value) for key, value in wanted.items())

    # Each resumes what the other wrote, and Megatron's also its own.
    from_theirs, from_own, again = critic_of(case, None, 9), critic_of(case, mesh, 9), critic_of(case, mesh, 9)
    saved = {name: RunDir(out / case / name) for name in ("own", "theirs")}
    ranks = os.environ.pop("WORLD_SIZE")
    if mesh.is_lead:
        save_critic(saved["own"], own)
    os.environ["WORLD_SIZE"] = ranks
    save_critic(saved["theirs"], theirs)
    mesh.barrier()
    for name, critics in {"theirs": (from_theirs, again), "own": (from_own,)}.items():
        for each in critics:
            each.load_state(SavedState(saved[name].checkpoint(2) / "critic", advice=""))
    own.train(mbs, 3)
    from_theirs.train(mbs, 3)
    for each in (theirs, from_own, again):
        each.train(mine, 3)
    found["resumed"] = max(
        largest(from_own.network.weights.all_slices(), critic_weights(own)),
        largest(theirs.network.weights.all_slices(), critic_weights(from_theirs)),
    )
    states = [each.network.state() for each in (theirs, again)]
    is_same = all(torch.equal(part.tensor, states[1][name].tensor) for name, part in states[0].items())
    found["again"] = float(is_same and states[0].keys() == states[1].keys())
    of_ranks = gather(found)
    return {key: (min if key == "again" else max)(each[key] for each in of_ranks) for key in found}


def critic_weights(critic: Critic) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in critic.module.named_parameters()}


def save_critic(run: RunDir, critic: Critic) -> None:
    """Write the part of a checkpoint that a critic on ranks of its own writes, and wait for it."""
    Saver(run, is_async=False, on_written=lambda step: None, part="critic").save(critic)


def gather(value: Any) -> list[Any]:
    return [pickle.loads(each) for each in exchange.gather(pickle.dumps(value), bytes)]


def run_rank(case: str, rank: int, size: int, out: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    store = dist.FileStore(str(out / f"{case}.store"), size)
    backend = "gloo"
    if device().type == "cuda":
        torch.cuda.set_device(device())
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=DEADLINE)
    kinds = {"critic": partial(run_critic, out=out), "saved": partial(run_saved, out=out)}
    found = next((kinds[word] for word in case.split("-") if word in kinds), partial(run_case, out=out))(case)
    if rank == 0:
        (out / f"{case}.json").write_text(json.dumps(found))
    dist.barrier()


EARLY = ("torch._dynamo", "stretto.trainer.state.slice_files", "stretto_megatron.network", "stretto_native.training")
"""What every rank imports when it needs it first."""


def main(out: Path, cases: list[str]) -> None:
    """Fork the ranks of each case, one case after the other."""
    for name in EARLY:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for case in cases:
        size, children = degrees_of(case).world_size, []
        for rank in range(size):
            if (child := os.fork()) == 0:
                try:
                    run_rank(case, rank, size, out)
                except BaseException:
                    traceback.print_exc()
                    sys.stderr.flush()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
