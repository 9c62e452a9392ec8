"""Memory of every rank and engine by phase of a step, and the phase with the peak.

In: a `Setup` and the tokens of a row. Out: `Memory` with its phases, each a table of bytes by what takes them.
Checkpoints and the CPU's caches of files are not counted. benchmarks/plan.py compares with torch's allocator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stretto.config.root import RLConfig, SFTConfig
from stretto.config.sections.inference import CPU_CACHE_TOKENS
from stretto.config.sections.model import ActivationCheckpointSection
from stretto.config.sections.trainer import AdamWOptim, MuonOptim, Optim, SgdOptim, SignSgdOptim
from stretto.families.shape import ModelConfig
from stretto_bench.hardware import GIB
from stretto_plan.activations import BlockActivations, block_activations
from stretto_plan.network import NetworkSize
from stretto_plan.setup import BYTES, EngineSetup, Setup, critic_setup

MAX_SAVED_LOGITS = 1 << 21
"""As models/lm_head.py: up to this many logits are kept for the backward pass."""
OFFLOAD_BUCKET_BYTES = 256 * 2.0**20
"""Optimizer state on its way through the GPU at once (trainer/optim/offload.py)."""


@dataclass(frozen=True)
class Phase:
    """One moment of a step: bytes by what takes them."""

    name: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Memory:
    """The memory of one process, alike for all of its kind."""

    who: str
    phases: tuple[Phase, ...]
    capacity_bytes: float
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> Phase:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        return self.peak.total <= self.capacity_bytes


def all_memory(setup: Setup) -> list[Memory]:
    """The memory of each kind of process, with rows of the trainer as long as they may be."""
    trained = [trainer_memory(setup, setup.row_tokens)]
    if setup.num_critic_ranks:
        trained.append(trainer_memory(critic_setup(setup), setup.row_tokens, is_critic=True))
    return [*trained, *(engine_memory(setup, engine) for engine in setup.engines)]


# -- the trainer --


@dataclass(frozen=True)
class Held:
    """Bytes that a rank holds during the whole step."""

    weights: float
    """Weights of the forward pass, or the shards that they are gathered from."""
    masters: float
    optimizer: float
    grads: float
    frozen: float


def trainer_memory(setup: Setup, row_tokens: int, *, num_rows: int = 2, is_critic: bool = False) -> Memory:
    """The memory of one rank of the trainer, or of a critic on ranks of its own.

    row_tokens: of the longest row, before cp cuts it. num_rows: rows of a rank in one step; with several, gradients of
    the earlier ones are there from the start. is_critic: the setup is `critic_setup`; it scores with one number, has no
    reference and sends nothing to engines.
    """
    held = _held(setup)
    tokens = row_tokens / setup.degrees.cp
    blocks = _blocks(setup)
    value = BYTES[setup.train_dtype]
    kept = _kept_bytes(setup, blocks, tokens, value)
    base = {"before the first tensor": setup.hardware.reserved_bytes, "weights": held.weights + held.frozen}
    if held.masters:
        base["float32 masters"] = held.masters
    if setup.has_critic:
        base["critic"] = held.weights + held.masters + held.optimizer + held.grads
    if setup.has_reference and not is_critic:
        base["reference"] = held.weights + held.frozen
    is_offloaded = setup.model.optim_cpu_offload
    state = {} if is_offloaded else {"optimizer": held.optimizer}
    gathered = _gathered_bytes(setup, value)
    staged = 0.0 if is_critic else staging_bytes(setup)
    between = {"staging of a broadcast": staged} if staged and not setup.is_cpu else {}
    steady = base | state | between
    carried = {"gradients": held.grads} if num_rows > 1 else {}
    own_loss = 0.0 if is_critic else _own_loss_bytes(setup, tokens)
    head = 0.0 if is_critic else _head_bytes(setup, tokens) + own_loss
    reached = {"activations": kept, "gathered weights": gathered}
    forward = steady | carried | reached
    phases = [
        Phase("forward pass", forward | {"one block": max(block.forward for block in blocks) * tokens * value}),
        Phase("output head", forward | {"logits": head}),
        _backward(setup, steady, held, blocks, tokens, value, gathered, is_first=num_rows == 1),
        Phase("update", steady | {"gradients": held.grads, "optimizer's work": _update_bytes(setup, held)}),
    ]
    if staged:
        phases.append(
            Phase("publication", base | state | {"staging of a broadcast": staged, "gathered weights": gathered})
        )
    notes = []
    if own_loss:
        notes.append(f"trainer.hooks.loss: four times the logits of a row are counted, {own_loss / GIB:.1f} GiB")
    if is_offloaded:
        notes.append(f"optimizer state in CPU memory: {held.optimizer / GIB:.1f} GiB per rank")
    if setup.model.ac_offloading is not None:
        inputs = sum(block.width for block in blocks) * tokens * value
        notes.append(f"activations in CPU memory: {inputs / GIB:.1f} GiB per rank")
    if setup.model.fsdp_cpu_offload:
        notes.append("fsdp_cpu_offload: weights, gradients and optimizer are counted here, and lie in CPU memory")
    phases = [Phase(p.name, {k: v for k, v in p.parts.items() if v}) for p in phases]
    return Memory(
        "critic rank" if is_critic else "trainer rank", tuple(phases), setup.hardware.memory_bytes, tuple(notes)
    )


def _held(setup: Setup) -> Held:
    """Bytes of one rank's weights, their float32 copies, gradients and optimizer state."""
    section, size = setup.model, setup.size
    wide, own = BYTES[setup.train_dtype], BYTES[section.optimization_dtype]
    is_sharded = setup.num_ranks > 1
    trained, matrices = _trained(setup)
    whole = _per_rank(setup, size)
    share = whole / max(size.total, 1)
    trained, matrices = trained * share, matrices * share
    left = max(whole - trained, 0.0) * (wide if not is_sharded or section.lora else own)
    if is_sharded:
        weights, masters = trained * own, 0.0
    else:
        are_copies = section.optimization_dtype != setup.train_dtype
        weights, masters = trained * wide, trained * own if are_copies else 0.0
    grads = trained * own
    return Held(weights, masters, _state_values(setup.optim, trained, matrices) * own, grads, left)


