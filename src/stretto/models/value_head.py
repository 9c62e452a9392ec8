"""A decoder with one output in place of the vocabulary: a critic's value of a text, or a reward model's score.

Its files are those of a transformers model for sequence classification with one label, so each of the two can start
from the other. `Decoder.lm_head` is the head.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stretto.base.errors import ConfigError
from stretto.families.table import FAMILIES
from stretto.models import hub
from stretto.models.decoder import Decoder
from stretto.models.hf import Policy
from stretto.models.tensor_map import CheckpointReader, LazyTensor, as_whole_slices

logger = logging.getLogger(__name__)

HEAD_NAME, SCORE_NAME = "lm_head.weight", "score.weight"
"""The name of the output weight here, and in a model for sequence classification."""


def with_value_head(policy: Decoder) -> Decoder:
    """A model with the policy's blocks and a new head that is 0 for every text.

    It shares memory with `policy`, which must not be used afterwards.
    """
    cfg = replace(policy.config, tie_word_embeddings=False)
    with torch.device("meta"):
        module = Decoder(cfg)
    module.model = policy.model
    module.lm_head = _head(cfg.hidden_size, policy.output_weight.dtype, policy.output_weight.device)
    return module


def _head(hidden_size: int, dtype: torch.dtype, device: torch.device | str) -> nn.Linear:
    head = nn.Linear(hidden_size, 1, bias=False, dtype=dtype, device=device)
    nn.init.zeros_(head.weight)
    return head


def load_value_model(
    directory: Path, *, dtype: torch.dtype, device: torch.device | str, is_meta: bool = False, key: str = "model"
) -> Decoder:
    """A model with a value head from a model directory; without `score.weight` it gets a new head that is 0.

    is_meta: leave it on the meta device; what trains it then loads its shards. key: what names the directory.

    Raises: ConfigError for a model with several labels; DataError for a damaged directory.
    """
    cfg = replace(hub.load_config(directory), tie_word_embeddings=False)
    with torch.device("meta"):
        module = Decoder(cfg)
        module.lm_head = nn.Linear(cfg.hidden_size, 1, bias=False)
    module = module.to(dtype)

    def read() -> Iterator[tuple[str, tuple[int, ...], LazyTensor]]:
        is_scorer = False
        for name, shape, source in hub.read_tensors(directory):
            if name == SCORE_NAME:
                if shape != (1, cfg.hidden_size):
                    raise ConfigError(
                        f"{key} = {str(directory)!r}: {SCORE_NAME} has shape {shape}; the model has one label, "
                        f"(1, {cfg.hidden_size})"
                    )
                is_scorer = True
                yield HEAD_NAME, shape, source
            elif name != HEAD_NAME:
                yield name, shape, source
        if not is_scorer:
            yield HEAD_NAME, (1, cfg.hidden_size), torch.zeros(1, cfg.hidden_size, dtype=dtype)
        logger.info("values of %s: %s", directory, "its own head" if is_scorer else "a new head that is 0")

    if is_meta:
        module.checkpoint_reader = CheckpointReader(directory, read)
        return module
    module = module.to_empty(device=device)
    targets = as_whole_slices((name, p) for name, p in module.named_parameters())
    hub.load_slices(module.tensor_map, targets, read(), cfg, str(directory))
    return module


def has_value_head(module: Policy) -> bool:
    """True for what `with_value_head` and `load_value_model` return."""
    return isinstance(module, Decoder) and module.output_weight.shape[0] == 1


def classification_config(module: Decoder) -> dict[str, Any]:
    """The config.json of a model with a value head, for `load_value_model` and transformers."""
    cfg = module.config
    return cfg.hf | {
        "architectures": [FAMILIES[cfg.family].architecture.replace("CausalLM", "SequenceClassification")],
        "num_labels": 1,
        "id2label": {"0": "value"},
        "label2id": {"value": 0},
        "tie_word_embeddings": False,
    }
