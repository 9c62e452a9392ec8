"""A model as Megatron-Core computes it: its config from ours, its layers, and the chunks of this rank.

With Transformer Engine its layers are used; without it those of Megatron-Core itself, with a norm and an attention over
packed rows of this file, because Megatron's own know neither. Weights are not initialised here (weights.py loads them).
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from stretto.base.errors import ConfigError
from stretto.config.sections.model import ActivationCheckpointSection
from stretto.config.sections.trainer import MegatronSection
from stretto.families.shape import ModelConfig, MoEShape
from stretto.models.attention import packed_attention
from stretto.models.parts.attend import Limits
from stretto.models.parts.norm import RMSNorm
from stretto.models.parts.rope import inverse_frequencies
from stretto.trainer.parallel.collectives import gather_rows
from stretto_megatron.rows import PackedRow

if TYPE_CHECKING:
    from jaxtyping import Float


def build_config(
    cfg: ModelConfig, dtype: torch.dtype, section: MegatronSection, ac: ActivationCheckpointSection | None
) -> TransformerConfig:
    """Megatron's config of a model on the mesh of its parallel state, which must exist.

    Raises: ConfigError for an override that Megatron does not know or does not accept.
    """
    latent = cfg.shape_of("latent")
    settings = _shape_settings(cfg) | _mesh_settings(section) | _recompute_settings(ac)
    settings |= {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "perform_initialization": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Losses are divided by the tokens of all ranks already, so gradients are summed.
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": HAVE_TE and latent is None,  # that of latent attention has frequencies of its own
        "masked_softmax_fusion": False,
        "bias_activation_fusion": HAVE_TE,
        "bias_dropout_fusion": False,
        "persist_layer_norm": HAVE_TE,
        "transformer_impl": "transformer_engine" if HAVE_TE else "local",
    }
    kind = TransformerConfig if latent is None else MLATransformerConfig
    known = {each.name for each in fields(kind)}
    if unknown := sorted(set(section.overrides) - known):
        raise ConfigError(f"trainer.megatron.overrides: Megatron-Core has no argument {unknown[0]!r}; correct its name")
    try:
        return kind(**(settings | section.overrides))
    except (AssertionError, TypeError, ValueError) as cause:
        raise ConfigError(f"Megatron-Core refuses this configuration: {cause}") from cause


def _shape_settings(cfg: ModelConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "num_layers": cfg.num_layers,
        "hidden_size": cfg.hidden_size,
        "ffn_hidden_size": cfg.intermediate_size,
        "num_attention_heads": cfg.num_heads,
        "num_query_groups": cfg.num_kv_heads,
        "kv_channels": cfg.head_dim,
        "add_bias_linear": cfg.out_bias,
        "add_qkv_bias": cfg.qkv_bias,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "normalization": "RMSNorm",
        "layernorm_epsilon": cfg.rms_norm_eps,
        "qk_layernorm": cfg.has_qk_norm,
        "rotary_interleaved": cfg.rope.is_interleaved,
        "moe_token_dispatcher_type": "alltoall",  # another one refuses rows of different lengths
    }
    return settings | _attention_settings(cfg) | ({} if cfg.moe is None else _expert_settings(cfg, cfg.moe))


def _attention_settings(cfg: ModelConfig) -> dict[str, Any]:
    """Windows, sinks, latent attention, and the scale of its scores."""
    settings: dict[str, Any] = {"softmax_type": "learnable"} if cfg.has_sinks else {}
    if cfg.window is not None:
        windows = [cfg.attention(layer).window for layer in range(cfg.num_layers)]
        settings |= {
            "window_size": (cfg.window - 1, 0),
            "window_attn_skip_freq": [int(window is not None) for window in windows],
        }
    if (latent := cfg.shape_of("latent")) is None:
        # The factor on cos and sin of queries and keys is one on their products, as whole heads are rotated.
        _, factor = inverse_frequencies(cfg.rope, cfg.head_dim, cfg.max_position_embeddings)
        return settings | {"softmax_scale": None if factor == 1.0 else factor**2 * cfg.head_dim**-0.5}
    return settings | {
        "multi_latent_attention": True,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.rank,
        "qk_head_dim": latent.plain_dim,
        "qk_pos_emb_head_dim": latent.rotated_dim,
        "v_head_dim": latent.value_dim,
        "qk_layernorm": True,
        "rotary_interleaved": False,  # its layers take neighbouring dims by themselves
        "rope_type": "yarn",
        "rotary_scaling_factor": latent.yarn_factor,  # of the scores; Rotation has the frequencies
        "mscale_all_dim": latent.yarn_mscale,
    }


def _expert_settings(cfg: ModelConfig, moe: MoEShape) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if moe.clamped is not None:
        settings |= {
            "activation_func": quick_gelu,
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": moe.clamped.limit,
        }
    if moe.num_groups > moe.top_groups:
        settings |= {"moe_router_num_groups": moe.num_groups, "moe_router_group_topk": moe.top_groups}
    return settings | {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.top_k,
        "moe_ffn_hidden_size": moe.intermediate_size,
        "moe_layer_freq": [int(cfg.is_sparse(layer)) for layer in range(cfg.num_layers)],
        "moe_router_load_balancing_type": "none",
        "moe_router_score_function": "sigmoid" if moe.is_sigmoid else "softmax",
        # The softmax of the chosen logits is that of all, divided by its sum over the chosen.
        "moe_router_pre_softmax": not moe.is_sigmoid and not moe.norm_topk_prob,
        "moe_router_topk_scaling_factor": None if moe.gate_scale == 1.0 else moe.gate_scale,
        "moe_router_enable_expert_bias": moe.has_expert_bias,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": moe.shared_size,
        "moe_grouped_gemm": HAVE_TE,
        "moe_permute_fusion": HAVE_TE,
    }


def _mesh_settings(section: MegatronSection) -> dict[str, Any]:
    tp, pp = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    is_interleaved = section.virtual_stages > 1
    return {
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        # Interleaved stages would mix up what they tell a rank that is both before and behind them; their rows have
        # the same length (network.py), and such a rank is told in order.
        "variable_seq_lengths": pp > 1 and not is_interleaved,
        "overlap_p2p_comm": is_interleaved,
        "batch_p2p_comm": not is_interleaved,
        "deallocate_pipeline_outputs": pp > 1,
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": section.etp,
        "num_layers_in_first_pipeline_stage": section.first_stage_layers,
        "num_layers_in_last_pipeline_stage": section.last_stage_layers,
    }


_RECOMPUTED = {"norm": "layernorm", "mlp": "mlp", "routed_experts": "moe"}
"""Parts of [model.ac] targets that limits.py allows, and what Megatron calls them."""


def _recompute_settings(ac: ActivationCheckpointSection | None) -> dict[str, Any]:
    if ac is None:
        return {}
    if ac.mode == "selective":
        modules = [_RECOMPUTED[target] for target in ac.targets]
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    method, number = ("uniform", ac.group_size) if ac.num_blocks is None else ("block", ac.num_blocks)
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": number}


def build_chunks(cfg: ModelConfig, config: TransformerConfig, device: torch.device) -> list[GPTModel]:
    """The parts of the model that this rank has, in their order: one, or several with an interleaved pipeline."""
    number = config.virtual_pipeline_model_parallel_size
    # A vocabulary that ranks of tp cannot divide is padded; the logits of the padding are masked.
    degree = config.tensor_model_parallel_size
    vocab_size = -(-cfg.vocab_size // degree) * degree
    chunks = []
    for stage in [None] if number is None else range(number):
        spec = get_gpt_decoder_block_spec(config, HAVE_TE, normalization="RMSNorm", vp_stage=stage)
        if not HAVE_TE:
            spec = _with_own_parts(spec)
        chunk = GPTModel(
            config,
            spec,
            vocab_size,
            cfg.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=cfg.tie_word_embeddings,
            position_embedding_type="rope",
            rotary_percent=cfg.rope.fraction,
            vp_stage=stage,
        ).to(device)
        if (latent := cfg.shape_of("latent")) is None:
            frequencies, _ = inverse_frequencies(cfg.rope, cfg.head_dim, cfg.max_position_embeddings)
            chunk.rotary_pos_emb.inv_freq = torch.tensor(frequencies, dtype=torch.float32, device=device)
        else:
            for layer in chunk.decoder.layers:
                _finish_latent(layer.self_attention, cfg, latent.rank + latent.rotated_dim, device)
        if cfg.out_bias:
            _finish_biases(chunk)
        chunks.append(chunk)
    return chunks


def _finish_latent(attention: Any, cfg: ModelConfig, small: int, device: torch.device) -> None:
    """Give latent attention our frequencies; without Transformer Engine also linear layers that are whole on each rank.

    Megatron's own divide small vectors over tp, and lose a part of the gradient of the keys that heads
    share. small: the width of the small vectors of keys.
    """
    attention.rotary_pos_emb = Rotation(cfg, device)
    for name in () if HAVE_TE else ("linear_q_down_proj", "linear_kv_down_proj"):
        if (built := getattr(attention, name, None)) is not None:
            size = attention.config.q_lora_rank if "_q_" in name else small
            setattr(attention, name, WholeLinear(attention.config, built.input_size, size).to(device))


def _finish_biases(chunk: GPTModel) -> None:
    """Say of the parameters of attention with sinks and of experts with biases which ranks have the same."""
    for name, parameter in chunk.named_parameters():
        if name.endswith(".softmax_offset"):
            tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        elif ".experts." in name and "bias" in name:
            parameter.sequence_parallel = False  # type: ignore[attr-defined]  # ranks of tp have different experts
    for name, module in chunk.named_modules() if not HAVE_TE else ():
        if ".local_experts." in name and name.endswith(".linear_fc2"):  # what it returns is changed in place
            module.register_forward_hook(lambda _, __, found: (found[0].clone(), found[1]))


class Rotation(RotaryEmbedding):
    """The angles of our rotation, and the factor on cos and sin, as Megatron's latent attention asks for them."""

    def __init__(self, cfg: ModelConfig, device: torch.device) -> None:
        dim = int(cfg.head_dim * cfg.rope.fraction + 1e-6)
        super().__init__(dim, 1.0, use_cpu_initialization=True, cp_group=parallel_state.get_context_parallel_group())
        frequencies, self.factor = inverse_frequencies(cfg.rope, cfg.head_dim, cfg.max_position_embeddings)
        self.inv_freq = torch.tensor(frequencies, dtype=torch.float32, device=device)

    def forward(self, length: int, *, packed_seq: bool) -> tuple[Float[Tensor, "length 1 1 dim"], float]:
        return super().forward(length, packed_seq=packed_seq), self.factor