def _trained(setup: Setup) -> tuple[float, float]:
    """Numbers of weights that are trained, and of those in matrices of blocks."""
    size, section = setup.size, setup.model
    if section.lora is not None:
        adapter = _adapter_weights(setup.shape, section.lora.rank)
        return adapter, adapter
    blocks = sum(layer.total - layer.small for layer in size.layers)
    frozen = size.frozen + (size.vision if section.vlm is None or section.vlm.freeze_vision_encoder else 0)
    return size.total - frozen, blocks - size.frozen


def _adapter_weights(cfg: ModelConfig, rank: int) -> float:
    """Number of weights of low-rank matrices beside all projections of all blocks, experts included."""
    q, kv = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    attention = 4 * cfg.hidden_size + 2 * q + 2 * kv
    found = 0.0
    for layer in range(cfg.num_layers):
        found += attention
        if cfg.is_sparse(layer) and cfg.moe is not None:
            found += 3 * cfg.moe.num_experts * (cfg.hidden_size + cfg.moe.intermediate_size)
        else:
            found += 3 * (cfg.hidden_size + cfg.intermediate_size)
    return found * rank


def _per_rank(setup: Setup, size: NetworkSize) -> float:
    """Numbers of weights that one rank keeps: blocks are cut by tp and ep, all is sharded by FSDP."""
    degrees = setup.degrees
    if setup.num_ranks == 1:
        return float(size.total)
    shards = degrees.dp_shard * degrees.cp
    cut = sum(layer.mixer + layer.dense for layer in size.layers) / degrees.tp
    whole = size.total - size.experts - sum(layer.mixer + layer.dense for layer in size.layers)
    return (cut + whole) / shards + size.experts / degrees.experts_over


def _state_values(optim: Optim, trained: float, matrices: float) -> float:
    """Numbers that an optimizer keeps."""
    match optim:
        case AdamWOptim():
            return 2 * trained
        case MuonOptim():
            return matrices + 2 * (trained - matrices)
        case SgdOptim():
            return trained if optim.momentum > 0 else 0.0
        case SignSgdOptim():
            return 0.0


