"""The vision tower: patches of images to vectors in the residual stream of a decoder.

Patches are embedded, get a learned position (interpolated from a square grid to the image's), and pass through blocks
whose attention sees one frame of one image. Then merge_size x merge_size neighbours become one vector (`Merger`).
Some families also merge what earlier blocks computed, for the first layers of the decoder: deepstack, arXiv:2406.04334.
Names of parameters are those of the checkpoints of Qwen3-VL and Qwen3.5. Resizing and cutting images into patches is
not here but in chat/; positions of their tokens are in image_positions.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.families.shape import VisionShape
from stretto.models.parts.initial import build_embedding
from stretto.models.parts.rope import Angles, rotate

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_NORM_EPS = 1e-6


@dataclass(frozen=True)
class ImageBatch:
    """The images of one pass.

    grids: (frames, lines, columns) of each image, in patches. patches: of all images, in the order of transformers'
    `pixel_values`: merge_size x merge_size neighbours follow each other. rows: tokens of the pass that stand for a
    merged patch. features: which one, for each of them (None: all, in order); one image may stand in several places.
    """

    patches: Float[Tensor, "patches values"]
    grids: Int[np.ndarray, "images 3"]
    rows: Int[Tensor, " image_tokens"]
    features: Int[Tensor, " image_tokens"] | None = None

    @classmethod
    def unused(cls, shape: VisionShape, device: torch.device) -> ImageBatch:
        """The smallest image, in no token, with which ranks without images join collectives."""
        grid = np.array([[1, shape.merge_size, shape.merge_size]])
        patches = torch.zeros(shape.merge_size**2, shape.patch_values, device=device)
        nowhere = torch.zeros(0, dtype=torch.long, device=device)
        return cls(patches, grid, nowhere, nowhere)


class ImageVectors(NamedTuple):
    """Vectors of images: those that replace embeddings at `rows`, those that layers add there."""

    rows: Int[Tensor, " image_tokens"]
    embeddings: Float[Tensor, "image_tokens dim"]
    deepstack: tuple[Float[Tensor, "image_tokens dim"], ...]

    def place(self, x: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """Embeddings with those of image tokens replaced."""
        return x.index_copy(0, self.rows, self.embeddings.to(x.dtype))

    def add(self, layer: int, x: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """The residual stream after a layer plus the tower's vectors for it."""
        if layer >= len(self.deepstack):
            return x
        return x.index_add(0, self.rows, self.deepstack[layer].to(x.dtype))


class PatchEmbedding(nn.Module):
    """A linear layer over a patch's values; its weight has the shape of a convolution's."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        size = (shape.temporal_patch_size, shape.patch_size, shape.patch_size)
        self.proj = nn.Conv3d(shape.in_channels, shape.hidden_size, size, stride=size)

    def forward(self, patches: Float[Tensor, "patches values"]) -> Float[Tensor, "patches dim"]:
        weight = self.proj.weight
        return F.linear(patches.to(weight.dtype), weight.flatten(1), self.proj.bias)


class VisionAttention(nn.Module):
    """Attention of all patches of a frame to each other."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.qkv = nn.Linear(shape.hidden_size, 3 * shape.hidden_size)
        self.proj = nn.Linear(shape.hidden_size, shape.hidden_size)

    def forward(self, x: Float[Tensor, "patches dim"], angles: Angles, frames: Frames) -> Float[Tensor, "patches dim"]:
        q, k, v = self.qkv(x).unflatten(1, (3, self.num_heads, -1)).unbind(1)
        # Positions are exact in float32 only; queries and keys go back to the dtype of the pass.
        q, k = (rotate(part.float(), angles).to(v.dtype) for part in (q, k))
        return self.proj(frames.attend(q, k, v).flatten(1))


