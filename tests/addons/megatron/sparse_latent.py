"""Logits of Megatron-Core with latent attention to chosen keys, loaded from what is written here; run by
test_megatron_network.py.

`python sparse_latent.py CHECKPOINT MODEL`, with the folder on_cpu on the path of Python, prints by type and by epsilon
of the norms in latent attention how far its logits are from those of our own modules. Megatron-Core builds such layers
with Transformer Engine only, so that its linear layers and norms are PyTorch's here; the rest is Megatron's.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import megatron.core.models.gpt.experimental_attention_variant_module_specs as specs
import megatron.core.transformer.mla_qk_norm_config as norms
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases.float64 import InFloat64
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from stretto.models import hub
from stretto.models.attention import packed_attention

TOKENS = 12
"""More than a query attends to."""


class Linear(nn.Linear):
    """A linear layer as Megatron calls it."""

    def __init__(self, inner: int, outer: int, config: Any, **_: Any) -> None:
        super().__init__(inner, outer, bias=False, dtype=config.params_dtype)

    def forward(self, x: Tensor) -> Any:
        return F.linear(x, self.weight), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        return make_sharded_tensors_for_checkpoint(self.state_dict(), prefix, {}, sharded_offsets)


class Norm(nn.Module):
    """What Megatron builds with these arguments is PyTorch's norm."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        return kind(hidden_size, eps=eps, dtype=config.params_dtype)


class Layers(LocalSpecProvider):
    def linear(self) -> Any:
        return Linear

    def layer_norm(self, *_: Any, **__: Any) -> Any:
        return Norm


class Wider(InFloat64):
    """Megatron's masks are added up in the type that it names."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.Tensor.scatter_reduce_:
            args = (*args[:3], args[3].to(args[0].dtype))
        return super().__torch_function__(func, types, args, kwargs)


def build(hf: dict[str, Any]) -> GPTModel:
    """The model of a config.json of glm_moe_dsa, with one rank."""
    attention = specs.get_dsa_module_spec_for_backend

    def with_plain_down_projections(config: Any, backend: Any = None) -> Any:
        spec = attention(config, backend)
        spec.submodules.linear_q_down_proj = spec.submodules.linear_kv_down_proj = ColumnParallelLinear
        return spec

    specs.get_dsa_module_spec_for_backend = with_plain_down_projections
    specs._get_backend_spec_provider = lambda config: Layers()
    norms.get_backend = lambda *_: Layers()
    shared = hf["indexer_types"].index("shared")
    config = MLATransformerConfig(
        num_layers=hf["num_hidden_layers"], hidden_size=hf["hidden_size"], ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"], layernorm_epsilon=hf["rms_norm_eps"], qk_layernorm=True,
        q_lora_rank=hf["q_lora_rank"], kv_lora_rank=hf["kv_lora_rank"], qk_head_dim=hf["qk_nope_head_dim"],
        qk_pos_emb_head_dim=hf["qk_rope_head_dim"], v_head_dim=hf["v_head_dim"], rope_type="rope",
        rotary_base=hf["rope_parameters"]["rope_theta"], experimental_attention_variant="dsa",
        dsa_indexer_n_heads=hf["index_n_heads"], dsa_indexer_head_dim=hf["index_head_dim"],
        dsa_indexer_topk=hf["index_topk"], dsa_indexer_topk_freq=2, dsa_indexer_skip_topk_offset=shared,
        dsa_indexer_loss_coeff=0.0, dsa_indexer_rope_interleaved=True, dsa_indexer_rotate_activation=False,
        dsa_indexer_k_norm_epsilon=1e-6, num_moe_experts=hf["n_routed_experts"],
        moe_router_topk=hf["num_experts_per_tok"], moe_ffn_hidden_size=hf["moe_intermediate_size"],
        moe_layer_freq=[int(kind == "sparse") for kind in hf["mlp_layer_types"]], moe_router_score_function="sigmoid",
        moe_router_topk_scaling_factor=hf["routed_scaling_factor"], moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.0, moe_router_load_balancing_type="none", moe_router_dtype="fp32",
        moe_shared_expert_intermediate_size=hf["moe_intermediate_size"], moe_token_dispatcher_type="alltoall",
        add_bias_linear=False, gated_linear_unit=True, activation_func=F.silu, params_dtype=torch.float32,
        hidden_dropout=0.0, attention_dropout=0.0, perform_initialization=False, gradient_accumulation_fusion=False,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False,
        apply_rope_fusion=False,
    )  # fmt: skip
    return GPTModel(
        config,
        specs.get_transformer_block_with_experimental_attention_variant_spec(config),
        hf["vocab_size"],
        hf["max_position_embeddings"],
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=hf["rope_parameters"]["rope_theta"],
    )


def main(checkpoint: str, model: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    theirs, ours = (
        build(json.loads((Path(model) / "config.json").read_text())),
        hub.load_model(model, dtype=torch.float32),
    )
    loaded = theirs.load_state_dict(dist_checkpointing.load(theirs.sharded_state_dict(), checkpoint), strict=False)
    assert not [name for name in loaded.missing_keys if "_extra_state" not in name], loaded.missing_keys
    ids = torch.randint(0, 32, (48,), generator=torch.Generator().manual_seed(5))[:TOKENS]
    positions, mask = torch.arange(TOKENS), torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)[None, None]
    found: dict[str, dict[str, float]] = {}
    for dtype in (torch.float32, torch.float64):
        wide = dtype is torch.float64
        theirs, ours = theirs.to(dtype).eval(), ours.to(dtype).eval()
        with torch.no_grad(), InFloat64() if wide else nullcontext():
            wanted = F.linear(ours(ids, positions, packed_attention((0, TOKENS))), ours.lm_head.weight)
        for eps in (1e-5, 1e-6):
            for layer in theirs.decoder.layers:
                layer.self_attention.q_layernorm.eps = layer.self_attention.kv_layernorm.eps = eps
            with torch.no_grad(), Wider() if wide else nullcontext():
                logits = theirs(ids[None], positions[None], mask)[0]
            found.setdefault(str(dtype), {})[str(eps)] = float((logits - wanted).abs().max())
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
