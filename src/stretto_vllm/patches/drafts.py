"""Temperatures, top_k and top_p of drafted tokens on a CPU.

vLLM's CPU build computes the settings of each drafted token from those of its request with a kernel for int64. It gives
the kernel a copy of any other output and drops the copy, so that the temperatures of drafted tokens are whatever was
in memory: tokens are sampled from another distribution than the policy's, and their log-probabilities are wrong.
"""

from __future__ import annotations

import torch


def expand_settings_on_cpus() -> None:
    """Repeat the settings of requests with torch."""
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = _repeat


def _repeat(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """x[i] as often as request i has tokens, which cu_num_tokens counts up; replace_from becomes replace_to."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return x.repeat_interleave(counts.to(torch.int64), output_size=num_tokens)
