"""Indexers that are trained towards the attention to the keys they choose."""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from cases.families import MIXER_CASES
from tiny import VOCAB, documents, pack

from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler
from stretto.models import hub
from stretto.models.config import parse_config
from stretto.trainer.learner import Learner


def index_gradients(coeff: float, *micro_batches) -> dict[str, torch.Tensor]:
    """Gradients of the indexers after one pass over these micro batches."""
    learner = Learner(
        indexed_policy(), model=ModelSection(dtype="float32", indexer_kl_coeff=coeff), optim=AdamWOptim(),
        scheduler=ConstantScheduler(warmup_steps=0), max_steps=None,
    )  # fmt: skip
    learner.forward_backward(micro_batches)
    found = {name: p.grad.clone() for name, p in learner.policy.named_parameters() if ".indexer." in name}
    assert found and all(gradient.any() for gradient in found.values())
    return found


def indexed_policy():
    from transformers import AutoConfig

    keys = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64,
    }  # fmt: skip
    family, settings = MIXER_CASES["deepseek_v32"]
    groups = {"n_group": 2, "topk_group": 1, "n_routed_experts": 8}
    config = parse_config(AutoConfig.for_model(family, **settings | keys | groups).to_dict(), "a test")
    policy = hub.build_model(config, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + (parameter.dim() == 1))
    return policy


def test_tokens_that_no_pass_computes_do_not_weaken_the_loss_of_an_index():
    parts = documents(0, num_groups=2)
    once = index_gradients(3.0, pack(parts))
    longer = [{name: np.append(stream, np.zeros(9, stream.dtype)) for name, stream in part.items()} for part in parts]
    untrained = pack(documents(1, num_groups=1))
    untrained = msgspec.structs.replace(untrained, loss_mask=np.zeros_like(untrained.loss_mask))
    for others in ([pack(longer)], [pack(parts), untrained]):
        for name, gradient in index_gradients(3.0, *others).items():
            torch.testing.assert_close(gradient, once[name], atol=1e-7, rtol=1e-4)


def test_the_loss_of_an_index_is_a_mean_over_the_tokens_of_the_step():
    first, second = pack(documents(0, num_groups=2)), pack(documents(1, num_groups=1))
    once = index_gradients(3.0, first, second)
    is_trained = first.loss_mask.copy()
    is_trained[np.flatnonzero(is_trained[:-1] & is_trained[1:])] = False  # the last of each document stays
    fewer = msgspec.structs.replace(first, loss_mask=is_trained)
    assert fewer.loss_mask.sum() < first.loss_mask.sum()
    for other in (
        index_gradients(3.0, fewer, second),
        index_gradients(3.0, first, second, first, second),
        index_gradients(3.0, second, pack(documents(0, num_groups=2) + documents(1, num_groups=1)), first),
        {name: gradient * 6 for name, gradient in index_gradients(0.5, first, second).items()},
    ):
        for name, gradient in once.items():
            torch.testing.assert_close(other[name], gradient, atol=1e-7, rtol=1e-4)