def _update_bytes(setup: Setup, held: Held) -> float:
    """Memory of an update besides gradients and state."""
    if setup.model.optim_cpu_offload:
        return 3 * OFFLOAD_BUCKET_BYTES
    if isinstance(setup.optim, MuonOptim):
        # Updates of all matrices before the first is applied, and the iteration on the largest one.
        layers = setup.size.layers
        largest = max(max(layer.experts, 2 * layer.dense / 3, layer.mixer / 2) for layer in layers)
        return held.grads + 5 * largest * 4.0 / setup.degrees.ep
    return 0.0


def _blocks(setup: Setup) -> list[BlockActivations]:
    mesh: dict[str, Any] = {"tp": setup.degrees.tp, "splits_tokens": setup.degrees.splits_tokens}
    is_half = setup.train_dtype != "float32"
    return [
        block_activations(setup.shape, layer, **mesh, is_cpu=setup.is_cpu, is_half=is_half)
        for layer in range(setup.shape.num_layers)
    ]


def _kept_bytes(setup: Setup, blocks: Sequence[BlockActivations], tokens: float, value: float) -> float:
    """Bytes that the forward pass of a row keeps, inside and outside the blocks."""
    ac, offload = setup.model.ac, setup.model.ac_offloading
    width, rotated = blocks[0].width, 2.0 * setup.shape.head_dim
    around = (2 * width + rotated) * value * tokens  # the last block's result, what the head reads; angles
    choices = sum(block.choice_bytes for block in blocks) * tokens
    if offload is not None:
        inflight = min(offload.max_inflight_activations, len(blocks))
        return inflight * width * value * tokens + around + choices
    return sum(_kept_by_block(ac, blocks)) * value * tokens + around + choices


def _kept_by_block(ac: ActivationCheckpointSection | None, blocks: Sequence[BlockActivations]) -> list[float]:
    """Numbers per token that each block keeps after its forward pass."""
    groups = [] if ac is None else ac.groups(len(blocks))
    places = {block: block - group.start for group in groups for block in group}
    return [block.kept(ac, places.get(index)) for index, block in enumerate(blocks)]


def _recomputed_before(ac: ActivationCheckpointSection | None, blocks: Sequence[BlockActivations]) -> list[float]:
    """By block: numbers per token that the blocks before it in its group hold again when its backward pass begins."""
    before = [0.0] * len(blocks)
    for group in [] if ac is None or ac.mode != "full" else ac.groups(len(blocks)):
        for index in group[1:]:
            before[index] = before[index - 1] + blocks[index - 1].all
    return before


def _head_bytes(setup: Setup, tokens: float) -> float:
    """Logits, their exponentials, and the result of one operation on them, in float32."""
    chunk, vocab = setup.model.fused_lm_head_token_chunk_size, setup.shape.vocab_size
    tokens /= setup.degrees.tp if setup.degrees.splits_tokens else 1
    if tokens * vocab <= MAX_SAVED_LOGITS:
        chunk = int(tokens)
    return 3 * min(chunk, tokens) * vocab * 4.0


def _own_loss_bytes(setup: Setup, tokens: float) -> float:
    """Logits of a row for a user's loss, of its trained tokens and of all, and the gradient of each, in float32."""
    is_given = isinstance(setup.cfg, RLConfig) and setup.cfg.trainer.hooks.loss is not None
    return 4 * tokens * setup.shape.vocab_size * 4.0 if is_given else 0.0


def _backward(
    setup: Setup,
    steady: dict[str, float],
    held: Held,
    blocks: Sequence[BlockActivations],
    tokens: float,
    value: float,
    gathered: float,
    *,
    is_first: bool,
) -> Phase:
    """The backward pass at its peak: activations still kept, and what the block that is computed adds."""
    ac = setup.model.ac
    per_block = [layer.total * BYTES[setup.model.optimization_dtype] for layer in setup.size.layers]
    all_weights = setup.size.total * BYTES[setup.model.optimization_dtype]
    worst, parts = -1.0, {}
    kept, again = _kept_by_block(ac, blocks), _recomputed_before(ac, blocks)
    for index, block in enumerate(blocks):
        before = (sum(kept[:index]) + again[index]) * value * tokens
        if setup.model.ac_offloading is not None:
            before = min(index, setup.model.ac_offloading.max_inflight_activations) * block.width * value * tokens
        own = _block_backward(setup, index, block, value * tokens, is_first=is_first)
        choices = sum(each.choice_bytes for each in blocks) * tokens
        later = 1 - sum(per_block[: index + 1]) / all_weights
        grads = held.grads * (later if is_first else 1.0)
        total = before + own + grads + choices
        if total > worst:
            worst, parts = total, {"gradients": grads, "activations": before + choices, "one block": own}
    unit = 0.0
    if setup.num_ranks > 1:  # one block's gradients before they are summed over ranks
        reduce = BYTES[setup.model.reduce_dtype]
        unit = _largest_unit(setup) * (value + reduce)
    return Phase("backward pass", steady | parts | {"gathered weights": gathered, "gradients to be summed": unit})


