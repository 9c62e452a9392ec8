"""The decoder's forward pass for an engine: no modules, no gradients, few operations.

Weights that multiply the same rows (q, k and v; gate and up) are stacked in one tensor, of which the model's
parameters are views: parameters keep their names, and an update of a parameter takes effect in the next pass. The pass
computes what decoder.py does, which is its slow reference; mixtures of experts use their module (moe.py). In float32 a
norm is four operations, and the matrix product adds the residual; with kernels (device/) a product, and everything
between two products, is one call. In other dtypes every rounding is that of the modules, so that the engine stays as
close to the trainer as possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.models.decoder import Attention, Block, Decoder
from stretto.models.device.kernels import PassKernels, Products
from stretto.models.moe import MoE
from stretto.models.parts.attend import Attend
from stretto.models.parts.mlp import MLP
from stretto.models.parts.norm import RMSNorm
from stretto.models.parts.rope import Angles, rotate
from stretto.models.parts.router import Routing
from stretto.models.parts.vision import ImageVectors

if TYPE_CHECKING:
    from jaxtyping import Float, Int

RowMatrices = Callable[[], Sequence[tuple[Tensor | None, int, Tensor]]]
"""() -> for each adapter of a pass: the rows that have it (None: all; padded at the end), their number, and its addend
to the matrix, [in, out]."""

MatrixAddends = Callable[[str], RowMatrices]
"""(parameter name) -> the addends that the adapters of a pass's rows have for this matrix."""

Adapt = Callable[[str, Tensor, Tensor], None]
"""(parameter name, x [rows, in], out [rows, out]): add the outputs of this parameter's adapters to `out`."""

InPlaceAttend = Callable[[int, Tensor, Tensor | None, Tensor | None], Tensor]
"""(layer, q, k and v side by side [rows, columns], weights of the norms of q and k) -> [rows, heads * head_dim]."""


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """Several linear layers over the same rows, computed as one: x @ weight.T + bias."""

    weight: Float[Tensor, "out in"]
    bias: Float[Tensor, " out"] | None
    columns: tuple[tuple[str, slice], ...]
    """The name of each layer's weight, and the columns of the result that it computes."""
    products: Products | None = None
    """What computes it; None: torch."""

    def __call__(self, x: Float[Tensor, "rows in"], adapt: Adapt | None) -> Float[Tensor, "rows out"]:
        if self.products is not None:
            out = self.products(x, self.weight, self.bias)
        else:
            out = F.linear(x, self.weight, self.bias)
        if adapt is not None:
            self._adapt(adapt, x, out)
        return out

    def add_to(
        self, residual: Float[Tensor, "rows out"], x: Float[Tensor, "rows in"], adapt: Adapt | None
    ) -> Float[Tensor, "rows out"]:
        """residual + x @ weight.T + bias."""
        if self.products is not None and adapt is None:
            return self.products(x, self.weight, self.bias, residual)
        if residual.dtype is not torch.float32 or self.products is not None:
            return residual + self(x, adapt)
        out = torch.addmm(residual, x, self.weight.T)
        if self.bias is not None:
            out += self.bias
        if adapt is not None:
            self._adapt(adapt, x, out)
        return out

    def _adapt(self, adapt: Adapt, x: Tensor, out: Tensor) -> None:
        for name, columns in self.columns:
            adapt(name, x, out[:, columns])


MLPPair = tuple[FusedLinear, FusedLinear]
"""(gate and up, down) of a gated MLP."""


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: FusedLinear
    gate: FusedLinear | None
    """The gate of the attended values."""
    output_proj: FusedLinear
    mlp: MLPPair | None
    """The MLP of a dense block, or the one beside the experts; None: experts only."""
    experts: MoE | None

    def computed_by(self, products: Products) -> _Layer:
        """The same layer with these products."""
        one = lambda linear: replace(linear, products=products)
        gate = None if self.gate is None else one(self.gate)
        pair = None if self.mlp is None else (one(self.mlp[0]), one(self.mlp[1]))
        return _Layer(one(self.qkv), gate, one(self.output_proj), pair, self.experts)