def seed_megatron(seed: int) -> None:
    """Give Megatron's random number generators, which its layers ask for, a seed."""
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


# -- parts without Transformer Engine --


class PlainNorm(RMSNorm):
    """Our RMSNorm, which tells Megatron whether its gradients are of some of the tokens only."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        self.to(config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class WholeLinear(nn.Module):
    """A linear layer that each rank of tp has whole, and computes for its own tokens."""

    def __init__(self, config: TransformerConfig, in_size: int, out_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Float[Tensor, "*tokens dim"]) -> tuple[Float[Tensor, "*tokens out"], None]:
        return F.linear(x, self.weight), None


class PackedAttention(MegatronModule):
    """Causal attention within the documents of a packed row, the tokens of which ranks of cp may split.

    Windows and sinks are for whole rows only.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, *, softmax_scale: float | None = None, **_: Any
    ) -> None:
        """softmax_scale: factor on the scores; None: that of the width of queries."""
        super().__init__(config=config)
        self.layer, self.scale = layer_number - 1, softmax_scale
        self.group = parallel_state.get_context_parallel_group()
        self.window, self.softmax_offset = None, None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self.window = config.window_size[0] + 1
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = nn.Parameter(torch.empty(heads, dtype=config.params_dtype))

    def forward(
        self,
        query: Float[Tensor, "tokens heads dim"],
        key: Float[Tensor, "tokens kv_heads dim"],
        value: Float[Tensor, "tokens kv_heads dim"],
        attention_mask: None = None,
        *,
        packed_seq_params: PackedRow,
        **_: Any,
    ) -> Float[Tensor, "tokens features"]:
        """The attended values of this rank's tokens."""
        row = packed_seq_params
        if self.scale is not None:
            query = query * (self.scale * query.shape[-1] ** 0.5)
        if self.group.size() == 1:
            limits = Limits(self.window, self.softmax_offset)
            out = packed_attention(row.bounds, query.device)(self.layer, query, key, value, limits)
        else:
            rank = self.group.rank()
            key, value = (gather_rows(each, row.places, rank, self.group) for each in (key, value))
            out = torch.cat([_attend(query[own], key[seen], value[seen]) for own, seen in row.chunks])
        return out.flatten(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None, **_: Any
    ) -> Any:
        """What Megatron saves of it: sinks, which tp divides."""
        state, axes = self.state_dict(prefix="", keep_vars=True), {"softmax_offset": 0}
        return make_sharded_tensors_for_checkpoint(state, prefix, axes, sharded_offsets)


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of the last len(query) tokens of a document, [tokens, heads, dim]."""
    first = len(key) - len(query)
    mask = torch.ones(len(query), len(key), dtype=torch.bool, device=query.device).tril(first)
    q, k, v = (each.transpose(0, 1)[None] for each in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def _with_own_parts(spec: Any) -> Any:
    """A block's layers with this file's norm and attention."""
    layers = []
    for layer in spec.layer_specs:
        parts = layer.submodules
        attention = parts.self_attention
        inner = attention.submodules
        names = (name for name in ("q_layernorm", "k_layernorm", "kv_layernorm") if hasattr(inner, name))
        norms = {name: PlainNorm for name in names if getattr(inner, name).__name__ != "IdentityOp"}
        inner = replace(inner, core_attention=PackedAttention, **norms)
        parts = replace(
            parts,
            input_layernorm=PlainNorm,
            pre_mlp_layernorm=PlainNorm,
            self_attention=replace(attention, submodules=inner),
        )
        layers.append(replace(layer, submodules=parts))
    return replace(spec, layer_specs=layers, layer_norm=PlainNorm)


def value_head(config: TransformerConfig, device: torch.device) -> nn.Linear:
    """A head with one output, whole on every rank of the last stage, all of which compute the same with it."""
    return nn.Linear(config.hidden_size, 1, bias=False, dtype=config.params_dtype, device=device)
