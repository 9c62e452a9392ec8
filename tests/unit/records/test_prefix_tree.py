"""The tree of what documents begin with: every document is the nodes on its way, and nothing long is there twice."""

from __future__ import annotations

import numpy as np
import pytest

from stretto.records.row_packing import MIN_SAVED, MOST_REPEATS, PrefixTree, pack_tree


def conversations(seed: int, num: int = 30) -> list[np.ndarray]:
    """Texts that part from an earlier one at any token, some of them prefixes or copies of it, some empty."""
    rng, texts = np.random.default_rng(seed), [np.zeros(0, np.int32)]
    for _ in range(num):
        before = texts[int(rng.integers(len(texts)))]
        cut = int(rng.integers(len(before) + 1)) if rng.random() < 0.8 else len(before)
        more = rng.integers(0, 3, int(rng.integers(0, 60)) * (rng.random() < 0.8))
        texts.append(np.concatenate((before[:cut], more)).astype(np.int32))
    return texts


def text_of(tree: PrefixTree, texts: list[np.ndarray], document: int) -> list[int]:
    """A document read from the nodes of its path."""
    read: list[int] = []
    for node in tree.path(document):
        assert tree.starts[node] == len(read), "a node begins where the one before it ends"
        read += texts[tree.documents[node]][tree.starts[node] : tree.ends[node]].tolist()
    return read[: len(texts[document])]


def num_distinct(texts: list[np.ndarray]) -> int:
    """Tokens of a tree that shares all: distinct beginnings."""
    return len({text[:end].tobytes() for text in texts for end in range(1, len(text) + 1)})


@pytest.mark.parametrize("seed", range(20))
def test_documents_are_read_from_their_paths_and_share_all_but_short_runs(seed):
    texts = conversations(seed)
    tree = PrefixTree.of([[text] for text in texts])
    assert (tree.parents < np.arange(len(tree.parents))).all()
    for document, text in enumerate(texts):
        assert text_of(tree, texts, document) == text.tolist()
        assert (tree.lasts[document] < 0) == (len(text) == 0)
    inner, num_children = np.unique(tree.parents[tree.parents >= 0], return_counts=True)
    saved = (tree.ends - tree.starts)[inner] * (num_children - 1)
    assert saved.min(initial=MIN_SAVED) >= MIN_SAVED
    assert num_distinct(texts) <= tree.num_tokens <= sum(map(len, texts))
    # Each place where texts part costs less than MIN_SAVED tokens, and there are fewer places than texts.
    assert tree.num_tokens <= num_distinct(texts) + MIN_SAVED * len(texts)
    used = {node for document in range(len(texts)) for node in tree.path(document)}
    assert used == set(range(len(tree.parents))), "no node is left over"


def test_tokens_are_shared_only_if_all_streams_are_equal():
    text = np.arange(60, dtype=np.int32)
    routes = np.zeros((60, 2, 3), np.uint8)
    others = routes.copy()
    others[40, 1, 2] = 1
    tree = PrefixTree.of([[text, routes], [text, others], [text, routes]])
    assert tree.num_tokens == 60 + 20 and tree.path(0) == tree.path(2)
    assert sorted((tree.ends - tree.starts).tolist()) == [20, 20, 40]


def test_a_document_that_ends_inside_a_node_needs_none_of_its_own():
    long, short = np.arange(100, dtype=np.int32), np.arange(70, dtype=np.int32)
    for texts in ([long, short], [short, long]):
        tree = PrefixTree.of([[text] for text in texts])
        assert tree.num_tokens == 100
    assert PrefixTree.of([]).num_tokens == 0
    flat = PrefixTree.flat(np.array([3, 0, 2]))
    assert flat.lasts.tolist() == [0, -1, 1] and flat.num_tokens == 5


@pytest.mark.parametrize("seed", range(3))
def test_a_tree_does_not_depend_on_the_order_of_its_documents(seed):
    texts = conversations(seed)
    streams = [[text, np.stack((text, text % 2), 1).astype(np.uint8)] for text in texts]
    order = np.random.default_rng(seed).permutation(len(texts))
    trees = [PrefixTree.of(streams), PrefixTree.of([streams[i] for i in order]), PrefixTree.of([[t] for t in texts])]
    assert len({tree.num_tokens for tree in trees}) == 1
    assert trees[0].lasts[order].tolist() == trees[1].lasts.tolist()


def test_documents_that_part_from_one_another_token_by_token():
    """Each text is compared with one other only, however many runs there are on its way."""
    long = np.arange(6000, dtype=np.int32)
    texts = [np.concatenate((long[:cut], [-1 - cut])).astype(np.int32) for cut in range(20, 6000, 20)]
    tree = PrefixTree.of([[text] for text in texts])
    assert tree.num_tokens == len(long) - 20 + len(texts)
    assert max(len(tree.path(document)) for document in range(len(texts))) == len(texts)
    for before, document in zip(range(0, len(texts), 7), range(3, len(texts), 7)):
        pair = sorted((int(tree.lasts[before]), int(tree.lasts[document])))
        assert tree.shared_tokens(pair[1], pair[0]) == min(len(texts[before]), len(texts[document])) - 1


@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_row_of_many_branches_has_a_bounded_number_of_tokens(num_parts):
    """Each branch adds four tokens to what all have, which is a fifth of a row."""
    capacity, lengths, streams = 100, [], []
    for part in range(num_parts):
        for branch in range(300):
            tokens = np.concatenate((np.full(20, part), np.full(4, 10 + branch))).astype(np.int32)
            streams.append([tokens])
            lengths.append(len(tokens))
    tree = PrefixTree.of(streams)
    rows = pack_tree(tree, np.array(lengths), capacity)
    assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
    assert max(sum(lengths[sample] for sample in row) for row in rows) <= MOST_REPEATS * capacity

    same = [[np.zeros(50, np.int32)] for _ in range(1000)]  # they add nothing to one another
    rows = pack_tree(PrefixTree.of(same), np.full(1000, 50), capacity)
    assert len(rows) == -(-1000 * 50 // (MOST_REPEATS * capacity)) and len(rows) > 1
