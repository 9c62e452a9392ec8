"""Packing of samples into rows of limited length, and what the samples of a row share; for orchestrator and trainer."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Int, Shaped

SAMPLES_PER_SLICE = 32
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

        It is a generator that yields after each SAMPLES_PER_SLICE documents, so that other tasks can run.
        """
        root, ends_in = _Node(0, 0, 0, None), list[_Node | None]()
        for document in range(len(documents)):
            ends_in.append(_insert(root, documents, document))
            if (document + 1) % SAMPLES_PER_SLICE == 0:
                yield
        ends_in = [_last_of(node, len(streams[0])) for node, streams in zip(ends_in, documents)]
        nodes = _without_short_ones(root)
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

    def path(self, document: int) -> list[int]:
        """The nodes of a document, the first one first."""
        nodes, node = [], int(self.lasts[document])
        while node >= 0:
            nodes.append(node)
            node = int(self.parents[node])
        return nodes[::-1]


@dataclass(eq=False)
class _Node:
    """A run of tokens while the tree grows; children by their first token in all streams."""

    document: int
    start: int
    end: int
    parent: _Node | None
    children: dict[tuple[bytes, ...], _Node] = field(default_factory=dict)
    replacement: _Node | None = None
    """The child in which this node's tokens are, once it is dissolved."""


def _insert(root: _Node, documents: Sequence[Sequence[np.ndarray]], document: int) -> _Node | None:
    """Add a document; the node in which it ends."""
    streams = documents[document]
    length, node, at = len(streams[0]), root, 0
    while at < length:
        key = tuple(stream[at].tobytes() for stream in streams)
        child = node.children.get(key)
        if child is None:
            child = node.children[key] = _Node(document, at, length, node)
            return child
        at += _num_equal(streams, documents[child.document], at, min(length, child.end))
        if at == child.end:
            node = child
        elif at == length:
            return child
        else:
            node = _split(child, documents[child.document], key, at)
    return node if length else None


def _last_of(node: _Node | None, length: int) -> _Node | None:
    """The node in which a document of this length ends, if the one where it ended has been split since."""
    while node is not None and node.start >= length:
        node = node.parent
    return node


def _replacement_of(node: _Node) -> _Node:
    while node.replacement is not None:
        node = node.replacement
    return node


def _num_equal(streams: Sequence[np.ndarray], others: Sequence[np.ndarray], start: int, end: int) -> int:
    """How many tokens from `start` on are equal in all streams, at most up to `end`."""
    for stream, other in zip(streams, others):
        is_other = (stream[start:end] != other[start:end]).reshape(end - start, -1).any(1)
        first = int(is_other.argmax())
        if is_other[first]:
            end = start + first
    return end - start


def _split(node: _Node, streams: Sequence[np.ndarray], key: tuple[bytes, ...], at: int) -> _Node:
    """Cut a node in two at this token; the new upper one."""
    assert node.parent is not None
    upper = _Node(node.document, node.start, at, node.parent)
    node.parent.children[key] = upper
    upper.children[tuple(stream[at].tobytes() for stream in streams)] = node
    node.start, node.parent = at, upper
    return upper


def _without_short_ones(root: _Node) -> list[_Node]:
    """All nodes, parents first; inner nodes that save few tokens are dissolved into their children."""
    found: list[_Node] = []
    waiting = list(root.children.values())[::-1]
    while waiting:
        node = waiting.pop()
        children = list(node.children.values())
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

    tree: of these samples. Its branches are cut into parts of at most `capacity` tokens, shared ones counted once; a
    sample with more is a part by itself. `first_fit_decreasing` packs the parts; images and max_patches are as there.
    """
    paths = [tree.path(sample) for sample in range(len(lengths))]
    yield
    sizes = tree.ends - tree.starts
    parts: list[list[int]] = []
    tokens: list[int] = []
    shown: list[dict[str, int]] = []
    own = np.zeros(len(lengths), np.int64)
    before: list[int] = []
    for sample in sorted(range(len(lengths)), key=paths.__getitem__):
        path, patches = paths[sample], dict(images[sample]) if images else {}
        shared = next((i for i, (a, b) in enumerate(zip(path, before)) if a != b), min(len(path), len(before)))
        added = int(sizes[path[shared:]].sum())
        is_new = not parts or not shared or tokens[-1] + added > capacity
        if not is_new and max_patches is not None:
            is_new = sum((shown[-1] | patches).values()) > max_patches
        if is_new:
            parts.append([])
            tokens.append(0)
            shown.append({})
            added = int(sizes[path].sum())
        parts[-1].append(sample)
        tokens[-1] += added
        shown[-1] |= patches
        own[sample], before = min(added, int(lengths[sample])), path
    yield
    rows = yield from first_fit_decreasing(np.array(tokens, np.int64), capacity, shown if images else (), max_patches)
    return [[sample for part in row for sample in parts[part]] for row in rows], own


def pack_tree(tree: PrefixTree, lengths: Int[np.ndarray, " samples"], capacity: int) -> list[list[int]]:
    """Pack samples as `pack_by_prefix` does, at once; the rows."""
    return _at_once(pack_by_prefix(tree, lengths, capacity))[0]
