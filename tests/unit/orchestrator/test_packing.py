import json
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.base.errors import DataError
from stretto.orchestrator.batch import Cost, assign_rows, cost_of_model, pack, split_to_multiple
from stretto.records.images import image_of
from stretto.records.row_packing import MIN_SAVED, PrefixTree, pack_rows
from stretto.records.sample import TrainSample

SEQ_LEN = 64


def at_once(work):
    """What a generator returns, without a pause."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def pack_now(samples, **settings):
    return at_once(pack(samples, **settings))


def sample(index, length, **streams):
    rng = np.random.default_rng(index)
    return TrainSample(
        sample_id=f"g{index}.0/0",
        env="echo",
        token_ids=rng.integers(0, 1000, length).astype(np.int32),
        loss_mask=rng.random(length) < 0.5,
        logprobs=rng.random(length).astype(np.float32),
        advantages=rng.random(length).astype(np.float32),
        temperature=0.5 + index % 3,
        **streams,
    )


def documents(batches):
    """Every packed document by its sample id, with the arrays cut out of its row."""
    found = {}
    for batch in batches:
        for micro in batch.micro_batches:
            assert micro.cu_seqlens[-1] == len(micro.token_ids)
            for d, sample_id in enumerate(micro.sample_ids):
                assert sample_id not in found, f"{sample_id} was packed twice"
                found[sample_id] = (micro, slice(micro.cu_seqlens[d], micro.cu_seqlens[d + 1]), d)
    return found


@given(st.lists(st.tuples(st.integers(1, SEQ_LEN), st.sets(st.integers(0, 5))), min_size=1, max_size=30))
@settings(max_examples=60)
def test_rows_have_at_most_so_many_patches_and_images_travel_with_their_samples(drawn):
    # Image n has 4 (n + 1) patches; one that several samples show counts once in a row.
    pictures = [image_of(np.full((4 * n + 4, 2), n, np.float32), (1, 2, 2 * n + 2)) for n in range(6)]
    samples = [
        sample(i, length, images=tuple(pictures[n] for n in sorted(shown))) for i, (length, shown) in enumerate(drawn)
    ]
    batches = pack_now(samples, step=1, seq_len=SEQ_LEN, max_patches=40)
    for name, (micro, span, document) in documents(batches).items():
        drawn_one = samples[int(name[1:].split(".")[0])]
        assert micro.images_of(document) == drawn_one.images
        np.testing.assert_array_equal(micro.token_ids[span], drawn_one.token_ids)
        patches = sum(image.num_patches for image in set(micro.images))
        assert patches <= 40 or micro.num_samples == 1


lengths = st.lists(st.integers(1, SEQ_LEN), min_size=1, max_size=60)


@pytest.mark.heavy
@settings(max_examples=150)
@given(lengths, st.integers(1, 8), st.booleans())
def test_no_token_is_lost_no_sample_is_split_and_ranks_are_even(lengths, world_size, by_flops):
    samples = [sample(i, n) for i, n in enumerate(lengths)]
    cost = Cost(linear=1.0, quadratic=0.1) if by_flops else None
    batches = pack_now(samples, step=3, seq_len=SEQ_LEN, world_size=world_size, cost=cost)

    assert [(b.step, b.rank, b.world_size) for b in batches] == [(3, r, world_size) for r in range(world_size)]
    assert len({len(b.micro_batches) for b in batches}) == 1
    found = documents(batches)
    assert set(found) == {s.sample_id for s in samples}
    for s in samples:
        micro, span, d = found[s.sample_id]
        assert micro.envs[d] == s.env
        for name in ("token_ids", "loss_mask", "logprobs", "advantages"):
            np.testing.assert_array_equal(getattr(micro, name)[span], getattr(s, name))
            assert getattr(micro, name).dtype == getattr(s, name).dtype
        assert (micro.temperatures[span] == np.float32(s.temperature)).all()
    for batch in batches:
        for micro in batch.micro_batches:
            assert len(micro.token_ids) <= SEQ_LEN
            if micro.num_samples == 0:
                assert len(micro.token_ids) == 1 and not micro.loss_mask.any() and micro.num_tokens == 0
    total = sum(m.num_tokens for b in batches for m in b.micro_batches)
    assert total == sum(lengths)


def slow_first_fit(lengths, capacity):
    rows = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for row in rows:
            if sum(lengths[i] for i in row) + lengths[index] <= capacity:
                row.append(index)
                break
        else:
            rows.append([index])
    return rows


@given(lengths)
def test_rows_equal_those_of_textbook_first_fit_decreasing(lengths):
    assert pack_rows(np.array(lengths), SEQ_LEN) == slow_first_fit(lengths, SEQ_LEN)


@given(st.lists(st.floats(1, 100), min_size=1, max_size=64), st.integers(1, 8))
def test_ranks_differ_by_at_most_the_dearest_row(row_costs, world_size):
    ranks = at_once(assign_rows(row_costs, world_size))
    assert sorted(r for rank in ranks for r in rank) == list(range(len(row_costs)))
    counts = [len(rank) for rank in ranks]
    assert max(counts) - min(counts) <= 1
    totals = [sum(row_costs[r] for r in rank) for rank in ranks]
    assert max(totals) - min(totals) <= max(row_costs) + 1e-9


def slow_split(rows, costs, multiple):
    """The dearest row of several samples is looked for among all, every time."""
    rows = [list(row) for row in rows]
    while len(rows) % multiple and any(len(row) > 1 for row in rows):
        dearest = max((r for r, row in enumerate(rows) if len(row) > 1), key=lambda r: costs[rows[r]].sum())
        halves, totals = ([], []), [0.0, 0.0]
        for index in sorted(rows[dearest], key=lambda i: -costs[i]):
            lighter = int(totals[1] < totals[0])
            halves[lighter].append(index)
            totals[lighter] += costs[index]
        rows[dearest] = halves[0]
        rows.append(halves[1])
    return rows


@given(lengths, st.integers(1, 16))
def test_the_dearest_rows_are_halved_until_every_rank_has_as_many(lengths, multiple):
    costs = Cost(linear=1.0, quadratic=0.1).of(np.array(lengths))
    rows = pack_rows(np.array(lengths), SEQ_LEN)
    split, row_costs = at_once(split_to_multiple(rows, costs, multiple))
    assert split == slow_split(rows, costs, multiple)
    assert row_costs == [costs[row].sum() for row in split]


class CountedCosts(np.ndarray):
    """Costs that count how many of them are computed."""

    num_computed = 0

    def __getitem__(self, at):
        CountedCosts.num_computed += np.size(at)
        return super().__getitem__(at)


def test_a_row_is_costed_once_and_again_when_it_was_halved_however_many_ranks_there_are():
    rows = [[3 * r, 3 * r + 1, 3 * r + 2] for r in range(2_050)]
    costs = np.random.default_rng(0).random(3 * len(rows)).view(CountedCosts)
    CountedCosts.num_computed, pauses = 0, 0
    work = split_to_multiple(rows, costs, 1_000)
    with pytest.raises(StopIteration) as end:
        while True:
            next(work)
            pauses += 1
    assert len(end.value.value[0]) == 3_000
    assert CountedCosts.num_computed < 2 * len(costs) + 3 * 3 * 950
    assert pauses >= 2_050 + 950, "others have a turn after every row"


def test_ranks_get_nearly_equal_work():
    rng = random.Random(0)
    samples = [sample(i, min(2048, int(rng.lognormvariate(5, 1)) + 1)) for i in range(512)]
    cost = Cost(linear=1.0, quadratic=1e-3)
    for world_size in (2, 4, 8):
        batches = pack_now(samples, step=1, seq_len=2048, world_size=world_size, cost=cost)
        work = [sum(cost.of(np.diff(m.cu_seqlens)).sum() for m in b.micro_batches if m.num_samples) for b in batches]
        assert max(work) / (sum(work) / world_size) < 1.05


def test_every_sample_knows_the_tokens_of_its_rollout_in_all_rows():
    samples = [msgspec.structs.replace(sample(i, 40), sample_id=f"g{i // 2}.0/{i % 2}") for i in range(6)]
    samples[3] = msgspec.structs.replace(samples[3], rl_weights=np.zeros(40, np.float32))
    found = documents(pack_now(samples, step=1, seq_len=SEQ_LEN, world_size=2))
    counts = [int(each.loss_mask.sum()) for each in samples]
    counts[3] = 0
    for index, each in enumerate(samples):
        micro, _, d = found[each.sample_id]
        first = index // 2 * 2
        assert micro.rollout_tokens[d] == counts[first] + counts[first + 1]


def test_a_stream_of_one_sample_is_made_whole_for_all():
    samples = [sample(0, 5), sample(1, 4, ce_weights=np.full(4, 0.5, dtype=np.float32))]
    (batch,) = pack_now(samples, step=1, seq_len=SEQ_LEN)
    (micro,) = batch.micro_batches
    assert micro.ce_weights.tolist() == [0.0] * 5 + [0.5] * 4
    assert micro.rl_weights is None and micro.ref_logprobs is None


def test_given_tokens_are_learned_at_temperature_one_and_sampled_ones_at_their_own():
    weights = np.array([0.0, 0.5, 0.5, 0.0, 0.0], np.float32)
    mask = np.array([False, False, True, True, False])
    echoed = msgspec.structs.replace(sample(1, 5, ce_weights=weights), loss_mask=mask, temperature=0.5)
    (batch,) = pack_now([echoed, sample(0, 4)], step=1, seq_len=SEQ_LEN)
    assert batch.micro_batches[0].temperatures.tolist() == [0.5, 1.0, 0.5, 0.5, 0.5] + [0.5] * 4
    (batch,) = pack_now([sample(2, 3)], step=1, seq_len=SEQ_LEN)
    assert batch.micro_batches[0].temperatures.tolist() == [2.5] * 3


def test_samples_of_one_step_are_packed_alike_every_time():
    samples = [sample(i, 1 + i * 7 % 40) for i in range(50)]
    first, second = (pack_now(samples, step=1, seq_len=SEQ_LEN, world_size=3) for _ in range(2))
    ids = lambda batches: [[m.sample_ids for m in b.micro_batches] for b in batches]
    assert ids(first) == ids(second)


def test_a_sample_longer_than_a_row_is_refused_by_name():
    with pytest.raises(DataError, match=r"g7\.0/0 has 65 tokens"):
        pack_now([sample(7, SEQ_LEN + 1)], step=1, seq_len=SEQ_LEN)


@settings(max_examples=60)
@given(lengths, st.integers(1, 40))
def test_rows_have_at_most_their_tokens_but_for_one_longer_sample(lengths, row_tokens):
    samples = [sample(i, n) for i, n in enumerate(lengths)]
    batches = pack_now(samples, step=1, seq_len=SEQ_LEN, row_tokens=row_tokens)
    rows = [micro for batch in batches for micro in batch.micro_batches]
    assert all(len(micro.token_ids) <= row_tokens or micro.num_samples == 1 for micro in rows)
    assert set(documents(batches)) == {each.sample_id for each in samples}


def test_cost_follows_the_shape_of_the_model(tmp_path):
    assert cost_of_model(tmp_path) == Cost()
    shape = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 256,
        "vocab_size": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    cost = cost_of_model(tmp_path)
    projections = 2 * (64 * 64 + 64 * 32) + 3 * 64 * 256  # per layer: q o k v, gate up down
    assert cost.linear == 2 * (2 * projections + 64 * 64)
    assert cost.quadratic == 2 * 2 * 64


def group_of(group: int, num: int, prompt: int, reply: int) -> list[TrainSample]:
    """Samples of one prompt with replies of up to `reply` tokens."""
    rng = np.random.default_rng(group)
    start = rng.integers(0, 1000, prompt).astype(np.int32)
    found = []
    for member in range(num):
        one = sample(1000 * group + member, prompt + 1 + int(rng.integers(reply)))
        ids = np.concatenate((start, one.token_ids[prompt:]))
        found.append(msgspec.structs.replace(one, sample_id=f"g{group}.{member}/0", token_ids=ids))
    return found


@pytest.mark.heavy
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=8),
    st.integers(1, 3),
    st.booleans(),
)
@settings(max_examples=40)
def test_samples_that_begin_alike_are_packed_by_what_they_add(groups, world_size, has_images):
    samples = [s for number, shape in enumerate(groups) for s in group_of(number, *shape)]
    if has_images:
        pictures = [image_of(np.full((1, 4), i, np.float32), (1, 1, 1)) for i in range(2)]
        samples = [msgspec.structs.replace(s, images=(pictures[i % 2],)) for i, s in enumerate(samples)]
    batches = pack_now(
        samples, step=1, seq_len=SEQ_LEN, row_tokens=SEQ_LEN, world_size=world_size, shares_prefixes=True, max_patches=1
    )
    found = documents(batches)
    assert found.keys() == {s.sample_id for s in samples}
    for s in samples:
        micro, place, _ = found[s.sample_id]
        assert (micro.token_ids[place] == s.token_ids).all()
    assert len({len(batch.micro_batches) for batch in batches}) == 1
    for batch in batches:
        for micro in batch.micro_batches:
            assert len(micro.images) == 0 or len({image.hash for image in micro.images}) == 1
            tree = PrefixTree.of([[ids] for ids in np.split(micro.token_ids, micro.cu_seqlens[1:-1])])
            # A row with some of the samples of a tree may dissolve runs that save less for them.
            assert tree.num_tokens < SEQ_LEN + MIN_SAVED * micro.num_samples


def test_a_group_is_not_spread_over_rows():
    samples = [s for group in range(4) for s in group_of(group, 8, 40, 3)]
    samples = [samples[i] for i in np.random.default_rng(0).permutation(len(samples))]
    apart = pack_now(samples, step=1, seq_len=SEQ_LEN, row_tokens=128)
    together = pack_now(samples, step=1, seq_len=SEQ_LEN, row_tokens=128, shares_prefixes=True)
    rows = [{each.split(".")[0] for each in micro.sample_ids} for micro in together[0].micro_batches]
    assert sorted(group for row in rows for group in row) == ["g0", "g1", "g2", "g3"]
    assert len(together[0].micro_batches) == 2 < len(apart[0].micro_batches)


def test_rows_of_one_group_are_cut_for_more_ranks_where_they_cost_the_same():
    samples = group_of(0, 8, 40, 3)
    batches = pack_now(samples, step=1, seq_len=SEQ_LEN, row_tokens=256, world_size=2, shares_prefixes=True)
    rows = [batch.micro_batches[0] for batch in batches]
    assert sum(row.num_samples for row in rows) == 8
    trees = [PrefixTree.of([[ids] for ids in np.split(row.token_ids, row.cu_seqlens[1:-1])]) for row in rows]
    assert abs(trees[0].num_tokens - trees[1].num_tokens) <= 3, "both compute the prompt"


def test_a_short_beginning_that_all_samples_have_does_not_leave_rows_half_empty():
    """Such as what a chat template writes first: it saves less than a row that is not full costs."""
    rng = np.random.default_rng(0)
    samples = [sample(number, int(rng.integers(20, SEQ_LEN))) for number in range(300)]
    for each in samples:
        each.token_ids[:1] = 7
    rows = {
        shares: len(pack_now(samples, step=1, seq_len=SEQ_LEN, shares_prefixes=shares)[0].micro_batches)
        for shares in (True, False)
    }
    assert rows[True] <= 1.02 * rows[False]
