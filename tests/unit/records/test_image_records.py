"""Images in records: equal by hash, sent once, and found among the tokens of a sequence or a row."""

from __future__ import annotations

import numpy as np
import pytest

from stretto.orchestrator.batch import to_micro_batch
from stretto.records.codec import decode, decode_blob, encode, encode_blob
from stretto.records.images import Image, image_hash, image_of, placeholder_spans
from stretto.records.sample import MicroBatch, TrainSample
from stretto.trainer.updates import split_samples

PAD = 9


def image(seed: int, grid: tuple[int, int, int] = (1, 4, 4)) -> Image:
    size = grid[0] * grid[1] * grid[2]
    return image_of(np.random.default_rng(seed).random((size, 1536), np.float32), grid)


def sample(name: str, images: tuple[Image, ...], num_text: int = 3) -> TrainSample:
    ids = [1]
    for each in images:
        ids += [2] + [PAD] * each.num_tokens(2) + [3]
    ids += [4] * num_text
    zeros = np.zeros(len(ids), np.float32)
    mask = np.arange(len(ids)) >= len(ids) - num_text
    return TrainSample(
        sample_id=name,
        env="e",
        token_ids=np.array(ids, np.int32),
        loss_mask=mask,
        logprobs=zeros,
        advantages=zeros,
        images=images,
    )


def test_the_hash_depends_on_pixels_and_grid() -> None:
    patches = np.zeros((4, 8), np.float32)
    assert image_hash(patches, (1, 2, 2)) == image_hash(patches.copy(), (1, 2, 2))
    assert image_hash(patches, (1, 2, 2)) != image_hash(patches, (1, 1, 4))
    assert image_hash(patches, (1, 2, 2)) != image_hash(patches + 1, (1, 2, 2))


def test_an_image_equals_its_name() -> None:
    one = image(0)
    assert one == one.without_patches() and one != image(1)
    assert one.without_patches().patches is None and len({one, one.without_patches()}) == 1


def test_pixels_that_many_samples_show_are_sent_once() -> None:
    one, other = image(0), image(1)
    row = to_micro_batch([sample("a", (one,)), sample("b", (other, one)), sample("c", ())])
    frames = encode(row)
    sent = sum(len(frame) for frame in frames)
    assert one.patches.nbytes + other.patches.nbytes < sent < 2.2 * one.patches.nbytes
    for received in (decode(frames, MicroBatch), decode_blob(encode_blob(row), MicroBatch)):
        assert received.images == (one, other, one)
        assert received.images[0].patches is received.images[2].patches
        for had, has in zip(row.images, received.images, strict=True):
            assert image_hash(has.patches, has.grid) == had.hash
            np.testing.assert_array_equal(has.patches, had.patches)


def test_a_row_knows_the_images_of_its_documents_when_it_is_split_again() -> None:
    one, other = image(0), image(1)
    row = to_micro_batch([sample("a", (one,)), sample("b", ()), sample("c", (other, one))])
    assert [row.images_of(d) for d in range(3)] == [(one,), (), (other, one)]
    for part in split_samples([row], 2, np.random.default_rng(0)):
        for mb in part:
            wanted = {"a": (one,), "b": (), "c": (other, one)}
            assert [mb.images_of(d) for d in range(mb.num_samples)] == [wanted[i] for i in mb.sample_ids]
            counts = [each.num_tokens(2) for each in mb.images]
            assert placeholder_spans(mb.token_ids, PAD, counts) is not None


@pytest.mark.parametrize(
    ("ids", "counts", "spans"),
    [
        ([1, PAD, PAD, 2], [2], [(1, 3)]),
        ([PAD, 5, PAD, PAD], [1, 2], [(0, 1), (2, 4)]),
        ([PAD, PAD, PAD], [1, 2], [(0, 1), (1, 3)]),  # with nothing in between
        ([1, 2], [], []),
        ([1, 2], [2], None),  # an image without placeholders
        ([PAD, PAD], [], None),  # placeholders without an image
        ([PAD, PAD, 1], [1], None),
        ([PAD, 1, PAD], [2], None),  # torn apart
        ([PAD, PAD], [2, 1], None),
    ],
)
def test_placeholders_are_those_of_the_images_or_are_refused(ids, counts, spans) -> None:
    assert placeholder_spans(np.array(ids, np.int32), PAD, counts) == spans
