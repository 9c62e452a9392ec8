"""Sequence parallelism: outside the layers that tp cuts, each rank of tp has some of a pass's tokens.

Embedding, norms, residuals, routers, experts and the output head compute a rank's own tokens, so that what they keep
for the backward pass is divided by tp. Attention and dense MLPs compute all tokens with the rank's features: tokens are
gathered before them, and their partial sums are scattered after them, which takes the time of the sum that tp needs
anyway. A rank keeps its own of the gathered tokens, and gathers them again in the backward pass.

`split_tokens` changes the modules: the policy is called with all tokens of a pass, and returns the hidden states of the
rows that lie among this rank's tokens (`own_rows`).

Source: Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198, section 4.2.2. Differs: parts
of a row may differ by one token, so that rows need no padding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from stretto.models.decoder import Decoder
from stretto.models.moe import MoE
from stretto.models.parts.vision import ImageBatch
from stretto.trainer.ranks.mesh import Mesh

if TYPE_CHECKING:
    from jaxtyping import Float, Int

# Their names before torch 2.13 are deprecated.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def own_tokens(num_tokens: int, degree: int) -> list[int]:
    """How many of a pass's tokens each rank of tp has; they are neighbours, in the order of ranks."""
    return [num_tokens // degree + (rank < num_tokens % degree) for rank in range(degree)]


def own_rows(rows: Int[Tensor, " rows"], num_tokens: int, degree: int) -> list[int]:
    """How many of these rows, which are sorted, lie among the tokens of each rank of tp."""
    ends = torch.tensor(list(accumulate(own_tokens(num_tokens, degree))), device=rows.device)
    return [end - start for start, end in pairwise((0, *torch.searchsorted(rows, ends).tolist()))]


@dataclass
class _Pass:
    """How the pass that was begun last is split; its backward pass ends before the next one begins."""

    tokens: list[int]
    all_rows: Tensor | None
    rows: list[int]


class _Split:
    """The tokens of a policy's passes, split over tp."""

    def __init__(self, mesh: Mesh) -> None:
        self.rank, self.degree, self.group = mesh.tp_rank, mesh.degrees.tp, mesh.tp_group
        self.current = _Pass([], None, [])

    def begin(self, policy: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """A forward pre-hook of the policy: it computes this rank's tokens."""
        token_ids, positions, attend, rows, *rest = args
        tokens, start = self._own(own_tokens(len(token_ids), self.degree))
        counts: list[int] = []
        own = None
        if rows is not None:
            counts, begin = self._own(own_rows(rows, len(token_ids), self.degree))
            own = rows.narrow(0, begin, counts[self.rank]) - start
        self.current = _Pass(tokens, rows, counts)
        cut = lambda images: self._own_images(images, start, tokens[self.rank])
        if len(rest) > 2:
            rest[2] = cut(rest[2])
        named = named | ({"images": cut(named["images"])} if "images" in named else {})
        return (token_ids.narrow(0, start, tokens[self.rank]), positions, attend, own, *rest), named

    def _own(self, counts: list[int]) -> tuple[list[int], int]:
        return counts, sum(counts[: self.rank])

    @staticmethod
    def _own_images(images: ImageBatch | None, start: int, count: int) -> ImageBatch | None:
        """Every rank encodes all images, and places the vectors that stand among its tokens."""
        if images is None:
            return None
        is_here = (images.rows >= start) & (images.rows < start + count)
        features = images.features
        if features is None:
            features = torch.arange(len(images.rows), device=images.rows.device)
        return replace(images, rows=images.rows[is_here] - start, features=features[is_here])

    def indices(self, *, is_cut: bool, device: torch.device) -> Int[Tensor, " own"]:
        """Which tokens of the pass this rank has: all of them, or in a block that is cut to the rows, its rows."""
        now = self.current
        counts, start = self._own(now.rows if is_cut else now.tokens)
        if is_cut:
            assert now.all_rows is not None
            return now.all_rows.narrow(0, start, counts[self.rank])
        return torch.arange(start, start + counts[self.rank], device=device)


def split_tokens(policy: Decoder, mesh: Mesh, cut: Collection[str], recomputed: Collection[int]) -> None:
    """Split the tokens of a policy's passes over tp.

    cut: names of the modules whose layers tp cuts. recomputed: blocks that keep only their input anyway.
    """
    split = _Split(mesh)
    policy.register_forward_pre_hook(split.begin, with_kwargs=True)
    for index, block in enumerate(policy.model.blocks):
        name, part = f"model.layers.{index}", _BlockPart(split, keeps_own=index not in recomputed)
        mixer = block.mixer
        assert mixer is not None and f"{name}.self_attn" in cut, f"tp does not cut the attention of block {index}"
        mixer.forward = part.mixer(mixer.forward)  # type: ignore[method-assign]  # of this block alone
        mixture = block.mlp
        if isinstance(mixture, MoE):
            mixture.register_forward_pre_hook(part.place_tokens)
        for path, module in block.named_modules(prefix=name):
            if path in cut and module is not mixer:
                module.forward = part.whole(module.forward)  # type: ignore[method-assign]  # of this block alone


class _BlockPart:
    """Gathers tokens before the parts of a block that need all, and scatters their results."""

    def __init__(self, split: _Split, *, keeps_own: bool) -> None:
        self._split, self._keeps_own = split, keeps_own
        self._is_cut = False

    def mixer(self, inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The forward pass of a mixer over all tokens; its rows are those of the pass."""

        def forward(x: Tensor, angles: Any, layer: int, attend: Any, rows: Tensor | None, *rest: Any) -> Tensor:
            self._is_cut = rows is not None
            now = self._split.current
            mix = lambda whole: inner(whole, angles, layer, attend, now.all_rows if self._is_cut else None, *rest)
            return self._apply(mix, x, now.tokens)

        return forward

    def whole(self, inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The forward pass of an MLP over all tokens, or all rows in a block that is cut to them."""

        def forward(x: Tensor) -> Tensor:
            now = self._split.current
            return self._apply(inner, x, now.rows if self._is_cut else now.tokens)

        return forward

    def place_tokens(self, mixture: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """A forward pre-hook of a mixture: which tokens of the pass it has, for the choices that are replayed."""
        x, layer, routing, _ = args
        return x, layer, routing, self._split.indices(is_cut=self._is_cut, device=x.device)

    def _apply(self, compute: Callable[[Tensor], Tensor], x: Tensor, sizes: list[int]) -> Tensor:
        split = self._split
        assert len(x) == sizes[split.rank], "the tokens of another pass"
        keeps_own = self._keeps_own and torch.is_grad_enabled()
        # The graph holds it: in a block that is computed again that would be one input more.
        kept = _Kept(x.detach() if keeps_own else None, sizes, split.group)
        whole = _Gather.apply(x, kept)
        if keeps_own:
            # Only the address: what is packed holds its hook, which would hold all tokens.
            address = whole.untyped_storage().data_ptr()
            with saved_tensors_hooks(lambda saved: kept.pack(saved, address), _unpack):
                out = compute(whole)
        else:
            out = compute(whole)
        return _Scatter.apply(out, split.current.rows if self._is_cut else sizes, split.rank, split.group)


class _Kept:
    """This rank's tokens, which the backward pass gathers again."""

    def __init__(self, own: Tensor | None, sizes: list[int], group: Any) -> None:
        self.own, self.sizes, self.group = own, sizes, group
        self.whole: Tensor | None = None
        """Gathered again, until the last of its layers has its gradient."""

    def pack(self, saved: Tensor, address: int) -> Any:
        """Save where a tensor lies in the gathered tokens, which begin at this address, instead of them."""
        is_in_it = saved.untyped_storage().data_ptr() == address and saved.numel() > 0
        return (self, saved.shape, saved.stride(), saved.storage_offset()) if is_in_it else saved


def _unpack(saved: Any) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    kept, *place = saved
    if kept.whole is None:
        assert kept.own is not None
        kept.whole = gather(kept.own, kept.sizes, kept.group)
    return kept.whole.as_strided(*place)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: _Kept) -> Tensor:
        ctx.kept = kept
        return gather(x, kept.sizes, kept.group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        kept = ctx.kept
        kept.whole = None
        return scatter_sum(grad, kept.sizes, dist.get_rank(kept.group), kept.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], rank: int, group: Any) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return scatter_sum(x, sizes, rank, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return gather(grad, ctx.sizes, ctx.group), None, None, None


def gather(x: Float[Tensor, "own dim"], sizes: list[int], group: Any) -> Float[Tensor, "all dim"]:
    """The rows of all ranks one after another; rank r has sizes[r]."""
    most = max(sizes)
    padded = x if len(x) == most else torch.cat((x, x.new_zeros(most - len(x), *x.shape[1:])))
    out = x.new_empty(most * len(sizes), *x.shape[1:])
    _all_gather(out, padded.contiguous(), group=group)
    if min(sizes) == most:
        return out
    return torch.cat([part[:size] for part, size in zip(out.split(most), sizes)]) if most else out


def scatter_sum(x: Float[Tensor, "all dim"], sizes: list[int], rank: int, group: Any) -> Float[Tensor, "own dim"]:
    """Sum x over ranks; of the sum each rank gets its rows."""
    most = max(sizes)
    if min(sizes) != most:
        padded = x.new_zeros(len(sizes), most, *x.shape[1:])
        for target, part in zip(padded, x.split(sizes)):
            target[: len(part)] = part
        x = padded.flatten(0, 1)
    out = x.new_empty(most, *x.shape[1:])
    _reduce_scatter(out, x.contiguous(), group=group)
    return out[: sizes[rank]]