def _block_backward(
    setup: Setup, index: int, block: BlockActivations, bytes_per_value: float, *, is_first: bool
) -> float:
    """The most that one block holds in its backward pass: activations, their gradients, and those of its weights.

    The gradients of a rank among several are counted as those to be summed.
    """
    layer = setup.size.layers[index]
    weights = (layer.experts or layer.dense) * BYTES[setup.model.optimization_dtype]
    if setup.num_ranks > 1 or setup.model.lora is not None:
        weights = 0.0
    return max(
        (block.all + moment.values) * bytes_per_value + weights * (moment.grads if is_first else moment.fresh)
        for moment in block.backward
    )


def _largest_unit(setup: Setup) -> float:
    """Weights of the largest part that FSDP gathers at once, on one rank of tp and ep."""
    degrees = setup.degrees
    return max(
        (layer.mixer + layer.dense) / degrees.tp + layer.small + layer.experts / degrees.ep
        for layer in setup.size.layers
    )


def _gathered_bytes(setup: Setup, value: float) -> float:
    """Weights that FSDP has gathered: two blocks (one ahead) and the root's; or all."""
    if setup.num_ranks == 1:
        return 0.0
    size, degrees = setup.size, setup.degrees
    root = (size.embedding + size.head) * value
    if not setup.model.reshard_after_forward:
        cut = sum((layer.mixer + layer.dense) / degrees.tp + layer.small for layer in size.layers)
        return root + (cut + size.experts / degrees.ep) * value
    return root + 2 * _largest_unit(setup) * value


def published_bytes(setup: Setup) -> float:
    """Bytes of one version on its way to the engines."""
    if setup.model.lora is not None:
        return _adapter_weights(setup.shape, setup.model.lora.rank) * 2.0
    is_small = any(engine.dtype == "float8" for engine in setup.engines)
    outside = setup.size.outside * BYTES[setup.train_dtype]
    return (setup.size.total - setup.size.outside) * (1.03 if is_small else BYTES[setup.train_dtype]) + outside


def staging_bytes(setup: Setup) -> float:
    """Bytes of a version that a rank holds until engines have it; on a CPU these are in shared memory."""
    if isinstance(setup.cfg, SFTConfig):
        return 0.0
    broadcast = setup.cfg.weight_broadcast
    kind = broadcast.type
    if kind == "collective":
        return published_bytes(setup) / setup.num_ranks
    if broadcast.type == "ipc":
        return broadcast.bucket_bytes
    return 0.0 if setup.is_cpu or kind == "filesystem" else _largest_unit(setup) * BYTES[setup.train_dtype]


# -- engines --


