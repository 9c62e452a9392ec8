"""The engine without threads or HTTP: submit requests, call `step` until they are finished.

One step: the scheduler picks tokens, the runner computes them, the sampler samples one token for every sequence whose
tokens are all computed, and sequences that ended become completions. `load_weights` may be called between any two
steps: sequences keep their cache and continue with the new weights. engine.py calls this from an event loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from stretto.addons import object_at
from stretto.base.errors import ConfigError, DataError
from stretto.config.sections.inference import CPU_CACHE_TOKENS
from stretto.inference.embedded import image_prompts
from stretto.inference.embedded.adapters import POLICY, Adapters
from stretto.inference.embedded.adjustments import Adjustments, Encode
from stretto.inference.embedded.blocks import BlockPool
from stretto.inference.embedded.caches.kv_cache import KVCache, free_memory
from stretto.inference.embedded.drafts import BuildDrafter, Drafter, DraftRows, watch_drafts
from stretto.inference.embedded.expert_choices import ExpertChoices
from stretto.inference.embedded.image_prompts import ImagePrompt
from stretto.inference.embedded.runner import Runner, States, find_model_tile, find_tile
from stretto.inference.embedded.sampler import PromptScores, SamplingRows, sample, uniforms
from stretto.inference.embedded.scheduler import EngineRequest, Scheduler
from stretto.inference.embedded.slots import SequenceSlots
from stretto.inference.embedded.vision.store import ImageStore
from stretto.inference.limits import refusal_reason
from stretto.models.decoder import Decoder
from stretto.models.device.kernels import find_kernels
from stretto.models.device.memory_offload import MemoryOffload, trim
from stretto.models.hub import export_tensors, load_tensors
from stretto.models.lora import Adapter
from stretto.records.generate import GenerateRequest
from stretto.records.weight_manifest import WeightManifest

if TYPE_CHECKING:
    from jaxtyping import Bool, Int, UInt64

    from stretto.families.shape import ModelConfig

logger = logging.getLogger(__name__)

_BLOCK_KEYS_PER_SLAB_KEY = 2  # slabs hold at most one key for every two in blocks


@dataclass(frozen=True, kw_only=True)
class CoreSettings:
    """Sizes of the engine; the keys of [inference] document them."""

    max_model_len: int | None = None
    kv_cache_tokens: int | None = None
    block_size: int = 16
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.9
    enable_return_routed_experts: bool = False
    enable_return_sampling_mask: bool = False
    seed: int = 0
    eos_ids: tuple[int, ...] = ()
    use_kernels: bool = True  # those of an add-on if they support the model; False: torch's operations only
    build_drafter: BuildDrafter | None = None  # None: no drafts


@dataclass(frozen=True, slots=True)
class _SamplingBatch:
    """Sequences to sample a token for, with their settings; reused until the sequences change."""

    slots: Int[np.ndarray, " rows"]
    rows: SamplingRows
    key: UInt64[np.ndarray, " rows"]
    end: Int[np.ndarray, " rows"]
    stop_ids: Int[np.ndarray, "rows ids"] | None  # None if no token ends any of them
    is_watched: Bool[np.ndarray, " rows"] | None  # None if no sequence is watched
    adjusted: Int[np.ndarray, " adjusted"]  # the rows whose logits are changed
    adapters: Int[np.ndarray, " rows"] | None  # None if all use the engine's own model

    @classmethod
    def of(cls, slots: SequenceSlots, chosen: Int[np.ndarray, " rows"]) -> _SamplingBatch:
        rows = SamplingRows(
            slots.inv_temperature[chosen], slots.is_greedy[chosen], slots.top_k[chosen], slots.top_p[chosen],
            slots.min_p[chosen], slots.is_filtered[chosen],
        )  # fmt: skip
        stop_ids, is_watched, adapters = (
            slots.stop_ids[chosen], slots.is_watched[chosen], slots.adapter[chosen],
        )  # fmt: skip
        return cls(
            chosen, rows, slots.key[chosen], slots.end[chosen],
            stop_ids if (stop_ids >= 0).any() else None,
            is_watched if is_watched.any() else None,
            np.flatnonzero(slots.is_adjusted[chosen]),
            adapters if (adapters != POLICY).any() else None,
        )  # fmt: skip


class EngineCore:
    """Requests in, completions out; synchronous and single-threaded."""

    def __init__(self, model: Decoder, settings: CoreSettings) -> None:
        weight = model.output_weight
        self.model = model.eval().requires_grad_(False)
        self.settings, self.config = settings, model.config
        is_exact = weight.device.type == "cpu" and weight.dtype == torch.float32
        num_blocks, self.max_model_len = _cache_size(model, settings)
        self.cache = self._build_cache(num_blocks + 1, weight, is_exact=is_exact)
        self.expert_choices = _build_expert_choices(model, settings, num_blocks + 1)
        self.adapters = Adapters(model, find_tile=find_tile if is_exact else None)
        self.max_num_seqs = settings.max_num_seqs
        self.states: States | None = None
        if (states := model.config.state_cache) is not None:
            self.states = cast("States", object_at(states)(model, max_sequences=self.max_num_seqs, is_exact=is_exact))
            self.max_num_seqs = self.states.max_sequences
        self.images = None
        if model.config.vision is not None:
            self.images = ImageStore(model.model.visual, weight.device)
        self.runner = Runner(
            model, self.cache, self.adapters, expert_choices=self.expert_choices, states=self.states,
            images=self.images,
        )  # fmt: skip
        if is_exact and not self.runner.has_own_products:
            self.runner.tile = find_model_tile(self.runner.model)
        self.slots = SequenceSlots(self.max_num_seqs, self.max_model_len, settings.block_size)
        is_caching = settings.enable_prefix_caching
        if is_caching and self.states is not None:
            is_caching = False
            logger.info("the prefix cache is off: %s has layers that keep a state", model.config.family)
        self.pool = BlockPool(num_blocks + 1, is_caching=is_caching)
        self.scheduler = Scheduler(
            self.pool,
            self.slots,
            max_batched_tokens=settings.max_num_batched_tokens,
            expert_choices=self.expert_choices,
        )
        self.scheduler.returns_supports = settings.enable_return_sampling_mask
        self.drafter = self._build_drafter()
        # On a CPU other processes take turns with this one; that says nothing about drafts.
        self._clock = time.thread_time if weight.device.type == "cpu" else time.perf_counter
        self._weights_away, self._cache_away = MemoryOffload(), MemoryOffload()
        trim()  # the memory of the parameters that were stacked
        self.requests: dict[str, EngineRequest] = {}
        self._latest_batch: _SamplingBatch | None = None  # from the step before

    def _build_cache(self, num_blocks: int, weight: Tensor, *, is_exact: bool) -> KVCache:
        block_size = self.settings.block_size
        sizes = (num_blocks, block_size, self.max_model_len)
        build = find_kernels("cpu.cache") if self.settings.use_kernels else None
        if build is not None and (cache := build(self.config, weight, *sizes)) is not None:
            return cache
        dtype, device = weight.dtype, weight.device
        slab_tokens = (num_blocks - 1) * block_size // _BLOCK_KEYS_PER_SLAB_KEY if device.type == "cpu" else 0
        return _cache_class(self.config)(
            self.config, *sizes, dtype=dtype, device=device, is_exact=is_exact, slab_tokens=slab_tokens
        )  # fmt: skip

    def _build_drafter(self) -> Drafter | None:
        build = self.settings.build_drafter
        if build is None:
            return None
        if self.states is not None:
            logger.warning(
                "[inference.speculation] is off: a %s has layers that keep a state, which cannot forget a draft that "
                "was wrong",
                self.config.family,
            )  # fmt: skip
            return None
        self.slots.keeps_ended = True
        return build(self.slots, self.config.vocab_size)

    @property
    def version(self) -> int:
        """Version of the weights that the next step uses."""
        return self.scheduler.version

    @version.setter
    def version(self, version: int) -> None:
        if version != self.scheduler.version:
            self.pool.begin_version()
        self.scheduler.version = version

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def build_request(self, spec: GenerateRequest, encode: Encode | None = None) -> EngineRequest:
        """Build the engine's form of a request for which `refusal_reason` returned None.

        encode: the tokenizer's, for bad_words. Raises: Refusal for bad_words without it, or without a token.
        """
        params = spec.sampling
        length = len(spec.prompt_ids)
        end = self.max_model_len if params.max_tokens is None else length + params.max_tokens
        stop_ids = list(dict.fromkeys(params.stop_token_ids))
        if not params.ignore_eos:
            stop_ids.extend(self.settings.eos_ids)
        seed = params.seed
        if seed is None:
            key = f"{self.settings.seed} {spec.request_id}".encode()
            seed = int.from_bytes(blake2b(key, digest_size=8).digest())
        adapter = None if spec.adapter is None else self.adapters.get(spec.adapter)
        vision = self.config.vision
        images = None if vision is None else ImagePrompt.of(spec, vision)
        end = min(end, self.max_model_len)
        adjustments = Adjustments.of(params, stop_ids, encode)
        return EngineRequest(spec, stop_ids, seed, end, adapter=adapter, images=images, adjustments=adjustments)

    def refusal_reason(self, spec: GenerateRequest) -> str | None:
        """Why this request cannot be served, as a message for its sender; None if it can."""
        if spec.adapter is not None and self.adapters.get(spec.adapter) is None:
            return f"model: no adapter is called {spec.adapter!r}"
        return refusal_reason(
            spec, vocab_size=self.config.vocab_size, max_model_len=self.max_model_len, max_num_seqs=self.max_num_seqs
        ) or image_prompts.refusal_reason(spec, self.config.vision)

    def submit(self, request: EngineRequest) -> None:
        assert request.request_id not in self.requests, f"request id {request.request_id} is in use"
        self.requests[request.request_id] = request
        if request.spec.prompt_logprobs:
            request.prompt_scores = PromptScores(request.spec)
        self.scheduler.add(request)

    def step(self) -> list[EngineRequest]:
        """Compute and sample once; returns the requests that have finished or failed."""
        drafter = self.drafter
        if drafter is None or drafter.rest(len(self.scheduler.running)):
            return self._step(None)
        started, num_before = self._clock(), self.scheduler.counters.generation_tokens
        finished = self._step(drafter.propose(self.scheduler.running))
        tokens = self.scheduler.counters.generation_tokens - num_before
        drafter.observe_pass(self.scheduler.latest, tokens=tokens, seconds=self._clock() - started)
        return finished

    def _step(self, num_drafts: Int[np.ndarray, " capacity"] | None) -> list[EngineRequest]:
        scheduler, slots = self.scheduler, self.slots
        plan = scheduler.schedule(num_drafts)
        finished = self._pop_failed()
        if plan is None:
            return finished
        if plan.is_following and self._latest_batch is not None and self._latest_batch.slots is plan.slots:
            logits = self.runner.run(plan, slots, {})
            assert logits is not None, "every sequence of a following plan gets a token"
            scheduler.advance(plan)
            self._sample_tokens(self._latest_batch, logits, finished)
            scheduler.drop_finished()
            return finished
        logits = self.runner.run(plan, slots, self._prompt_scores(plan.slots))
        scheduler.advance(plan)
        self._latest_batch = None
        if logits is None:
            return finished
        chosen = plan.slots if plan.is_decode else plan.slots[plan.is_last]
        if plan.num_drafts is not None:
            chosen, logits = self._sample_drafts(chosen, plan.num_drafts[plan.is_last], logits, finished)
        if len(chosen):
            self._sample_first(chosen, logits, finished)
        scheduler.drop_finished()
        return finished

    def _sample_first(self, chosen: np.ndarray, logits: Tensor, finished: list[EngineRequest]) -> None:
        """Sample a token for sequences whose prompt may have been computed just now."""
        slots = self.slots
        chosen, logits = self._fork(chosen, logits)
        is_scored = slots.num_tokens[chosen] >= slots.end[chosen]  # max_tokens = 0: nothing to sample
        if is_scored.any():
            for slot in chosen[is_scored].tolist():
                self._finish_sample(slot, "length", None, finished)
            chosen, logits = chosen[~is_scored], logits[torch.from_numpy(~is_scored)]
        if len(chosen):
            self._latest_batch = _SamplingBatch.of(slots, chosen)
            self._sample_tokens(self._latest_batch, logits, finished)

    def abort(self, request_ids: Iterable[str] | None = None) -> list[EngineRequest]:
        """End these requests (all if None) with the tokens they have; unknown ids are ignored."""
        ids = list(self.requests) if request_ids is None else request_ids
        ended = [self.requests.pop(i) for i in ids if i in self.requests]
        self.scheduler.abort(ended)
        return ended

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load new weights in place; running sequences keep their cache and continue with them."""
        if self.images is not None:
            tensors = self.images.watch(tensors)
        with torch.no_grad():
            load_tensors(self.model, tensors)
        self.adapters.unload(None)
        self.version = version

    def load_adapter(self, name: str | None, adapter: Adapter, version: int | None = None) -> None:
        """Add or replace an adapter; name=None: the policy's, for requests for the engine's own model.

        Raises: DataError if it does not fit this model; then nothing has changed.
        """
        self.adapters.load(name, adapter, version)
        if name is None and version is not None:
            self.version = version

    def weights_refusal_reason(self, manifest: WeightManifest) -> str | None:
        """Why a manifest does not fit this model; None if it has every tensor in the right shape."""
        if manifest.adapter is not None:
            return self._adapter_refusal_reason(manifest)
        ours = self._shapes
        theirs = {entry.name: tuple(entry.shape) for entry in manifest.tensors}
        for name in ours.keys() - theirs.keys():
            return f"weights of version {manifest.version} lack {name}"
        for name in ours:
            if ours[name] != theirs[name]:
                wrong = f"{name} is {theirs[name]}, the model has {ours[name]}"
                return f"weights of version {manifest.version}: {wrong}"
        return None

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight, by its name in a manifest."""
        return {name: tuple(tensor.shape) for name, tensor in export_tensors(self.model)}

    def _adapter_refusal_reason(self, manifest: WeightManifest) -> str | None:
        info = manifest.adapter
        assert info is not None
        shapes = ((entry.name, torch.empty(entry.shape, device="meta")) for entry in manifest.tensors)
        where = f"weights of version {manifest.version}"
        try:
            self.adapters.check(Adapter.from_tensors(shapes, info.rank, info.scaling, where))
        except DataError as error:
            return str(error)
        return None

    def put_away(self, *, keeps_weights: bool) -> int:
        """Free the memory of cache, weights and images; returns bytes. No request may be running."""
        assert not self.has_work, "end requests first"
        self.reset_prefix_cache()
        self.cache.running.slabs.clear()
        image_bytes = 0 if self.images is None else self.images.clear()
        tensors: Iterable[Tensor] = self.model.parameters()
        if keeps_weights:
            tensors = (*tensors, *self.model.buffers())
        freed = self._weights_away.offload(tensors, keeps=keeps_weights)
        return freed + image_bytes + self._cache_away.offload([self.cache.blocks], keeps=False)

    def bring_back(self, tags: Iterable[str]) -> bool:
        """Allocate `weights` or `kv_cache` again; returns whether both are allocated."""
        for tag, away in (("weights", self._weights_away), ("kv_cache", self._cache_away)):
            if tag in tags and away.is_offloaded:
                away.restore()
        return not (self._weights_away.is_offloaded or self._cache_away.is_offloaded)

    @property
    def are_weights_away(self) -> bool:
        return self._weights_away.is_offloaded

    def reset_prefix_cache(self) -> None:
        self.pool.clear_prefix_cache()

    def _prompt_scores(self, slots: np.ndarray) -> dict[int, PromptScores]:
        """The PromptScores to fill in this step, by slot, for those of `slots` that return them."""
        targets = {}
        is_prompt = self.slots.num_computed[slots] < self.slots.num_prompt[slots]
        for slot in slots[is_prompt].tolist():
            request = self.scheduler.request_of[slot]
            if request.prompt_scores is not None and not request.is_forked:
                targets[slot] = request.prompt_scores
        return targets

    def _fork(self, chosen: np.ndarray, logits: Tensor) -> tuple[np.ndarray, Tensor]:
        """Start all samples of requests whose prompt is computed now; they share its last logits."""
        scheduler, slots = self.scheduler, self.slots
        is_first = slots.num_tokens[chosen] == slots.num_prompt[chosen]
        if not is_first.any():
            return chosen, logits
        now = time.monotonic()
        rows, members, leaders = [], [], []
        for i, slot in enumerate(chosen.tolist()):
            request = scheduler.request_of[slot]
            if not is_first[i] or request.is_forked:
                rows.append(np.array([i]))
                members.append(np.array([slot]))
                continue
            request.first_token_s = now
            leaders.append(slot)
            rows.append(np.full(len(request.slots), i))
            members.append(np.array(request.slots))
        fork = scheduler.fork(leaders)
        if len(fork.source_blocks):
            self.cache.copy_blocks(fork.source_blocks, fork.target_blocks)
            if self.expert_choices is not None:
                self.expert_choices.copy(fork.source_blocks, fork.target_blocks)
        if self.states is not None and len(fork.source_slots):
            self.states.copy(fork.source_slots, fork.target_slots)
        all_slots = np.concatenate(members)
        if len(all_slots) == len(chosen):
            return chosen, logits
        return all_slots, logits[torch.from_numpy(np.concatenate(rows)).to(logits.device)]

    def _sample_tokens(self, batch: _SamplingBatch, logits: Tensor, finished: list[EngineRequest]) -> None:
        """Sample one token per row, write it into its slot, and end sequences that it completes."""
        slots, chosen, is_watched = self.slots, batch.slots, batch.is_watched
        at = slots.num_tokens[chosen]
        with torch.inference_mode():
            if len(batch.adjusted):
                self._adjust(batch, logits, at)
            supports: dict[int, np.ndarray] | None = {} if self.scheduler.returns_supports else None
            tokens, logprobs = sample(logits, batch.rows, uniforms(batch.key, at), supports, self.cache.kernels)
        for row, ids in (supports or {}).items():
            self.scheduler.supports[int(chosen[row])].append(ids)
        slots.tokens[chosen, at] = tokens
        slots.logprobs[chosen, at] = logprobs
        adapters, version = batch.adapters, self.version
        slots.versions[chosen, at] = version if adapters is None else self.adapters.versions(adapters, version)
        at += 1
        slots.num_tokens[chosen] = at
        self.scheduler.counters.generation_tokens += len(chosen)
        needs_check = is_end = at >= batch.end
        is_stop = None
        if batch.stop_ids is not None:
            is_stop = (batch.stop_ids == tokens[:, None]).any(axis=1)
            needs_check = needs_check | is_stop
        if is_watched is not None:
            needs_check = needs_check | is_watched
        for i in np.flatnonzero(needs_check).tolist():
            slot, token = int(chosen[i]), int(tokens[i])
            matched = None
            if is_watched is not None and is_watched[i]:
                request = self.scheduler.request_of[slot]
                if request is None:  # it failed in this loop, because of another of its samples
                    continue
                assert request.watcher is not None, f"slot {slot} is watched"
                try:
                    matched = request.watcher.observe(int(slots.member[slot]), token, float(logprobs[i]))
                except Exception as error:  # fails this request only: the engine's state is not changed
                    request.failure = error
                    self._abort_samples(request, finished)
                    continue
            has_stop = is_stop is not None and bool(is_stop[i])
            if has_stop or matched is not None or is_end[i]:
                self._end(slot, token, matched, finished, is_stop=has_stop)

    def _sample_drafts(
        self, chosen: np.ndarray, num_drafts: np.ndarray, logits: Tensor, finished: list[EngineRequest]
    ) -> tuple[np.ndarray, Tensor]:
        """Sample a token at each position of these slots' drafts; keep those up to the first that differs.

        Each is sampled with the random number of its position, so the kept ones are those of plain decoding. Returns
        the slots that sample their first token, which have no drafts, and their logits.
        """
        slots, drafter = self.slots, self.drafter
        assert drafter is not None
        is_first = slots.num_tokens[chosen] == slots.num_prompt[chosen]
        first, rest = chosen[is_first], logits
        if is_first.any():
            is_first_row = torch.from_numpy(np.repeat(is_first, num_drafts + 1)).to(logits.device)
            rest, logits = logits[is_first_row], logits[~is_first_row]
            chosen, num_drafts = chosen[~is_first], num_drafts[~is_first]
        rows = DraftRows.of(num_drafts)
        batch = _SamplingBatch.of(slots, chosen[rows.owner])
        at = slots.num_tokens[batch.slots] + rows.nth
        supports: dict[int, np.ndarray] | None = {} if self.scheduler.returns_supports else None
        with torch.inference_mode():
            if len(batch.adjusted):
                self._adjust(batch, logits, at)
            tokens, logprobs = sample(logits, batch.rows, uniforms(batch.key, at), supports, self.cache.kernels)
        is_wrong = (slots.tokens[batch.slots, at] != tokens) | (rows.nth == num_drafts[rows.owner])
        is_stop = np.zeros(len(at), np.bool_)
        if batch.stop_ids is not None:
            is_stop = (batch.stop_ids == tokens[:, None]).any(axis=1)
        num_right = rows.first(is_wrong)
        count = rows.first(is_wrong | is_stop) + 1
        matched: dict[int, str | None] = {}
        if batch.is_watched is not None:
            matched = watch_drafts(slots, self.scheduler.request_of, chosen, rows.starts, count, (tokens, logprobs))
        is_kept = rows.nth < count[rows.owner]
        for row, ids in (supports or {}).items():
            if is_kept[row]:
                self.scheduler.supports[int(batch.slots[row])].append(ids)
        owners, at = batch.slots[is_kept], at[is_kept]
        slots.tokens[owners, at] = tokens[is_kept]
        slots.logprobs[owners, at] = logprobs[is_kept]
        version = self.version
        slots.versions[owners, at] = (
            version if batch.adapters is None else self.adapters.versions(batch.adapters[is_kept], version)
        )
        slots.num_tokens[chosen] += count
        slots.num_computed[chosen] = slots.num_tokens[chosen] - 1
        self.scheduler.counters.generation_tokens += int(count.sum())
        drafter.observe_drafts(
            chosen, num_drafts, np.minimum(num_right, count), (num_right < num_drafts) & (num_right < count)
        )
        last = rows.starts + count - 1
        is_end = slots.num_tokens[chosen] >= slots.end[chosen]
        for i in np.flatnonzero(is_end | is_stop[last]).tolist() + list(matched):
            slot, request = int(chosen[i]), self.scheduler.request_of[int(chosen[i])]
            if request is None:  # ended in this loop
                continue
            if request.failure is not None:
                self._abort_samples(request, finished)
            else:
                self._end(slot, int(tokens[last[i]]), matched.get(i), finished, is_stop=bool(is_stop[last[i]]))
        return first, rest

    def _end(self, slot: int, token: int, matched: str | None, finished: list[EngineRequest], *, is_stop: bool) -> None:
        """End a sample with the token that was sampled last: a stop token, the end of a stop text, or the limit."""
        if is_stop:
            self._finish_sample(slot, "stop", None if token in self.settings.eos_ids else token, finished)
        elif matched is not None:
            self._finish_sample(slot, "stop", matched, finished)
        else:
            self._finish_sample(slot, "length", None, finished)

    def _adjust(self, batch: _SamplingBatch, logits: Tensor, at: Int[np.ndarray, " rows"]) -> None:
        """Change the logits of the rows that have adjustments, in place; at: the positions of their tokens."""
        slots = self.slots
        for row in batch.adjusted.tolist():
            slot = int(batch.slots[row])
            request = self.scheduler.request_of[slot]
            assert request is not None and request.adjustments is not None, f"slot {slot} is adjusted"
            request.adjustments.apply(logits[row], slots.tokens[slot, slots.num_prompt[slot] : at[row]])

    def _finish_sample(
        self, slot: int, reason: str, stop_reason: int | str | None, finished: list[EngineRequest]
    ) -> None:
        request = self.scheduler.finish_sample(slot, reason, stop_reason)
        if request is not None:
            del self.requests[request.request_id]
            finished.append(request)

    def _abort_samples(self, request: EngineRequest, finished: list[EngineRequest]) -> None:
        """Finish all running samples of a request with the tokens they have."""
        for slot in request.slots:
            if self.scheduler.request_of[slot] is request:
                self._finish_sample(slot, "abort", None, finished)

    def _pop_failed(self) -> list[EngineRequest]:
        """Remove and return requests that failed when the scheduler wrote them into slots."""
        failed, self.scheduler.failed = self.scheduler.failed, []
        for request in failed:
            del self.requests[request.request_id]
        return failed


def _build_expert_choices(model: Decoder, settings: CoreSettings, num_blocks: int) -> ExpertChoices | None:
    if not settings.enable_return_routed_experts:
        return None
    if model.config.moe is None:
        raise ConfigError(
            f"[inference] enable_return_routed_experts = true, but a {model.config.family} model has no "
            "experts; remove the key."
        )
    return ExpertChoices(model.config, num_blocks, settings.block_size)


def _cache_size(model: Decoder, settings: CoreSettings) -> tuple[int, int]:
    """The number of cache blocks, and the length of the longest sequence in tokens."""
    config = model.config
    limit = settings.max_model_len or config.max_position_embeddings
    if limit > config.max_position_embeddings:
        raise ConfigError(
            f"[inference] max_model_len = {limit} is more than the model's "
            f"{config.max_position_embeddings} positions; lower it."
        )
    tokens = settings.kv_cache_tokens or _tokens_that_fit(model, settings)
    num_blocks = tokens // settings.block_size
    if num_blocks * settings.block_size < limit:
        if settings.max_model_len is not None or num_blocks == 0:
            raise ConfigError(
                f"[inference] kv_cache_tokens = {tokens} cannot hold one sequence of max_model_len = {limit} "
                "tokens; raise the first or lower the second."
            )
        limit = num_blocks * settings.block_size
    return num_blocks, limit


def _cache_class(config: ModelConfig) -> type[KVCache]:
    return KVCache if config.key_cache is None else cast("type[KVCache]", object_at(config.key_cache))


def _tokens_that_fit(model: Decoder, settings: CoreSettings) -> int:
    """Tokens of cache for which the device has free memory."""
    device, dtype = model.output_weight.device, model.output_weight.dtype
    per_token = _cache_class(model.config).bytes_per_token(model.config, dtype)
    if not per_token:  # no layer attends
        return max(CPU_CACHE_TOKENS, model.config.max_position_embeddings)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # A tenth of the GPU's memory stays free for the activations and logits of a step.
        budget = max(free - int((1 - settings.gpu_memory_utilization) * total) - total // 10, 0)
        return max(budget // per_token, settings.block_size)
    with_slabs = per_token + -(-per_token // _BLOCK_KEYS_PER_SLAB_KEY)
    return min(CPU_CACHE_TOKENS, max(free_memory() // 4 // with_slabs, settings.block_size))