class _Norms:
    """RMSNorms of one width, with their weights as rows of one tensor, which each pass scales."""

    def __init__(
        self, norms: Sequence[RMSNorm], repeats: Sequence[int] = (1,), kernels: PassKernels | None = None
    ) -> None:
        """repeats: in each group of len(repeats) norms, norm i serves repeats[i] heads."""
        self.kernels = kernels
        self.eps, dim = norms[0].eps, len(norms[0].weight)
        self.weights = pack_parameters([norm.weight for norm in norms]).view(-1, dim)
        self.rows = self.weights.unbind()
        self.root = math.sqrt(dim)
        self.floor = torch.tensor(math.sqrt(self.eps * dim), device=self.weights.device)
        heads = [i for i, count in enumerate(repeats) for _ in range(count)]
        self.heads = None if heads == [0] else torch.tensor(heads, device=self.weights.device)
        self.group = len(repeats)

    def scaled(self) -> tuple[Tensor, ...]:
        """The weights for `apply`: one tensor per norm, or [heads, dim] per group."""
        if self.kernels is not None:
            return self.rows
        weights = self.weights
        if self.heads is not None:
            weights = weights.view(-1, self.group, weights.shape[1]).index_select(1, self.heads)
        if weights.dtype is torch.float32:
            weights = weights * self.root
        return weights.unbind()

    def apply(self, x: Float[Tensor, "*rows dim"], weight: Tensor) -> Float[Tensor, "*rows dim"]:
        """x / rms(x) * weight; in float32 the weight from `scaled` includes the factor sqrt(dim)."""
        if self.kernels is not None:
            return self.kernels.rms_norm(x, weight, self.eps)
        if x.dtype is not torch.float32:
            return weight * F.rms_norm(x.float(), weight.shape[-1:], None, self.eps).to(x.dtype)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x / torch.hypot(length, self.floor)).mul_(weight)


