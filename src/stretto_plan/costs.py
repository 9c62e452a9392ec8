"""Seconds of each piece of work: from a hardware table, or as measured for one model on one machine.

The simulation gets its times from `Costs`. A time is operations over the peak rate or bytes over the bandwidth,
whichever is longer, with the share of the peak that programs reach (hardware.Reached). On a small machine launching
operations takes longer than computing them: there `Measured` replaces these figures by seconds per size, from a file
that benchmarks/plan.py makes in half a minute.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError, reason_of
from stretto.base.process import num_cores
from stretto_bench.hardware import Reached
from stretto_plan.memory import bytes_per_token, cache_tokens, engine_weight_bytes, published_bytes
from stretto_plan.setup import BYTES, EngineSetup, Setup

Table = tuple[tuple[float, float], ...]
"""(size, seconds), by size; linear between two entries, and beyond the last one as between the last two."""
CPU_OPS_PER_LAYER, GPU_LAYER_S = 14, 2e-5
"""Operations of a block in a decoding step on a CPU; least time of a block on a GPU, with CUDA graphs."""
EXCHANGE_S = 4e-5
"""Least time of one exchange between nodes."""


@dataclass(frozen=True)
class Measured:
    """Seconds measured on one machine for one model; None: computed."""

    decode: Table | None = None
    """One step of the engine, by sequences."""
    prefill_token_s: float | None = None
    request_s: float | None = None
    """The engine's time per request: its HTTP server, its prompt, its reply."""
    train: Table | None = None
    """Forward and backward pass of one row, by tokens."""
    update_s: float | None = None
    publish_s: float | None = None
    load_s: float | None = None
    rollout_s: float | None = None
    """The orchestrator's time per rollout, from draw to batch."""
    turn_s: float | None = None
    """The orchestrator's time per turn of a rollout of several."""
    step_s: float | None = None
    """Orchestrator's and trainer's time per step, whatever its size: messages, ledger, metrics."""
    cores: float | None = None
    """How many times faster all cores of this machine are than one: less than their number where they share caches and
    memory, or are threads of fewer cores."""

    @classmethod
    def read(cls, path: Path) -> Measured:
        """From a file of `benchmarks/plan.py --measure FILE`.

        Raises: ConfigError.
        """
        try:
            raw: dict[str, Any] = json.loads(path.read_text())
            tables = {key: tuple(map(tuple, raw[key])) for key in ("decode", "train") if raw.get(key)}
            return cls(**{key: value for key, value in raw.items() if key in cls.__dataclass_fields__} | tables)
        except (OSError, ValueError, TypeError, AttributeError) as cause:
            raise ConfigError(f"--measured {path}: cannot be read: {_why(cause, path)}") from cause


def _why(cause: Exception, path: Path) -> str:
    if isinstance(cause, OSError | ValueError):
        return reason_of(cause, path)
    return f"it is no file of `benchmarks/plan.py --measure` ({cause})"


def lookup(table: Table, size: float) -> float:
    """Seconds for a size."""
    if len(table) == 1:
        return table[0][1] * max(size / table[0][0], 1.0)
    at = min(max(bisect_left([known for known, _ in table], size), 1), len(table) - 1)
    (x0, y0), (x1, y1) = table[at - 1], table[at]
    if size < table[0][0]:
        return y0
    return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


NOTHING, REACHED = Measured(), Reached()


