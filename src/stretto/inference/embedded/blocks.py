"""Book-keeping of the paged KV cache: the owners of blocks, and blocks that hold a cached prefix.

A block is `block_size` token positions in every layer. It is in exactly one of three states:

    owned         refs > 0: owned by one or more sequences (an equal prefix is shared)
    free          refs = 0, content not needed: allocated first
    free, cached  refs = 0, but its content is registered under a hash and found by `lookup`; evicted, least recently
                  used first, when no other free block is left, or when nobody has used it for KEPT_VERSIONS versions

A hash covers the block's tokens, the images they show, all earlier tokens and the salt, so equal hashes mean equal
content under equal weights. Block 0, the null block, has no owner: padding rows write to it. The tensors are in
kv_cache.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Int32, Int64

NULL_BLOCK = 0
KEPT_VERSIONS = 4
"""A cached block that no sequence has used while so many versions were loaded is evicted: new rollouts have another
salt and never find it. Without that a run whose versions are short fills the whole cache, in which memory is taken
when a block is first used."""


def chain_hashes(
    seed: bytes,
    token_ids: Int32[np.ndarray, " tokens"],
    block_size: int,
    marks: Mapping[int, bytes] | None = None,
    *,
    first_block: int = 0,
) -> list[bytes]:
    """One hash per full block of token_ids (int32), over the seed and all tokens up to its end.

    marks: further content of blocks, by block number; token_ids begin in block first_block.
    """
    marks = marks or {}
    data, step = token_ids.tobytes(), block_size * token_ids.itemsize
    hashes, last = [], seed
    for block, start in enumerate(range(0, len(data) - step + 1, step), first_block):
        content = last + data[start : start + step] + marks.get(block, b"")
        last = blake2b(content, digest_size=16).digest()
        hashes.append(last)
    return hashes


class BlockPool:
    """Reference counts, free lists and the prefix cache; block 0 is never allocated."""

    def __init__(self, num_blocks: int, *, is_caching: bool = True) -> None:
        assert num_blocks > 1, "a pool needs the null block and at least one more"
        self.num_blocks = num_blocks
        self.is_caching = is_caching
        self.refs = np.zeros(num_blocks, np.int32)
        self.refs[NULL_BLOCK] = 1
        self._free = list(range(num_blocks - 1, 0, -1))
        self._free_cached: OrderedDict[int, int] = OrderedDict()  # and how many versions had been loaded by its release
        self._num_versions = 0
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._free_cached)

    def allocate(self, count: int) -> Int64[np.ndarray, " blocks"]:
        """Allocate `count` blocks with one owner each; the caller has checked that so many are free."""
        assert count <= self.num_free, f"{count} blocks requested, {self.num_free} free"
        split = max(len(self._free) - count, 0)
        allocated = self._free[split:]
        del self._free[split:]
        while len(allocated) < count:
            allocated.append(self._evict())
        ids = np.array(allocated, np.int64)
        self.refs[ids] = 1
        return ids

    def share(self, ids: Int64[np.ndarray, " blocks"], owners: int = 1) -> None:
        """Add owners to blocks that are owned or cached; ids are distinct."""
        for block in ids[self.refs[ids] == 0].tolist():
            del self._free_cached[block]
        self.refs[ids] += owners

    def release(self, ids: Int64[np.ndarray, " blocks"]) -> None:
        """Remove one owner from each block; a block may be in ids several times."""
        np.subtract.at(self.refs, ids, 1)
        assert (self.refs[ids] >= 0).all(), "a block was released more often than it was owned"
        # Last positions first: later requests most likely share the beginning of a prompt.
        for block in dict.fromkeys(ids[self.refs[ids] == 0][::-1].tolist()):
            if block in self._hash_of:
                self._free_cached[block] = self._num_versions
            else:
                self._free.append(block)

    def lookup(self, hashes: list[bytes]) -> Int64[np.ndarray, " blocks"]:
        """The blocks of the longest cached prefix of this chain; call `share` to own them."""
        blocks = []
        for key in hashes:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return np.array(blocks, np.int64)

    def register(self, block: int, key: bytes) -> None:
        """Let `lookup` find an owned, full block, unless another block is registered under its hash."""
        if self.is_caching and key not in self._block_of and block not in self._hash_of:
            self._block_of[key] = block
            self._hash_of[block] = key

    def begin_version(self) -> None:
        """Evict what has not been used for KEPT_VERSIONS versions; call it when the weights have changed."""
        self._num_versions += 1
        while self._free_cached:
            if next(iter(self._free_cached.values())) + KEPT_VERSIONS > self._num_versions:
                break
            self._free.append(self._evict())

    def _evict(self) -> int:
        """Forget the content of the cached block that was released first."""
        block, _ = self._free_cached.popitem(last=False)
        del self._block_of[self._hash_of.pop(block)]
        return block

    def clear_prefix_cache(self) -> None:
        """Empty the prefix cache; owned blocks keep their owners."""
        self._free.extend(self._free_cached)
        self._free_cached.clear()
        self._block_of.clear()
        self._hash_of.clear()
