"""Packing of samples into rows of limited length, and what the samples of a row share; for orchestrator and trainer."""

from __future__ import annotations

import heapq
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Int, Shaped

SAMPLES_PER_SLICE = 32
SAMPLES_PER_RUN = 256
"""Samples that are sorted at once."""
Result = TypeVar("Result")


def first_fit_decreasing(
    lengths: Int[np.ndarray, " samples"],
    capacity: int,
    images: Sequence[Mapping[str, int]] = (),
    max_patches: int | None = None,
) -> Generator[None, None, list[list[int]]]:
    """Pack samples, longest first, into the first row with room; returns the indices per row.

    images: by sample, the number of patches of each of its images by hash; an image counts once in a row. A row has at
    most max_patches, unless one sample alone has more.

    It is a generator that yields after each sample with images and each SAMPLES_PER_SLICE others, so that other tasks
    can run. Rows are in order of creation.
    """
    rows: list[list[int]] = []
    shown: list[dict[str, int]] = []  # images by row
    free = np.zeros(len(lengths), dtype=np.int64)
    for number, index in enumerate(np.argsort(-lengths, kind="stable").tolist(), 1):
        size = int(lengths[index])
        num_rows = len(rows)
        fits = free[:num_rows] >= size
        if images and max_patches is not None:
            for other in np.flatnonzero(fits).tolist():
                fits[other] = sum((shown[other] | images[index]).values()) <= max_patches
                if fits[other]:
                    break
        row = int(fits.argmax()) if num_rows else 0
        if not num_rows or not fits[row]:
            row = num_rows
            rows.append([])
            shown.append({})
            free[row] = capacity
        rows[row].append(index)
        free[row] -= size
        if images:
            shown[row] |= images[index]
        if images or number % SAMPLES_PER_SLICE == 0:
            yield
    return rows


def pack_rows(lengths: Int[np.ndarray, " samples"], capacity: int) -> list[list[int]]:
    """Pack samples as `first_fit_decreasing` does, at once."""
    return _at_once(first_fit_decreasing(lengths, capacity))