@dataclass(frozen=True)
class Costs:
    """Seconds of all work of a run."""

    setup: Setup
    reached: Reached = REACHED
    measured: Measured = NOTHING

    def describe(self) -> list[str]:
        """The sources and assumptions of the times, one line each."""
        setup, hardware = self.setup, self.setup.hardware
        lines = [f"{hardware.name}: " + "; ".join(f"{key}: {source}" for key, source in hardware.sources.items())]
        if self.measured != Measured():
            lines.append("seconds of work as measured on this machine (--measured)")
        lines += self.reached.describe()
        if setup.is_cpu:
            lines.append("an operation on a CPU takes at least 15 microseconds, a rollout 0.15 ms of the orchestrator")
        if setup.is_cpu and self.measured == Measured():
            lines.append(
                "on a CPU times may be wrong by a factor of two or more; --measured FILE, which benchmarks/plan.py "
                "--measure makes, gives closer ones"
            )
        lines.append("evals, checkpoints and starting are not in the time of a step; turns beyond 8 are merged")
        return lines

    # -- engines --

    def decode_s(self, engine: EngineSetup, sequences: float, cached_tokens: float) -> float:
        """One decoding step of a data-parallel group that has this many sequences and, in all, cached tokens."""
        if self.measured.decode is not None:
            return lookup(self.measured.decode, sequences)
        setup, hardware, size = self.setup, self.setup.hardware, self.setup.size
        sequences = max(sequences, 1.0)
        mean = cached_tokens / sequences
        moved = self._weights_read(engine, sequences) + self._cache_read(engine, sequences, mean)
        ops = 2 * sequences * size.active / engine.tp + size.attention_ops(sequences, mean) / engine.tp
        peak = hardware.peak(engine.dtype) * self.reached.prefill
        seconds = max(moved / (hardware.bandwidth * self.reached.bandwidth), ops / peak)
        if setup.is_cpu:
            return seconds + (CPU_OPS_PER_LAYER * setup.shape.num_layers + 12) * hardware.op_s
        return seconds + setup.shape.num_layers * GPU_LAYER_S + self._exchange_s(engine, sequences)

    def _weights_read(self, engine: EngineSetup, sequences: float) -> float:
        """Bytes of weights that one device reads in a step: experts only if a token of the engine has chosen them."""
        total = engine_weight_bytes(self.setup, engine)
        moe = self.setup.shape.moe
        if moe is None:
            return total
        experts = self.setup.size.experts / max(engine.experts_over, 1) * BYTES[engine.dtype]
        tokens = sequences * (engine.groups if engine.experts_over > engine.tp else 1)
        touched = 1 - (1 - moe.top_k / moe.num_experts) ** tokens
        return total - experts * (1 - touched)

    def _cache_read(self, engine: EngineSetup, sequences: float, mean: float) -> float:
        latent = self.setup.shape.shape_of("latent")
        per_token = bytes_per_token(self.setup, engine)
        if latent is not None and latent.indexer is not None and mean > latent.indexer.top_k:
            # All keys of the index, and the chosen ones of attention.
            index = latent.indexer.head_dim / (latent.rank + latent.rotated_dim + latent.indexer.head_dim)
            return sequences * per_token * (index * mean + (1 - index) * latent.indexer.top_k)
        return sequences * per_token * mean

    def _exchange_s(self, engine: EngineSetup, tokens: float) -> float:
        """Sums over tp and exchanges between experts, in all layers."""
        setup, hardware = self.setup, self.setup.hardware
        width, layers, seconds = setup.shape.hidden_size, setup.shape.num_layers, 0.0
        if engine.tp > 1:
            moved = 2 * 2 * tokens * width * 2.0 * (engine.tp - 1) / engine.tp
            seconds += layers * (moved / (hardware.link_bandwidth * self.reached.links) + 2e-5)
        if engine.experts_over > engine.tp and setup.shape.moe is not None:
            is_wide = engine.experts_over > setup.devices_per_node
            rate = (hardware.network_bandwidth if is_wide else hardware.link_bandwidth) * self.reached.links
            moved = tokens * setup.shape.moe.top_k * width * 3.0  # there in 8 bits, back in 16
            seconds += layers * (moved / rate + 2 * EXCHANGE_S * is_wide)
        return seconds

    def prefill_s(self, engine: EngineSetup, tokens: float, keys: float) -> float:
        """Prefill of this many tokens in one data-parallel group; each sees `keys` tokens on average."""
        if self.measured.prefill_token_s is not None:
            return tokens * self.measured.prefill_token_s
        size, hardware = self.setup.size, self.setup.hardware
        share = self.reached.experts if engine.experts_over > engine.tp else 1.0
        products = 2 * tokens * (size.active - self.setup.shape.vocab_size * self.setup.shape.hidden_size)
        seconds = products / (hardware.peak(engine.dtype) * self.reached.prefill * share)
        wide = "float32" if self.setup.is_cpu else "bfloat16"
        seconds += size.attention_ops(tokens, keys) / (hardware.peak(wide) * self.reached.attention)
        return seconds / engine.tp

    @property
    def request_s(self) -> float:
        """The engine's own work per request."""
        default = 1.0e-3 if self.setup.is_cpu else 0.0
        return default if self.measured.request_s is None else self.measured.request_s

    def transfer_s(self, engine: EngineSetup, tokens: float) -> float:
        """Sending a prompt's cache from a prefill engine to a decode engine."""
        moved = tokens * bytes_per_token(self.setup, engine)
        return moved / (self.setup.hardware.network_bandwidth * self.reached.links)

    def room(self, engine: EngineSetup) -> float:
        """Tokens that fit into the caches of all these engines, all groups together."""
        return cache_tokens(self.setup, engine) * engine.count * engine.groups

    # -- the trainer --

    def train_s(self, rows: Sequence[tuple[float, float]]) -> float:
        """Forward and backward passes of one data-parallel rank; rows are (tokens, mean keys of a token)."""
        if self.measured.train is not None:
            return sum(lookup(self.measured.train, tokens) for tokens, _ in rows)
        return sum(self._row_s(tokens, keys) for tokens, keys in rows)

    def _row_s(self, tokens: float, keys: float) -> float:
        setup, hardware, degrees = self.setup, self.setup.hardware, self.setup.degrees
        ac = setup.model.ac or (setup.model.ac_offloading and True)
        passes = 4.0 if ac else 3.0
        ranks = degrees.cp * degrees.tp
        is_small = bool(setup.model.fp8) and "float8" in hardware.flops and not setup.is_cpu
        peak = (
            hardware.peak("float8") * self.reached.training_fp8
            if is_small
            else (hardware.peak(setup.train_dtype) * self.reached.training)
        )
        share = self.reached.experts if degrees.ep > 1 else 1.0
        seconds = 2 * passes * tokens * setup.size.active / (peak * share)
        wide = "float32" if setup.is_cpu else "bfloat16"
        # The gradient of attention takes two and a half times its forward pass.
        attention = setup.size.attention_ops(tokens, keys) * (passes + 0.5)
        seconds += attention / (hardware.peak(wide) * self.reached.attention)
        if setup.is_cpu:
            seconds += passes * (CPU_OPS_PER_LAYER * setup.shape.num_layers + 12) * hardware.op_s
        return max(seconds / ranks, self._gather_s)

    @property
    def _gather_s(self) -> float:
        """FSDP's gathers and sums for one row, which run beside its computation.

        What [model.ac] computes again is computed with the weights that are gathered for the backward pass.
        """
        setup, degrees, hardware = self.setup, self.setup.degrees, self.setup.hardware
        shards = degrees.dp_shard * degrees.cp
        if shards == 1 or setup.is_cpu:
            return 0.0
        gathered = setup.size.total - setup.size.experts * (1 - 1 / degrees.ep)
        is_wide = shards * degrees.tp > setup.devices_per_node
        rate = (hardware.network_bandwidth if is_wide else hardware.link_bandwidth) * self.reached.links
        gathers = 2 if setup.model.reshard_after_forward else 1
        moved = gathered * (BYTES[setup.train_dtype] * gathers + BYTES[setup.model.reduce_dtype])
        return moved / rate

    @property
    def update_s(self) -> float:
        """Clipping, optimizer, copies: what a step of the trainer takes besides passes."""
        if self.measured.update_s is not None:
            return self.measured.update_s
        setup, hardware = self.setup, self.setup.hardware
        own = setup.size.total / setup.num_ranks
        moved = own * 32.0  # weights, gradients and two states, read and written, and the norm
        seconds = moved / (hardware.bandwidth * self.reached.bandwidth)
        if setup.model.optim_cpu_offload:
            seconds += own * 16.0 / (hardware.host_bandwidth * self.reached.links)
        return seconds

    @property
    def publish_s(self) -> float:
        """The trainer stands still while it hands a version over."""
        if self.measured.publish_s is not None:
            return self.measured.publish_s
        setup, hardware = self.setup, self.setup.hardware
        own = published_bytes(setup) / setup.num_ranks
        gathered = own / (hardware.network_bandwidth * self.reached.links) if setup.num_ranks > 1 else 0.0
        return gathered + 3 * own / hardware.bandwidth

    @property
    def load_s(self) -> float:
        """Engines stand still while they take a version over: each receives all of it."""
        if self.measured.load_s is not None:
            return self.measured.load_s
        setup, hardware = self.setup, self.setup.hardware
        total = published_bytes(setup)
        kind = setup.rl.weight_broadcast.type
        if kind == "collective" and not setup.is_cpu:
            return total / (hardware.network_bandwidth * self.reached.links)
        return 3 * total / hardware.bandwidth + 2e-3

    # -- the orchestrator, and the machine --

    @property
    def cores(self) -> float:
        """What the processes of a CPU run share."""
        return float(num_cores()) if self.measured.cores is None else self.measured.cores

    @property
    def rollout_s(self) -> float:
        """Time of the orchestrator's one thread."""
        return 1.5e-4 if self.measured.rollout_s is None else self.measured.rollout_s

    @property
    def turn_s(self) -> float:
        return 3e-4 if self.measured.turn_s is None else self.measured.turn_s

    @property
    def step_s(self) -> float:
        return 4e-3 if self.measured.step_s is None else self.measured.step_s
