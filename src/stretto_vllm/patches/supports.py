"""Return the tokens that each token was sampled from (vLLM's sampling masks), for all requests.

vLLM 0.32 returns them from its GPU runner only. On a CPU they are derived from the sampler's processed
log-probabilities and returned in vLLM's own format. On GPUs vLLM's option `return_sampling_mask` does it, but refuses
every request that is greedy or has no top_k, as evals and scored prompts may be; the patch accepts such requests.
In both cases a position where nothing was filtered has an empty mask instead of the whole vocabulary.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stretto_vllm.patches.wrap import run_after

if TYPE_CHECKING:
    from jaxtyping import Float


def return_supports_on_cpus() -> None:
    """Wrap vLLM's functions for engines on a CPU."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    run_after(Scheduler, "__init__", lambda scheduler: setattr(scheduler, "return_sampling_mask", True))
    run_after(CPUModelRunner, "load_model", MaskCapture)


def return_supports_on_gpus() -> None:
    """Wrap vLLM's functions for engines on GPUs."""
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

    run_after(InputProcessor, "__init__", allow_all_requests)
    SamplingMaskTensors.tolists = drop_full_rows(SamplingMaskTensors.tolists)


def allow_all_requests(processor: Any) -> None:
    """Make this check of requests use a copy of the settings with masks off; the engine has them on."""
    processor.model_config = copy.copy(processor.model_config)
    processor.model_config.return_sampling_mask = False


def drop_full_rows(tolists: Any) -> Any:
    """Wrap the conversion of masks into lists: a row that keeps every token becomes an empty list."""

    @functools.wraps(tolists)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts = torch.where(self.counts < self.vocab_size, self.counts, 0)
        return tolists(self._replace(counts=counts), *args, **kwargs)

    return wrapped


class MaskCapture:
    """The worker's side on a CPU: returns the masks of a step with its tokens."""

    def __init__(self, runner: Any) -> None:
        self.logprobs: torch.Tensor | None = None  # [requests, vocab] of the latest step
        sample, sample_tokens = runner.sampler.sample, runner.sample_tokens

        def sample_and_store(*args: Any, **kwargs: Any) -> Any:
            result = sample(*args, **kwargs)
            self.logprobs = result[1]
            return result

        def sample_with_masks(*args: Any, **kwargs: Any) -> Any:
            self.logprobs = None
            result = sample_tokens(*args, **kwargs)
            if self.logprobs is not None and len(self.logprobs) == len(result.req_ids):
                result.sampling_masks = masks(self.logprobs)
            return result

        runner.sampler.sample, runner.sample_tokens = sample_and_store, sample_with_masks


def masks(logprobs: Float[torch.Tensor, "requests vocab"]) -> Any:
    """The tokens of each row with a finite logprob, in vLLM's format; none if all are finite."""
    from vllm.v1.outputs import SamplingMaskLists

    is_in_mask = logprobs > -torch.inf
    is_in_mask &= ~is_in_mask.all(dim=1, keepdim=True)
    rows, ids = is_in_mask.nonzero(as_tuple=True)
    counts = np.bincount(rows.numpy(), minlength=len(logprobs))
    offsets = np.concatenate(([0], np.cumsum(counts)))
    return SamplingMaskLists(ids.numpy().astype(np.int32), offsets)