class FusedDecoder:
    """`Decoder.forward` over the same parameters, with fused layers."""

    def __init__(self, model: Decoder, kernels: PassKernels | None = None) -> None:
        """kernels: they compute what is between the products, and these too if they support all weights.

        With kernels, `attend` is an `InPlaceAttend`.
        """
        cfg, self.model, self.kernels = model.config, model, kernels
        self.heads, self.kv_heads, self.head_dim = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        blocks = model.model.blocks
        self.layers = [_fuse(block, f"model.layers.{i}") for i, block in enumerate(blocks)]
        self.products = None
        if kernels is not None:
            self.products = kernels.find_products([*(one.weight for one in self.linears), model.output_weight])
        if self.products is not None:
            self.layers = [layer.computed_by(self.products) for layer in self.layers]
        self.attentions = [_attention_of(block) for block in blocks]
        self.scale, self.has_post_norms = cfg.embedding_scale, cfg.has_post_norms
        norms = [norm for b in blocks for norm in (b.input_layernorm, b.post_attention_layernorm)]
        if cfg.has_post_norms:
            norms += [norm for b in blocks for norm in (b.post_self_attn_layernorm, b.post_mlp_layernorm)]
        self.norms = _Norms([*norms, model.model.norm], kernels=kernels)
        self.is_varied = cfg.is_attention_varied
        self.qk_norms = None
        if cfg.has_qk_norm and not self.is_varied:
            pairs = [norm for each in self.attentions for norm in (each.q_norm, each.k_norm)]
            self.qk_norms = _Norms(pairs, (cfg.num_heads, cfg.num_kv_heads), kernels)

    @property
    def linears(self) -> list[FusedLinear]:
        """All fused layers, without the output head and the experts."""
        linears = []
        for layer in self.layers:
            linears += [layer.qkv, layer.output_proj, *(layer.mlp or ()), *([layer.gate] if layer.gate else [])]
        return linears

    def __call__(
        self,
        token_ids: Int[Tensor, " rows"],
        position_ids: Int[Tensor, "*axes rows"],
        attend: Attend | InPlaceAttend,
        routing: Routing,
        adapt: Adapt | None = None,
        images: ImageVectors | None = None,
    ) -> Float[Tensor, "rows dim"]:
        """Hidden states of all rows, after the final norm."""
        x = F.embedding(token_ids, self.model.model.embed_tokens.weight)
        if self.scale != 1.0:
            x = x * self.scale
        if images is not None:
            x = images.place(x)
        weights, normed = self.norms.scaled(), self.norms.apply
        if self.kernels:
            project = self._in_place_attention(attend)
        else:
            build = self._varied_attention if self.is_varied else self._attention
            project = build(attend, self.model.angles(position_ids, x.dtype))
        for i, layer in enumerate(self.layers):
            before = normed(x, weights[2 * i])
            attended = project(i, layer.qkv(before, adapt))
            if layer.gate is not None:
                attended = self.attentions[i].gated(attended, layer.gate(before, adapt))
            if self.has_post_norms:
                after_attention, after_mlp = weights[2 * (len(self.layers) + i) :][:2]
                x = x + normed(layer.output_proj(attended, adapt), after_attention)
                out = self._feed_forward(layer, normed(x, weights[2 * i + 1]), i, routing, adapt)
                x = x + normed(out, after_mlp)
                continue
            x = layer.output_proj.add_to(x, attended, adapt)
            after = normed(x, weights[2 * i + 1])
            if layer.experts is not None:
                x = x + layer.experts.route(after, i, routing, None)
            if layer.mlp is not None:
                gate_up, down = layer.mlp
                x = down.add_to(x, self._gated(gate_up(after, adapt)), adapt)
            if images is not None:
                x = images.add(i, x)
        return normed(x, weights[-1])

    def _attention(self, attend: Attend, angles: Sequence[Angles | None]) -> Callable[[int, Tensor], Tensor]:
        """(layer, q, k and v [rows, columns]) -> attended values [rows, heads * head_dim]."""
        norms = self.qk_norms
        qk_weights = () if norms is None else norms.scaled()
        num_turned = self.heads + self.kv_heads

        def project(layer: int, qkv: Tensor) -> Tensor:
            qkv = qkv.view(len(qkv), num_turned + self.kv_heads, self.head_dim)
            qk, v = qkv[:, :num_turned], qkv[:, num_turned:]
            if norms is not None:
                qk = norms.apply(qk, qk_weights[layer])
            turn = angles[layer]
            assert turn is not None, "a layer without a rotation is varied"
            qk = rotate(qk, turn)
            return attend(layer, qk[:, : self.heads], qk[:, self.heads :], v).flatten(1)

        return project

    def _varied_attention(self, attend: Attend, angles: Sequence[Angles | None]) -> Callable[[int, Tensor], Tensor]:
        """`_attention` by the modules, for layers that differ."""

        def project(layer: int, columns: Tensor) -> Tensor:
            module = self.attentions[layer]
            q, k, v = (columns[:, part] for _, part in self.layers[layer].qkv.columns)
            return module.mix(layer, *module.turn(q, k, v, angles[layer]), attend)

        return project

    def _in_place_attention(self, attend: InPlaceAttend) -> Callable[[int, Tensor], Tensor]:
        if self.qk_norms is None:
            return lambda layer, qkv: attend(layer, qkv, None, None)
        norms = self.qk_norms.rows
        return lambda layer, qkv: attend(layer, qkv, norms[2 * layer], norms[2 * layer + 1])

    def _feed_forward(
        self, layer: _Layer, x: Float[Tensor, "rows dim"], number: int, routing: Routing, adapt: Adapt | None
    ) -> Float[Tensor, "rows dim"]:
        """The results of a block's experts and MLP, without the residual stream."""
        out = None if layer.experts is None else layer.experts.route(x, number, routing, None)
        if layer.mlp is None:
            assert out is not None, "a block has experts or an MLP"
            return out
        gate_up, down = layer.mlp
        dense = down(self._gated(gate_up(x, adapt)), adapt)
        return dense if out is None else out + dense

    def _gated(self, gate_up: Float[Tensor, "rows both"]) -> Float[Tensor, "rows dim"]:
        """silu(gate) * up."""
        if self.kernels is not None:
            return self.kernels.silu_product(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class ModuleDecoder:
    """`Decoder.forward` itself as an engine's pass, for models whose layers cannot be fused."""

    kernels = products = None

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self._adapt: Adapt | None = None
        self.linears: list[FusedLinear] = []
        # A mixer's `matrix` is a layer that is not applied to the rows of a pass, so adapters are added to its matrix.
        self.expansions = {
            f"model.layers.{block.layer}.self_attn.{block.mixer.matrix}.weight": block.mixer
            for block in model.model.blocks
            if hasattr(block.mixer, "matrix")
        }
        for path, module in model.model.named_modules(prefix="model"):
            if isinstance(module, nn.Linear):
                name = f"{path}.weight"
                columns = ((name, slice(0, module.out_features)),)
                self.linears.append(FusedLinear(module.weight, module.bias, columns))
                if name not in self.expansions:
                    module.register_forward_hook(self._hook(name))

    def __call__(
        self,
        token_ids: Int[Tensor, " rows"],
        position_ids: Int[Tensor, "*axes rows"],
        attend: Attend,
        routing: Routing,
        adapt: Adapt | None = None,
        images: ImageVectors | None = None,
        documents: Any = None,
    ) -> Float[Tensor, "rows dim"]:
        """Hidden states of all rows after the final norm; documents: states of recurrent layers."""
        self._adapt = adapt
        try:
            return self.model(token_ids, position_ids, attend, None, routing, documents, images)
        finally:
            self._adapt = None  # hooks of several engines may be on one model

    def use_matrices(self, addends: MatrixAddends) -> None:
        """Give layers that are used as matrices the adapters of a pass."""
        for name, mixer in self.expansions.items():
            mixer.addends = addends(name)

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def add_adapters(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            if self._adapt is not None:
                self._adapt(name, args[0], out)

        return add_adapters


def build_pass(model: Decoder, kernels: PassKernels | None = None) -> FusedDecoder | ModuleDecoder:
    """A model's forward pass for an engine."""
    cfg = model.config
    return ModuleDecoder(model) if cfg.mixers or model.layout is not None else FusedDecoder(model, kernels)


def _attention_of(block: Block) -> Attention:
    """The attention of a block that can be fused."""
    assert isinstance(block.self_attn, Attention), type(block.self_attn)
    return block.self_attn


def _fuse(block: Block, name: str) -> _Layer:
    attention, mlp = _attention_of(block), block.mlp
    qkv = _fuse_linears(attention, f"{name}.self_attn", "q_proj", "k_proj", "v_proj")
    gate = None
    if attention.gate is not None:
        gate = _fuse_linears(attention, f"{name}.self_attn", attention.gate.name)
    output_proj = _fuse_linears(attention, f"{name}.self_attn", "o_proj")
    experts = mlp if isinstance(mlp, MoE) else None
    path = f"{name}.mlp"
    if experts is not None:
        mlp, path = experts.shared_experts, f"{path}.shared_experts"
    pair = None
    if isinstance(mlp, MLP):
        pair = (_fuse_linears(mlp, path, "gate_proj", "up_proj"), _fuse_linears(mlp, path, "down_proj"))
    return _Layer(qkv, gate, output_proj, pair, experts)


def _fuse_linears(parent: nn.Module, path: str, *names: str) -> FusedLinear:
    layers = [layer for name in names if isinstance(layer := parent.get_submodule(name), nn.Linear)]
    assert len(layers) == len(names), f"{path}: linear layers only"
    biases = [layer.bias for layer in layers if layer.bias is not None]
    columns, start = [], 0
    for name, layer in zip(names, layers):
        columns.append((f"{path}.{name}.weight", slice(start, start + len(layer.weight))))
        start += len(layer.weight)
    weight = pack_parameters([layer.weight for layer in layers])
    return FusedLinear(weight, pack_parameters(biases) if biases else None, tuple(columns))


def pack_parameters(parts: Sequence[Float[Tensor, "_ ..."]]) -> Float[Tensor, "rows ..."]:
    """Stack parameters in one tensor, of which they become views.

    Their memory is copied only if they are not stacked already: two engines may share a model.
    """
    first, size, address = parts[0].data, sum(len(part) for part in parts), parts[0].data_ptr()
    end = first.storage_offset() * first.itemsize + sum(part.nbytes for part in parts)
    is_stacked = end <= first.untyped_storage().nbytes()
    for part in parts:
        is_stacked = is_stacked and part.data_ptr() == address and part.is_contiguous()
        address += part.nbytes
    if is_stacked:
        return first.as_strided((size, *first.shape[1:]), first.stride(), first.storage_offset())
    whole = torch.cat([part.data for part in parts])
    for part, rows in zip(parts, whole.split([len(part) for part in parts])):
        part.data = rows
    return whole
