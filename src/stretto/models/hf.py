"""Any transformers causal language model behind the interface our own decoder has for training.

Trainer only: there is no KV cache and no `Attend` here. Rows arrive packed; families whose transformers
code was shown to keep packed documents apart get the row as it is, all others get one padded row a
document, because five of eleven families leak between packed documents without a word. `use_cache=False`
always: with a cache even the good ones leak.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from stretto.base.errors import DataError
from stretto.models.attention import PackedLayout
from stretto.models.lora import Merged, is_adapter_parameter

if TYPE_CHECKING:
    from jaxtyping import Float, Int

PACKED_FAMILIES = frozenset({"qwen3", "qwen3_moe", "minimax_m2", "laguna", "glm4_moe", "glm_moe_dsa"})
"""model_type of families whose packed rows equal each document alone (tests/unit/test_models_hf.py)."""

_HEAD_SETTINGS = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}


class HFDecoder(nn.Module):
    """`hidden`, `output_weight`, `config.hf`, `export_tensors`: what the learner asks of a policy."""

    shares_prefixes = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config = _HFConfig(model.config)
        self.packs = model.config.model_type in PACKED_FAMILIES

    @property
    def wrapped(self) -> nn.Module:
        """What transformers made."""
        return self.model

    @property
    def output_weight(self) -> Float[Tensor, "vocab dim"]:
        return self.model.get_output_embeddings().weight

    def hidden(
        self,
        token_ids: Int[Tensor, " tokens"],
        layout: PackedLayout,
        rows: Int[Tensor, " rows"] | None = None,
    ) -> Float[Tensor, "rows dim"]:
        """Hidden states of packed documents, each as if it stood alone; all of them, or those of `rows`."""
        hidden = self._all_hidden(token_ids, layout)
        return hidden if rows is None else hidden.index_select(0, rows)

    def _all_hidden(self, token_ids: Tensor, layout: PackedLayout) -> Tensor:
        assert layout.parents is None, "transformers models take whole documents only"
        if self.packs:
            return self._body(token_ids[None], position_ids=layout.position_ids[None])[0]
        rows, columns, mask = _padding(layout)
        padded = token_ids.new_zeros(mask.shape)
        padded[rows, columns] = token_ids
        return self._body(padded, attention_mask=mask)[rows, columns]

    def export_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Weights under their checkpoint names; tensors that transformers fused at load are split again."""
        from transformers.core_model_loading import revert_weight_conversion

        merged = Merged(self.model)
        state = {
            name: merged[name] if name in merged else tensor.detach()
            for name, tensor in self.model.state_dict().items()
            if not is_adapter_parameter(name)
        }
        for name in self.model._tied_weights_keys or {}:
            if self.model.config.get_text_config().tie_word_embeddings:
                state.pop(name, None)
        yield from revert_weight_conversion(self.model, state).items()

    def _body(self, token_ids: Tensor, **layout: Tensor) -> Tensor:
        out = self.model.base_model(input_ids=token_ids, use_cache=False, **layout)
        return out.last_hidden_state


class _HFConfig:
    """The part of ModelConfig that saving and learning need."""

    moe = None  # transformers' mixtures compute their choices themselves

    def __init__(self, config: Any) -> None:
        self.family = config.model_type
        self.vocab_size = config.get_text_config().vocab_size
        self.hf = config.to_dict()


def load_hf_model(
    directory: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
) -> HFDecoder:
    """The transformers model of a directory, ready to train.

    Raises: DataError when transformers does not know the architecture or the directory is incomplete.
    """
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as cause:
        raise DataError(f"{directory}: transformers cannot load it: {cause}") from cause
    decoder = HFDecoder(model.to(device).train())
    _check_output_head(decoder, str(directory))
    return decoder


@torch.no_grad()
def _check_output_head(decoder: HFDecoder, where: str) -> None:
    """Refuse a family whose logits are not hidden @ output_weight.T (soft-capped, scaled, with a bias).

    By name where the setting is known, because a soft cap hardly shows on small logits; else by trying it.
    """
    config = decoder.model.config.get_text_config()
    changes = [
        name
        for name, neutral in _HEAD_SETTINGS.items()
        if getattr(config, name, neutral) not in (None, neutral)
    ]
    token_ids = torch.zeros(1, 2, dtype=torch.long, device=decoder.output_weight.device)
    logits = decoder.model(input_ids=token_ids, use_cache=False).logits[0].float()
    hidden = decoder.hidden(token_ids[0], PackedLayout((0, 2), token_ids.device))
    ours = hidden.float() @ decoder.output_weight.float().T
    tolerance = 1e-3 if decoder.output_weight.dtype is torch.float32 else 0.05
    if changes or (logits - ours).abs().max() > tolerance * logits.abs().max():
        raise DataError(
            f"{where}: {decoder.config.family} changes its logits after the output head "
            f"({', '.join(changes) or 'as a try showed'}); training it would use the wrong "
            "log-probabilities, so it is not supported"
        )


def _padding(layout: PackedLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Row and column of every token in a padded [documents, longest] matrix, and its mask."""
    lengths = np.diff(np.asarray(layout.cu_seqlens))
    lengths = lengths[lengths > 0]
    rows = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(layout.device)
    mask = torch.arange(int(lengths.max()))[None] < torch.from_numpy(lengths)[:, None]
    return rows, layout.position_ids, mask.long().to(layout.device)
