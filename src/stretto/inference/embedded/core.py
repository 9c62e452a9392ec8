"""The engine without clock, threads or HTTP: submit requests, call `step` until they are finished.

One step: the scheduler picks tokens, the runner computes them, the sampler draws one token for every sequence
whose tokens are all computed, and what ended becomes completions. `update` may be called between any two
steps: sequences keep their cache and go on under the new weights. engine.py drives this from an event loop.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from stretto.base.errors import ConfigError, DataError
from stretto.inference.embedded.adapters import Adapters
from stretto.inference.embedded.blocks import BlockPool
from stretto.inference.embedded.kv_cache import KVCache
from stretto.inference.embedded.routes import RouteStore
from stretto.inference.embedded.runner import Runner, row_tile, tile_of
from stretto.inference.embedded.sampler import SamplingRows, sample, uniforms
from stretto.inference.embedded.scheduler import Request, RequestState, Scheduler
from stretto.inference.embedded.slots import Slots, SlotState
from stretto.models.decoder import Decoder
from stretto.models.hub import export_tensors, load_tensors
from stretto.models.lora import Adapter
from stretto.records.generate import GenerateRequest
from stretto.records.weights import WeightManifest

logger = logging.getLogger(__name__)

_CPU_CACHE_TOKENS = 65_536


@dataclass(frozen=True, kw_only=True)
class CoreSettings:
    """Sizes of the engine; see [inference] for the meaning."""

    max_model_len: int | None = None
    kv_cache_tokens: int | None = None
    block_size: int = 16
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.9
    enable_return_routed_experts: bool = False
    seed: int = 0
    eos_ids: tuple[int, ...] = ()


class EngineCore:
    """Requests in, completions out; synchronous and single-threaded."""

    def __init__(self, model: Decoder, settings: CoreSettings, *, version: int = 0) -> None:
        weight = model.output_weight
        self.model = model.eval().requires_grad_(False)
        self.settings, self.config = settings, model.config
        is_exact = weight.device.type == "cpu" and weight.dtype == torch.float32
        num_blocks, self.max_model_len = _cache_size(model, settings)
        self.cache = KVCache(
            model.config, num_blocks + 1, settings.block_size, self.max_model_len, dtype=weight.dtype,
            device=weight.device, is_exact=is_exact,
        )  # fmt: skip
        self.routes = _route_store(model, settings, num_blocks + 1)
        self.adapters = Adapters(model, find_tile=tile_of if is_exact else None)
        self.runner = Runner(
            model,
            self.cache,
            self.adapters,
            tile=row_tile(model) if is_exact else None,
            routes=self.routes,
        )
        self.slots = Slots(settings.max_num_seqs, self.max_model_len, settings.block_size)
        self.pool = BlockPool(num_blocks + 1, is_caching=settings.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.pool, self.slots, max_batched_tokens=settings.max_num_batched_tokens, routes=self.routes
        )
        self.version = version
        self.requests: dict[str, Request] = {}

    @property
    def version(self) -> int:
        """Version of the weights that the next step uses."""
        return self.scheduler.version

    @version.setter
    def version(self, version: int) -> None:
        self.scheduler.version = version

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def build_request(self, asked: GenerateRequest) -> Request:
        """The engine's own form of a request that `refusal` found nothing against."""
        params = asked.sampling
        length = len(asked.prompt_ids)
        end = self.max_model_len if params.max_tokens is None else length + params.max_tokens
        stop_ids = list(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids.extend(self.settings.eos_ids)
        seed = params.seed
        if seed is None:
            key = f"{self.settings.seed} {asked.request_id}".encode()
            seed = int.from_bytes(blake2b(key, digest_size=8).digest())
        adapter = None if asked.adapter is None else self.adapters.get(asked.adapter)
        return Request(asked, stop_ids, seed, min(end, self.max_model_len), adapter=adapter)

    def refusal(self, asked: GenerateRequest) -> str | None:
        """Why this request cannot be served, in words for whoever sent it."""
        ids, params = asked.prompt_ids, asked.sampling
        if asked.adapter is not None and self.adapters.get(asked.adapter) is None:
            return f"model: no adapter is called {asked.adapter!r}"
        if not len(ids):
            return "token_ids: the prompt is empty; at least one token is needed"
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.config.vocab_size:
            bad = low if low < 0 else high
            return (
                f"token_ids: token id {bad} is out of vocabulary; ids are 0 to {self.config.vocab_size - 1}"
            )
        if len(ids) >= self.max_model_len:
            return (
                f"token_ids: the prompt has {len(ids)} tokens; with at least one sampled token the engine's "
                f"limit is {self.max_model_len} (max_model_len)"
            )
        if not 1 <= asked.n <= self.settings.max_num_seqs:
            return f"n: {asked.n} is not in 1 to {self.settings.max_num_seqs} (max_num_seqs)"
        checks = (
            (params.temperature >= 0, "temperature", params.temperature, "0 (greedy) or more"),
            (params.temperature < float("inf"), "temperature", params.temperature, "finite"),
            (0 < params.top_p <= 1, "top_p", params.top_p, "more than 0 and at most 1"),
            (params.top_k is None or params.top_k >= 1, "top_k", params.top_k, "1 or more, or null for all"),
            (0 <= params.min_p <= 1, "min_p", params.min_p, "0 to 1"),
            (
                params.max_tokens is None or params.max_tokens >= 0,
                "max_tokens",
                params.max_tokens,
                "0 or more",
            ),
            (
                params.max_tokens != 0 or asked.prompt_logprobs,
                "max_tokens",
                0,
                "1 or more without prompt_logprobs",
            ),
            (asked.cache_salt != "", "cache_salt", "''", "null or a text that is not empty"),
            (all(params.stop), "stop", "''", "texts that are not empty"),
        )
        return next(
            (
                f"{name}: {value} is not allowed; it must be {rule}"
                for ok, name, value, rule in checks
                if not ok
            ),
            None,
        )

    def submit(self, request: Request) -> None:
        assert request.request_id not in self.requests, f"request id {request.request_id} is in use"
        self.requests[request.request_id] = request
        if request.request.prompt_logprobs:
            request.prompt_logprobs = np.zeros(len(request.request.prompt_ids), np.float32)
        self.scheduler.add(request)

    def step(self) -> list[Request]:
        """Compute and draw once; returns the requests that are now finished."""
        scheduler, slots = self.scheduler, self.slots
        plan = scheduler.schedule()
        if plan is None:
            return []
        logits = self.runner.run(plan, slots, self._wanted_prompt_logprobs(plan.slots))
        scheduler.advance(plan)
        if logits is None:
            return []
        drawn, logits = self._fork(plan.slots[plan.is_last], logits)
        finished: list[Request] = []
        is_scored = slots.num_tokens[drawn] >= slots.end[drawn]  # max_tokens = 0: nothing is to be drawn
        if is_scored.any():
            for slot in drawn[is_scored].tolist():
                self._finish(slot, "length", None, finished)
            drawn, logits = drawn[~is_scored], logits[torch.from_numpy(~is_scored)]
        if len(drawn):
            self._draw(drawn, logits, finished)
        scheduler.drop_finished()
        return finished

    def abort(self, request_ids: Iterable[str] | None = None) -> list[Request]:
        """End these requests (None: all) with the tokens they have; unknown ids are ignored."""
        ids = list(self.requests) if request_ids is None else request_ids
        ended = [self.requests.pop(i) for i in ids if i in self.requests]
        for request in ended:
            self.scheduler.abort(request)
        return ended

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Put new weights in place; running sequences keep their cache and go on under them."""
        with torch.no_grad():
            load_tensors(self.model, tensors)
        self.adapters.unload(None)
        self.version = version

    def load_adapter(
        self, name: str | None, adapter: Adapter, version: int | None = None, path: str | None = None
    ) -> None:
        """Add or replace an adapter; None: the policy's, with which the engine's own model is served.

        Raises: DataError when it is another model's; then nothing has changed.
        """
        self.adapters.load(name, adapter, version, path)
        if name is None and version is not None:
            self.version = version

    def weights_refusal(self, manifest: WeightManifest) -> str | None:
        """Why this manifest cannot be this model's weights; None when every tensor is there in its shape."""
        if manifest.adapter is not None:
            return self._adapter_refusal(manifest)
        ours = {name: tuple(tensor.shape) for name, tensor in export_tensors(self.model)}
        theirs = {entry.name: tuple(entry.shape) for entry in manifest.tensors}
        for name in ours.keys() - theirs.keys():
            return f"weights of version {manifest.version} lack {name}"
        for name in ours:
            if ours[name] != theirs[name]:
                wrong = f"{name} is {theirs[name]}, the model has {ours[name]}"
                return f"weights of version {manifest.version}: {wrong}"
        return None

    def _adapter_refusal(self, manifest: WeightManifest) -> str | None:
        info = manifest.adapter
        assert info is not None
        shapes = ((entry.name, torch.empty(entry.shape, device="meta")) for entry in manifest.tensors)
        where = f"weights of version {manifest.version}"
        try:
            self.adapters.check(Adapter.from_tensors(shapes, info.rank, info.scaling, where))
        except DataError as error:
            return str(error)
        return None

    def reset_prefix_cache(self) -> None:
        self.pool.forget_all()

    def _wanted_prompt_logprobs(self, slots: np.ndarray) -> dict[int, np.ndarray]:
        wanted = {}
        is_prompt = self.slots.num_computed[slots] < self.slots.num_prompt[slots]
        for slot in slots[is_prompt].tolist():
            request = self.scheduler.request_of[slot]
            if request.prompt_logprobs is not None and not request.is_forked:
                wanted[slot] = request.prompt_logprobs
        return wanted

    def _fork(self, drawn: np.ndarray, logits: Tensor) -> tuple[np.ndarray, Tensor]:
        """Requests whose prompt is now computed get all their samples, which share its last logits."""
        scheduler, slots = self.scheduler, self.slots
        is_first = slots.num_tokens[drawn] == slots.num_prompt[drawn]
        if not is_first.any():
            return drawn, logits
        now = time.monotonic()
        rows, members, leaders = [], [], []
        for i, slot in enumerate(drawn.tolist()):
            request = scheduler.request_of[slot]
            if not is_first[i] or request.is_forked:
                rows.append(np.array([i]))
                members.append(np.array([slot]))
                continue
            request.first_token_s = now
            leaders.append(slot)
            rows.append(np.full(len(request.slots), i))
            members.append(np.array(request.slots))
        source, target = scheduler.fork(leaders)
        if len(source):
            self.cache.copy_blocks(source, target)
            if self.routes is not None:
                self.routes.copy(source, target)
        all_slots = np.concatenate(members)
        if len(all_slots) == len(drawn):
            return drawn, logits
        return all_slots, logits[torch.from_numpy(np.concatenate(rows)).to(logits.device)]

    def _draw(self, drawn: np.ndarray, logits: Tensor, finished: list[Request]) -> None:
        slots = self.slots
        rows = SamplingRows(
            slots.inv_temperature[drawn], slots.is_greedy[drawn], slots.top_k[drawn], slots.top_p[drawn],
            slots.min_p[drawn], slots.is_filtered[drawn],
        )  # fmt: skip
        at = slots.num_tokens[drawn]
        with torch.inference_mode():
            tokens, logprobs = sample(logits, rows, uniforms(slots.key[drawn], at))
        slots.tokens[drawn, at] = tokens
        slots.logprobs[drawn, at] = logprobs
        slots.versions[drawn, at] = self.adapters.versions(slots.adapter[drawn], self.version)
        slots.num_tokens[drawn] = at + 1
        self.scheduler.counters.generation_tokens += len(drawn)
        is_stop = (slots.stop_ids[drawn] == tokens[:, None]).any(axis=1)
        is_end = at + 1 >= slots.end[drawn]
        is_watched = slots.is_watched[drawn]
        for i in np.flatnonzero(is_stop | is_end | is_watched).tolist():
            slot, token = int(drawn[i]), int(tokens[i])
            matched = None
            if is_watched[i]:
                watcher = self.scheduler.request_of[slot].watcher
                matched = watcher.see(int(slots.member[slot]), token, float(logprobs[i]))
            if is_stop[i]:
                is_eos = token in self.settings.eos_ids
                self._finish(slot, "stop", None if is_eos else token, finished)
            elif matched is not None:
                self._finish(slot, "stop", matched, finished)
            elif is_end[i]:
                self._finish(slot, "length", None, finished)

    def _finish(self, slot: int, reason: str, stop_reason: int | str | None, finished: list[Request]) -> None:
        request = self.scheduler.finish(slot, reason, stop_reason)
        if request is not None:
            del self.requests[request.request_id]
            finished.append(request)

    def audit(self) -> list[str]:
        """Broken invariants between slots, blocks and requests (tests; empty when all is well)."""
        slots, pool, scheduler = self.slots, self.pool, self.scheduler
        owners = np.zeros(pool.num_blocks, np.int64)
        found = []
        for slot in range(slots.capacity):
            held = slots.blocks[slot, : slots.num_blocks[slot]]
            np.add.at(owners, held, 1)
            if slots.state[slot] != SlotState.RUNNING and len(held):
                found.append(f"slot {slot} holds blocks while {SlotState(slots.state[slot]).name}")
            if (
                slots.state[slot] == SlotState.RUNNING
                and len(held) * slots.block_size < slots.num_computed[slot]
            ):
                found.append(f"slot {slot} has fewer blocks than computed tokens")
            if len(set(held.tolist())) != len(held) or 0 in held:
                found.append(f"slot {slot} names a block twice or the null block")
        owners[0] = 1
        if (owners != pool.refs).any():
            found.append(f"reference counts differ at blocks {np.flatnonzero(owners != pool.refs).tolist()}")
        if pool.num_free + int((pool.refs > 0).sum()) != pool.num_blocks:
            found.append("blocks are lost or both owned and free")
        writable = [
            int(slots.blocks[s, slots.num_computed[s] // slots.block_size])
            for s in scheduler.running.tolist()
            if slots.num_computed[s] // slots.block_size < slots.num_blocks[s]
        ]
        if (pool.refs[writable] != 1).any():
            found.append("a block that will be written is shared")
        if any(r.state is RequestState.FINISHED for r in self.requests.values()):
            found.append("a finished request is still listed")
        return found


def _route_store(model: Decoder, settings: CoreSettings, num_blocks: int) -> RouteStore | None:
    if not settings.enable_return_routed_experts:
        return None
    if model.config.moe is None:
        raise ConfigError(
            f"[inference] enable_return_routed_experts = true, but a {model.config.family} model has no "
            "experts; leave it out."
        )
    return RouteStore(model.config, num_blocks, settings.block_size)


def _cache_size(model: Decoder, settings: CoreSettings) -> tuple[int, int]:
    """Blocks of the cache and the longest sequence, tokens."""
    weight, config = model.output_weight, model.config
    limit = settings.max_model_len or config.max_position_embeddings
    if limit > config.max_position_embeddings:
        raise ConfigError(
            f"[inference] max_model_len = {limit} is more than the model's "
            f"{config.max_position_embeddings} positions; lower it."
        )
    tokens = settings.kv_cache_tokens or _tokens_by_memory(model, settings, weight.device)
    num_blocks = tokens // settings.block_size
    if num_blocks * settings.block_size < limit:
        if settings.max_model_len is not None or num_blocks == 0:
            raise ConfigError(
                f"[inference] kv_cache_tokens = {tokens} cannot hold one sequence of max_model_len = {limit} "
                f"tokens; raise the one or lower the other."
            )
        limit = num_blocks * settings.block_size
    return num_blocks, limit


def _tokens_by_memory(model: Decoder, settings: CoreSettings, device: torch.device) -> int:
    per_token = KVCache.bytes_per_token(model.config, model.output_weight.dtype)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # A tenth of the card stays for activations and logits of a step.
        budget = max(free - int((1 - settings.gpu_memory_utilization) * total) - total // 10, 0)
        return max(budget // per_token, settings.block_size)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(_CPU_CACHE_TOKENS, max(available // 4 // per_token, settings.block_size))
