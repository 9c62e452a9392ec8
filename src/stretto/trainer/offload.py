"""Optimizer state in CPU memory: it visits the GPU bucket by bucket while weights are updated.

While one bucket is updated, the next one's state is on its way in and the last one's on its way out, on two
streams beside the computation; the last copies run under the next forward pass. The GPU holds the state of
three buckets at most. On a CPU (tests) the copies are CPU copies, and updates are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

Make = Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]

BUCKET_BYTES = 1 << 28
"""Weights of one bucket; its state is twice as large under AdamW."""


class StreamedOptimizer:
    """What a learner asks of an optimizer: `param_groups`, `state` (in CPU memory), `step`."""

    def __init__(
        self, named: dict[str, nn.Parameter], make: Make, *, bucket_bytes: int | None = None
    ) -> None:
        """make: the optimizer of some of the weights; bucket_bytes: None is BUCKET_BYTES."""
        self._inner = [make(bucket) for bucket in _buckets(named, bucket_bytes or BUCKET_BYTES)]
        self.param_groups: list[dict[str, Any]] = [
            {"params": list(named.values()), "lr": self._inner[0].param_groups[0]["lr"]}
        ]
        self._state: dict[nn.Parameter, dict[str, Tensor]] = {p: {} for p in named.values()}
        device = next(iter(named.values())).device
        self._device, is_gpu = device, device.type == "cuda"
        self._in, self._out = ((torch.cuda.Stream(device) if is_gpu else None) for _ in range(2))
        self._user: Any = None  # the stream that updates
        self._arrived: list[Any] = [None] * len(self._inner)
        self._left: list[Any] = [None] * len(self._inner)

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """By weight, complete: copies that are under way are waited for."""
        if self._out is not None:
            self._out.synchronize()
        return self._state

    @torch.no_grad()
    def step(self) -> None:
        """One update of every weight that has a gradient."""
        for inner in self._inner:
            inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self._user = None if self._in is None else torch.cuda.current_stream(self._device)
        self._fetch(0)
        for number, inner in enumerate(self._inner):
            if number + 1 < len(self._inner):
                self._fetch(number + 1)
            if self._user is not None:
                self._user.wait_event(self._arrived[number])
            inner.step()
            self._evict(number)

    def _fetch(self, number: int) -> None:
        inner = self._inner[number]
        if self._in is not None and self._left[number] is not None:
            self._in.wait_event(self._left[number])
        with _on(self._in):
            for parameter in inner.param_groups[0]["params"]:
                if kept := self._state[parameter]:
                    inner.state[parameter] = {key: self._arriving(value) for key, value in kept.items()}
        if self._in is not None:
            self._arrived[number] = self._in.record_event()

    def _arriving(self, value: Tensor) -> Tensor:
        if not value.dim():
            return value.to(self._device)
        tensor = value.to(self._device, non_blocking=True, copy=True)
        if self._user is not None:
            tensor.record_stream(self._user)
        return tensor

    def _evict(self, number: int) -> None:
        inner = self._inner[number]
        if self._out is not None:
            self._out.wait_stream(self._user)
        with _on(self._out):
            for parameter in inner.param_groups[0]["params"]:
                kept = self._state[parameter]
                for key, value in inner.state.get(parameter, {}).items():
                    if not value.dim():
                        kept[key] = value
                        continue
                    host = kept.get(key)
                    if host is None:
                        host = kept[key] = torch.empty_like(
                            value, device="cpu", pin_memory=self._out is not None
                        )
                    host.copy_(value, non_blocking=True)
                    if self._out is not None:
                        value.record_stream(self._out)
        inner.state.clear()
        if self._out is not None:
            self._left[number] = self._out.record_event()


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
