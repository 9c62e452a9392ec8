"""The engine's metrics as Prometheus text under vLLM's names, for tools made for vLLM."""

from __future__ import annotations

import time
from bisect import bisect_left

from stretto.inference.embedded.core import EngineCore
from stretto.inference.embedded.scheduler import EngineRequest

_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                  40.0)  # fmt: skip
_REQUEST_S = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0,
              240.0)  # fmt: skip


class Histogram:
    """Counts of values by upper bound, and the sum of the values."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str, labels: str) -> list[str]:
        lines, cumulative = [f"# TYPE {name} histogram"], 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts):
            cumulative += count
            lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {cumulative}')
        return [*lines, f"{name}_sum{{{labels}}} {self.total}", f"{name}_count{{{labels}}} {cumulative}"]


class Metrics:
    """Counts that are updated with each request; `render` reads all other metrics from the core."""

    def __init__(self, model_name: str) -> None:
        self.labels = f'engine="0",model_name="{model_name}"'
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0}
        self.first_token_latency = Histogram(_FIRST_TOKEN_S)
        self.request_latency = Histogram(_REQUEST_S)
        self.queue_time = Histogram(_REQUEST_S)
        self.num_updates = 0
        self.update_s = 0.0

    def observe(self, request: EngineRequest) -> None:
        """Count a request that has ended."""
        now = time.monotonic()
        for completion in request.results:
            self.finished[completion.finish_reason] += 1
        self.request_latency.observe(now - request.arrived_s)
        if request.first_token_s is not None:
            self.first_token_latency.observe(request.first_token_s - request.arrived_s)
        if request.started_s is not None:
            self.queue_time.observe(request.started_s - request.arrived_s)

    def render(self, core: EngineCore, num_held: int) -> str:
        """The page of /metrics. num_held: requests that have not reached the scheduler."""
        running, waiting = core.scheduler.num_requests
        pool, counters = core.pool, core.scheduler.counters
        gauges = {
            "num_requests_running": running,
            "num_requests_waiting": waiting + num_held,
            "kv_cache_usage_perc": 1 - pool.num_free / pool.num_usable,
            "weight_version": core.version,
        }
        totals = {
            "prefix_cache_queries": counters.prefix_queries,
            "prefix_cache_hits": counters.prefix_hits,
            "num_preemptions": counters.num_preemptions,
            "prompt_tokens": counters.prompt_tokens,
            "prompt_tokens_cached": counters.prefix_hits,
            "generation_tokens": counters.generation_tokens,
            "weight_updates": self.num_updates,
            "weight_update_seconds": self.update_s,
        }
        drafts = core.drafter
        if drafts is not None:
            totals |= {
                "spec_decode_num_drafts": drafts.counts.num_drafts,
                "spec_decode_num_draft_tokens": drafts.counts.num_draft_tokens,
                "spec_decode_num_accepted_tokens": drafts.counts.num_accepted_tokens,
                "spec_decode_num_passes": drafts.counts.num_passes,
                "spec_decode_num_passes_on": drafts.counts.num_passes_on,
            }
        lines = []
        for name, value in gauges.items():
            lines += [f"# TYPE vllm:{name} gauge", f"vllm:{name}{{{self.labels}}} {value}"]
        for name, value in totals.items():
            lines += [f"# TYPE vllm:{name}_total counter", f"vllm:{name}_total{{{self.labels}}} {value}"]
        for position, count in enumerate([] if drafts is None else drafts.counts.accepted_at.tolist()):
            labels = f'{self.labels},position="{position}"'
            lines.append(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels}}} {count}")
        lines.append("# TYPE vllm:request_success_total counter")
        for reason, count in self.finished.items():
            lines.append(f'vllm:request_success_total{{{self.labels},finished_reason="{reason}"}} {count}')
        lines += self.first_token_latency.lines("vllm:time_to_first_token_seconds", self.labels)
        lines += self.request_latency.lines("vllm:e2e_request_latency_seconds", self.labels)
        lines += self.queue_time.lines("vllm:request_queue_time_seconds", self.labels)
        config = f'block_size="{core.settings.block_size}",num_gpu_blocks="{pool.num_usable}"'
        lines += ["# TYPE vllm:cache_config_info gauge", f"vllm:cache_config_info{{{self.labels},{config}}} 1"]
        return "\n".join(lines) + "\n"