def _at_once(work: Generator[None, None, Result]) -> Result:
    """What a generator returns, without a pause."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: Result = end.value
            return result


# -- what documents begin with --

MIN_SAVED = 16
"""A run that saves fewer tokens than this is computed again for each text that goes on from it: a segment of its own
costs more than they do."""

MIN_SHARE = 16
"""A sample that has less than one in so many of its tokens in common with the one before it is packed by itself: rows
are fuller so, and save nearly as much."""


MOST_REPEATS = 64
"""Tokens of a row's samples, shared ones counted for each, per token of its capacity: a loss has numbers for every
token of every sample, however few are computed."""


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Documents by what they begin with: a node is a run of tokens that all documents below it have in common.

    Node n is tokens starts[n]:ends[n] of document documents[n]; parents[n] is the node before it, -1 for none, and has
    a smaller number. lasts: the node in which each document ends, -1 if it has no token. Each document is the nodes on
    the way to its last one; it may end inside that one.
    """

    documents: Int[np.ndarray, " nodes"]
    starts: Int[np.ndarray, " nodes"]
    ends: Int[np.ndarray, " nodes"]
    parents: Int[np.ndarray, " nodes"]
    lasts: Int[np.ndarray, " documents"]

    @classmethod
    def flat(cls, lengths: Int[np.ndarray, " documents"]) -> PrefixTree:
        """Documents of these lengths that share nothing."""
        documents = np.flatnonzero(lengths)
        lasts = np.full(len(lengths), -1)
        lasts[documents] = np.arange(len(documents))
        return cls(documents, np.zeros_like(documents), lengths[documents], np.full(len(documents), -1), lasts)

    @classmethod
    def of(cls, documents: Sequence[Sequence[Shaped[np.ndarray, "tokens ..."]]]) -> PrefixTree:
        """As `build`, at once."""
        return _at_once(cls.build(documents))

    @classmethod
    def build(
        cls, documents: Sequence[Sequence[Shaped[np.ndarray, "tokens ..."]]]
    ) -> Generator[None, None, PrefixTree]:
        """The tree of documents, each some streams of equal length: tokens are shared if all streams are equal.

        A node stands before all that are below it, and these before the next one beside it. It is a generator that
        yields after each SAMPLES_PER_SLICE documents, so that other tasks can run.
        """
        root = _Node(0, 0, 0, None)
        ends_in: list[_Node | None] = [None] * len(documents)
        path, before = [root], None
        for number, document in enumerate((yield from _by_beginning(documents)), 1):
            streams = documents[document]
            if len(streams[0]):
                common = 0 if before is None else _num_equal(streams, before)
                _add_leaf(path, document, common, len(streams[0]))
                ends_in[document], before = path[-1], streams
            if number % SAMPLES_PER_SLICE == 0:
                yield
        nodes = _without_short_ones(root)
        yield
        numbers = {id(node): number for number, node in enumerate(nodes)}
        lasts = [-1 if node is None else numbers[id(_replacement_of(node))] for node in ends_in]
        column = lambda values: np.fromiter(values, np.int64, count=len(nodes))
        return cls(
            documents=column(node.document for node in nodes),
            starts=column(node.start for node in nodes),
            ends=column(node.end for node in nodes),
            parents=column(numbers.get(id(node.parent), -1) for node in nodes),
            lasts=np.array(lasts, np.int64),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of all nodes: those that are left to compute."""
        return int((self.ends - self.starts).sum())

    @cached_property
    def next_beside(self) -> Int[np.ndarray, " nodes"]:
        """The first node behind each that is not below it, in a tree of `build`."""
        found = np.arange(1, len(self.parents) + 1)
        for node in range(len(found) - 1, -1, -1):
            if self.parents[node] >= 0:
                found[self.parents[node]] = max(found[self.parents[node]], found[node])
        return found

    def shared_tokens(self, node: int, before: int) -> int:
        """The tokens of a tree of `build` that are above or in this node, and above or in one that stands before it."""
        while node >= 0 and not node <= before < self.next_beside[node]:
            node = int(self.parents[node])
        return int(self.ends[node]) if node >= 0 else 0

    def path(self, document: int) -> list[int]:
        """The nodes of a document, the first one first."""
        nodes, node = [], int(self.lasts[document])
        while node >= 0:
            nodes.append(node)
            node = int(self.parents[node])
        return nodes[::-1]


@dataclass(eq=False)
class _Node:
    """A run of tokens while the tree grows."""

    document: int
    start: int
    end: int
    parent: _Node | None
    children: list[_Node] = field(default_factory=list)
    replacement: _Node | None = None
    """The child in which this node's tokens are, once it is dissolved."""


def _by_beginning(documents: Sequence[Sequence[np.ndarray]]) -> Generator[None, None, list[int]]:
    """The documents in an order in which those that begin alike stand together, the shorter ones first."""
    keys: list[bytes] = []
    for streams in documents:
        keys.append(_sort_key(streams))
        if len(keys) % SAMPLES_PER_SLICE == 0:
            yield
    runs = []
    for start in range(0, len(keys), SAMPLES_PER_RUN):
        runs.append(sorted(range(start, min(start + SAMPLES_PER_RUN, len(keys))), key=keys.__getitem__))
        yield
    order: list[int] = []
    for document in heapq.merge(*runs, key=keys.__getitem__):
        order.append(document)
        if len(order) % SAMPLES_PER_SLICE == 0:
            yield
    return order


def _sort_key(streams: Sequence[np.ndarray]) -> bytes:
    """The tokens of a document, one number each; different tokens may by rare chance have equal numbers."""
    key = streams[0]
    for stream in streams[1:]:
        columns = stream.reshape(len(stream), math.prod(stream.shape[1:]))
        factors = np.random.default_rng(0).integers(2**63, size=columns.shape[1], dtype=np.uint64)
        key = key.astype(np.uint64) * _ODD + columns.astype(np.uint64) @ factors
    return key.tobytes()


_ODD = 0x9E3779B97F4A7C15
"""Spreads neighbouring numbers over all 64 bits."""


def _num_equal(streams: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> int:
    """How many tokens two documents have in common from their start, in all streams."""
    end = min(len(streams[0]), len(others[0]))
    for stream, other in zip(streams, others, strict=True):
        is_other = stream[:end] != other[:end]
        if is_other.ndim > 1:
            is_other = is_other.any(tuple(range(1, is_other.ndim)))
        if end and is_other[first := int(is_other.argmax())]:
            end = first
    return end


def _add_leaf(path: list[_Node], document: int, common: int, length: int) -> None:
    """Add a document that has `common` tokens in common with the one before it, whose nodes `path` has: now its own."""
    while len(path) > 1 and path[-1].start >= common:
        path.pop()
    node = path[-1]
    if node.end > common:  # it is cut in two
        assert node.parent is not None
        path[-1] = node.parent.children[-1] = _Node(node.document, node.start, common, node.parent, [node])
        node.start, node.parent = common, path[-1]
    if common < length:
        path[-1].children.append(_Node(document, common, length, path[-1]))
        path.append(path[-1].children[-1])


def _replacement_of(node: _Node) -> _Node:
    while node.replacement is not None:
        node = node.replacement
    return node


def _without_short_ones(root: _Node) -> list[_Node]:
    """All nodes, parents first; inner nodes that save few tokens are dissolved into their children."""
    found: list[_Node] = []
    waiting = root.children[::-1]
    while waiting:
        node = waiting.pop()
        children = node.children
        if children and (node.end - node.start) * (len(children) - 1) < MIN_SAVED:
            for child in children:
                child.start, child.parent = node.start, node.parent
            node.replacement = children[0]
        else:
            found.append(node)
        waiting += children[::-1]
    return found


def pack_by_prefix(
    tree: PrefixTree,
    lengths: Int[np.ndarray, " samples"],
    capacity: int,
    images: Sequence[Mapping[str, int]] = (),
    max_patches: int | None = None,
) -> Generator[None, None, tuple[list[list[int]], Int[np.ndarray, " samples"]]]:
    """Pack samples so that those that begin alike stand in one row; the rows, and the tokens that each sample adds.

    tree: of these samples, as `PrefixTree.build` makes it. Its branches are cut into parts of at most `capacity`
    tokens, shared ones counted once, and MOST_REPEATS times as many, counted for each sample; a sample with more is a
    part by itself. `first_fit_decreasing` packs the parts; images and max_patches are as there.
    """
    parts: list[list[int]] = []
    tokens: list[int] = []
    whole: list[int] = []
    shown: list[dict[str, int]] = []
    own = np.zeros(len(lengths), np.int64)
    last = -1
    for number, sample in enumerate(np.argsort(tree.lasts, kind="stable").tolist(), 1):
        node, patches = int(tree.lasts[sample]), dict(images[sample]) if images else {}
        size, shared = (int(tree.ends[node]), tree.shared_tokens(node, last)) if node >= 0 else (0, 0)
        is_new = not parts or shared * MIN_SHARE < size or tokens[-1] + size - shared > capacity
        is_new = is_new or whole[-1] + int(lengths[sample]) > capacity * MOST_REPEATS
        if not is_new and max_patches is not None:
            is_new = sum((shown[-1] | patches).values()) > max_patches
        if is_new:
            parts.append([])
            tokens.append(0)
            whole.append(0)
            shown.append({})
            shared = 0
        parts[-1].append(sample)
        tokens[-1] += size - shared
        whole[-1] += int(lengths[sample])
        shown[-1] |= patches
        own[sample], last = min(size - shared, int(lengths[sample])), node
        if number % SAMPLES_PER_SLICE == 0:
            yield
    sizes = np.maximum(np.array(tokens, np.int64), -(-np.array(whole, np.int64) // MOST_REPEATS))
    rows = yield from first_fit_decreasing(sizes, capacity, shown if images else (), max_patches)
    return [[sample for part in row for sample in parts[part]] for row in rows], own


def pack_tree(tree: PrefixTree, lengths: Int[np.ndarray, " samples"], capacity: int) -> list[list[int]]:
    """Pack samples as `pack_by_prefix` does, at once; the rows."""
    return _at_once(pack_by_prefix(tree, lengths, capacity))[0]