class VisionMLP(nn.Module):
    """MLP of two layers."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(shape.hidden_size, shape.intermediate_size)
        self.linear_fc2 = nn.Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Float[Tensor, "patches dim"]) -> Float[Tensor, "patches dim"]:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class VisionBlock(nn.Module):
    """Attention within frames, then an MLP, each on the normalised residual stream."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.hidden_size, eps=_NORM_EPS)
        self.norm2 = nn.LayerNorm(shape.hidden_size, eps=_NORM_EPS)
        self.attn = VisionAttention(shape)
        self.mlp = VisionMLP(shape)

    def forward(self, x: Float[Tensor, "patches dim"], angles: Angles, frames: Frames) -> Float[Tensor, "patches dim"]:
        x = x + self.attn(self.norm1(x), angles, frames)
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    """merge_size x merge_size patches to one vector; norms_merged: the norm is over all of them."""

    def __init__(self, shape: VisionShape, *, norms_merged: bool) -> None:
        super().__init__()
        self.merged_size, self.norms_merged = shape.hidden_size * shape.merge_size**2, norms_merged
        self.norm = nn.LayerNorm(self.merged_size if norms_merged else shape.hidden_size, eps=_NORM_EPS)
        self.linear_fc1 = nn.Linear(self.merged_size, self.merged_size)
        self.linear_fc2 = nn.Linear(self.merged_size, shape.out_size)

    def forward(self, x: Float[Tensor, "patches dim"]) -> Float[Tensor, "features out"]:
        merged = (-1, self.merged_size)
        x = self.norm(x.view(merged)) if self.norms_merged else self.norm(x).view(merged)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class VisionTower(nn.Module):
    """The whole tower; `model.visual` in a checkpoint."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed = PatchEmbedding(shape)
        self.pos_embed = build_embedding(shape.grid_side**2, shape.hidden_size)
        self.blocks = nn.ModuleList(VisionBlock(shape) for _ in range(shape.depth))
        self.merger = Merger(shape, norms_merged=False)
        if shape.deepstack_blocks:
            self.deepstack_merger_list = nn.ModuleList(Merger(shape, norms_merged=True) for _ in shape.deepstack_blocks)

    def forward(self, images: ImageBatch) -> ImageVectors:
        """The vectors of the images' tokens."""
        expected = int(np.asarray(images.grids).prod(axis=1).sum())
        assert len(images.patches) == expected, f"{len(images.patches)} patches, the grids have {expected}"
        frames = Frames(images.grids, self.shape.merge_size)
        x = self.patch_embed(images.patches)
        x = x + frames.positions(self.pos_embed.weight, self.shape.grid_side).to(x.dtype)
        angles = frames.angles(self.shape, x.device)
        deepstack = []
        for number, block in enumerate(self.blocks):
            x = block(x, angles, frames)
            if number in self.shape.deepstack_blocks:
                merger = self.deepstack_merger_list[self.shape.deepstack_blocks.index(number)]
                deepstack.append(merger(x))
        vectors = (self.merger(x), *deepstack)
        if images.features is not None:
            vectors = tuple(part.index_select(0, images.features) for part in vectors)
        return ImageVectors(images.rows, vectors[0], vectors[1:])


class Frames:
    """The frame and place of each patch; a frame is an image or a time step of a film."""

    def __init__(self, grids: Int[np.ndarray, "images 3"], merge_size: int) -> None:
        self.sides = [(lines, columns) for num, lines, columns in np.asarray(grids).tolist() for _ in range(num)]
        places = {sides: _merge_order(*sides, merge_size) for sides in set(self.sides)}
        self.places = np.concatenate([places[sides] for sides in self.sides], axis=1)
        """Line and column of every patch, [2, patches]."""

    def positions(self, table: Float[Tensor, "cells dim"], side: int) -> Float[Tensor, "patches dim"]:
        """The learned positions, interpolated from a square table stretched over the frame."""
        lengths = [lines * columns for lines, columns in self.sides]
        ends = np.repeat(np.array(self.sides).T - 1, lengths, axis=1)
        source = self.places.astype(np.float32) * np.float32(side - 1) / np.maximum(ends, 1).astype(np.float32)
        low = np.floor(source)
        above = source - low
        low = low.astype(np.int64)
        x = None
        for down, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
            cells = np.minimum(low + np.array([[down], [right]]), side - 1)
            shares = (above[0] if down else 1 - above[0]) * (above[1] if right else 1 - above[1])
            index = torch.from_numpy(cells[0] * side + cells[1]).to(table.device)
            share = torch.from_numpy(shares).to(table.device, table.dtype).unsqueeze(1)
            part = F.embedding(index, table) * share
            x = part if x is None else x + part
        assert x is not None
        return x

    def angles(self, shape: VisionShape, device: torch.device) -> Angles:
        """cos and sin, float32: half of the pairs rotate by the line, half by the column."""
        pairs = shape.head_dim // 2
        freqs = 1.0 / (shape.rope_theta ** (torch.arange(0, pairs, 2, dtype=torch.float32) / pairs))
        places = torch.from_numpy(self.places.astype(np.float32))
        turns = torch.cat([place[:, None] * freqs for place in places], dim=1)
        cos, sin = turns.cos(), turns.sin()
        cos, sin = torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)
        return Angles(cos.unsqueeze(1).to(device), sin.unsqueeze(1).to(device))

    def attend(
        self,
        q: Float[Tensor, "patches heads dim"],
        k: Float[Tensor, "patches heads dim"],
        v: Float[Tensor, "patches heads dim"],
    ) -> Float[Tensor, "patches heads dim"]:
        """Attention within each frame; neighbours of equal size share a call."""
        sizes = [lines * columns for lines, columns in self.sides]
        out, start, frame = [], 0, 0
        while frame < len(sizes):
            size, last = sizes[frame], frame
            while last < len(sizes) and sizes[last] == size:
                last += 1
            part = slice(start, start + (last - frame) * size)
            by_head = [x[part].unflatten(0, (-1, size)).transpose(1, 2) for x in (q, k, v)]
            out.append(F.scaled_dot_product_attention(*by_head).transpose(1, 2).flatten(0, 1))
            start, frame = part.stop, last
        return out[0] if len(out) == 1 else torch.cat(out)


def _merge_order(lines: int, columns: int, merge_size: int) -> Int[np.ndarray, "2 patches"]:
    """Line and column of the patches of a frame; those that are merged follow each other."""
    places = np.indices((lines, columns))
    blocks = (2, lines // merge_size, merge_size, columns // merge_size, merge_size)
    return places.reshape(blocks).swapaxes(2, 3).reshape(2, -1)
