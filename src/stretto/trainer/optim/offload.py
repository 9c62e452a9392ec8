"""Keeps optimizer state in CPU memory; an update copies it to the GPU one bucket at a time.

While one bucket is updated, the state of the next one is copied to the GPU and that of the previous one back, on two
streams beside the computation; the last copies overlap with the next forward pass. The GPU holds the state of at most
three buckets. On a CPU (in tests) state is copied too, and updates are bit-identical.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from jaxtyping import Shaped

Make = Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]

BUCKET_BYTES = 1 << 28
"""Bytes of the weights of one bucket; with AdamW its state is twice as large."""


class StreamedOptimizer:
    """The interface of an optimizer: `param_groups`, `state` (on the CPU) and `step`."""

    def __init__(self, named: dict[str, nn.Parameter], make: Make, *, bucket_bytes: int | None = None) -> None:
        """make: builds the optimizer of a bucket of weights. bucket_bytes: None means BUCKET_BYTES."""
        self._inner = [make(bucket) for bucket in _buckets(named, bucket_bytes or BUCKET_BYTES)]
        self.param_groups: list[dict[str, Any]] = [
            {"params": list(named.values()), "lr": self._inner[0].param_groups[0]["lr"]}
        ]
        self._state: dict[nn.Parameter, dict[str, Tensor]] = {p: {} for p in named.values()}
        device = next(iter(named.values())).device
        self._device, is_gpu = device, device.type == "cuda"
        self._fetch_stream, self._evict_stream = ((torch.cuda.Stream(device) if is_gpu else None) for _ in range(2))
        self._update_stream: Any = None
        self._fetched_events: list[Any] = [None] * len(self._inner)
        self._evicted_events: list[Any] = [None] * len(self._inner)

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Shaped[Tensor, " ..."]]]:
        """State by weight; waits for running copies."""
        if self._evict_stream is not None:
            self._evict_stream.synchronize()
        return self._state

    @torch.no_grad()
    def step(self) -> None:
        """One update of every weight that has a gradient."""
        for inner in self._inner:
            inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self._update_stream = None if self._fetch_stream is None else torch.cuda.current_stream(self._device)
        self._fetch(0)
        for number, inner in enumerate(self._inner):
            if number + 1 < len(self._inner):
                self._fetch(number + 1)
            if self._update_stream is not None:
                self._update_stream.wait_event(self._fetched_events[number])
            inner.step()
            self._evict(number)

    def _fetch(self, number: int) -> None:
        inner = self._inner[number]
        if self._fetch_stream is not None and self._evicted_events[number] is not None:
            self._fetch_stream.wait_event(self._evicted_events[number])
        with _on(self._fetch_stream):
            for parameter in inner.param_groups[0]["params"]:
                if host_state := self._state[parameter]:
                    inner.state[parameter] = {k: self._copy_to_device(v) for k, v in host_state.items()}
        if self._fetch_stream is not None:
            self._fetched_events[number] = self._fetch_stream.record_event()

    def _copy_to_device(self, value: Tensor) -> Tensor:
        if not value.dim():
            return value.to(self._device)
        tensor = value.to(self._device, non_blocking=True, copy=True)
        if self._update_stream is not None:
            tensor.record_stream(self._update_stream)
        return tensor

    def _evict(self, number: int) -> None:
        inner = self._inner[number]
        if self._evict_stream is not None:
            self._evict_stream.wait_stream(self._update_stream)
        with _on(self._evict_stream):
            for parameter in inner.param_groups[0]["params"]:
                host_state = self._state[parameter]
                for key, value in inner.state.get(parameter, {}).items():
                    if not value.dim():
                        host_state[key] = value
                        continue
                    host = host_state.get(key)
                    if host is None:
                        host = host_state[key] = torch.empty_like(
                            value, device="cpu", pin_memory=self._evict_stream is not None
                        )
                    host.copy_(value, non_blocking=True)
                    if self._evict_stream is not None:
                        value.record_stream(self._evict_stream)
        inner.state.clear()
        if self._evict_stream is not None:
            self._evicted_events[number] = self._evict_stream.record_event()


def _buckets(named: dict[str, nn.Parameter], num_bytes: int) -> Iterator[dict[str, nn.Parameter]]:
    bucket: dict[str, nn.Parameter] = {}
    size = 0
    for name, parameter in named.items():
        bucket[name] = parameter
        size += parameter.numel() * parameter.element_size()
        if size >= num_bytes:
            yield bucket
            bucket, size = {}, 0
    if bucket:
        yield bucket


def _on(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