def engine_memory(setup: Setup, engine: EngineSetup) -> Memory:
    """The memory of one device of an engine."""
    weights = engine_weight_bytes(setup, engine)
    reserved = setup.hardware.reserved_bytes
    base = {"before the first tensor": reserved, "weights": weights}
    cache = cache_bytes(setup, engine)
    batch = engine.section.max_num_batched_tokens
    cfg = setup.shape
    wide = cfg.hidden_size * 6 + 4 * max(cfg.intermediate_size, cfg.num_heads * cfg.head_dim) / engine.tp
    work = batch * wide * BYTES[setup.train_dtype] if not setup.is_cpu else 64 * cfg.vocab_size * 4.0
    logits = min(engine.section.max_num_seqs, batch) * cfg.vocab_size * 4.0 / engine.tp
    received = min(published_bytes(setup), 4 * 64e6) if setup.rl.weight_broadcast.type == "collective" else 0.0
    states = state_bytes(setup, engine)
    steady = base | {"cache": cache} | ({"states of sequences": states} if states else {})
    phases = (
        Phase("reading and writing", steady | {"activations": work, "logits": logits}),
        Phase("new weights", steady | {"staging of a broadcast": received}),
    )
    tokens = cache_tokens(setup, engine)
    notes = [f"cache for {tokens:,.0f} tokens per {'engine' if engine.groups == 1 else 'data-parallel group'}"]
    if states:
        notes.append(f"states of recurrent layers for {running_sequences(setup, engine):,} sequences")
    if engine.kind == "embedded":
        notes.append("a cache on a CPU takes memory only as sequences fill it; its full size is counted")
    return Memory(f"{engine.role} ({engine.kind})", phases, setup.hardware.memory_bytes, tuple(notes))


def engine_weight_bytes(setup: Setup, engine: EngineSetup) -> float:
    """Weights of one device: experts are spread over `experts_over`, the rest over tp."""
    size = setup.size
    inside = size.total - size.outside - size.experts
    small = BYTES[engine.dtype] * (1.03 if engine.dtype == "float8" else 1.0)
    wide = BYTES["bfloat16" if engine.dtype == "float8" else engine.dtype]
    return (
        inside / engine.tp * small
        + size.experts / max(engine.experts_over, 1) * small
        + size.outside * wide / engine.tp
    )


def bytes_per_token(setup: Setup, engine: EngineSetup) -> float:
    """Cache of one token on one device."""
    values = setup.size.cache_values(is_expanded=engine.kind == "embedded")
    # Heads are spread over tp as far as there are some; the small vectors of latent attention are whole on each.
    spread = 1 if setup.shape.shape_of("latent") is not None else min(engine.tp, setup.shape.num_kv_heads)
    return values * BYTES[engine.cache_dtype] / spread


def cache_tokens(setup: Setup, engine: EngineSetup) -> float:
    """Tokens that the cache of one data-parallel group holds."""
    if engine.section.kv_cache_tokens is not None:
        return float(engine.section.kv_cache_tokens)
    per_token = bytes_per_token(setup, engine)
    if setup.is_cpu:
        return float(CPU_CACHE_TOKENS)
    if not per_token:
        return math.inf
    budget = setup.hardware.memory_bytes * engine.section.gpu_memory_utilization
    used = setup.hardware.reserved_bytes + engine_weight_bytes(setup, engine) + state_bytes(setup, engine)
    work = engine.section.max_num_batched_tokens * setup.shape.hidden_size * 10 * 2.0
    return max(budget - used - work, 0.0) / per_token


def running_sequences(setup: Setup, engine: EngineSetup) -> int:
    """Sequences that one data-parallel group computes at one time, if the rollouts in flight are spread evenly."""
    orchestrator = setup.rl.orchestrator
    in_flight = (orchestrator.most_async_level + 1) * orchestrator.batch_size
    in_flight = min(in_flight, orchestrator.max_inflight_rollouts or in_flight)
    return min(engine.section.max_num_seqs, math.ceil(in_flight / (engine.count * engine.groups)))


def state_bytes(setup: Setup, engine: EngineSetup) -> float:
    """Bytes of recurrent layers' states of all running sequences, on one device; heads are spread over tp."""
    recent, state = setup.size.state_values
    per_sequence = recent * BYTES[engine.dtype if engine.dtype != "float8" else "bfloat16"] + state * 4.0
    places = running_sequences(setup, engine)
    if engine.kind == "embedded":  # one for padding; room is doubled as more run at one time
        needed = places + 1
        places = min(max(16, 2 ** math.ceil(math.log2(needed))), engine.section.max_num_seqs + 1)
    return places * per_sequence / engine.tp


def cache_bytes(setup: Setup, engine: EngineSetup) -> float:
    """Bytes of the cache of one device."""
    tokens = cache_tokens(setup, engine)
    if math.isinf(tokens):
        return 0.0
    copies = 1.5 if engine.kind == "embedded" else 1.0  # keys and values of running sequences, once more in one piece
    return tokens * bytes_per_token(setup, engine) * copies
