"""What is computed per trained token is written per step, once, within a number of bytes."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from tiny import build_learner, documents, pack

from stretto.base.errors import DataError
from stretto.records.trained_tokens import encode_trained, find_trained, trained_sample
from stretto.trainer.batch.token_record import TokenRecorder, beyond


def record(folder, batches, **settings):
    """The log-probabilities and entropies of the batches before the steps that train on them."""
    learner, recorder, known = build_learner(), TokenRecorder(folder, **settings), []
    learner.observers.append(recorder.add)
    for step, micro_batches in enumerate(batches, start=1):
        known.append([learner.logprobs(mb) for mb in micro_batches])
        learner.forward_backward(micro_batches)
        learner.optim_step()
        recorder.write(step)
    recorder.close()
    return known


def test_every_trained_token_has_its_ratio_and_entropy(tmp_path):
    second = tuple(f"g{each}.1/0" for each in range(20))
    batches = [[pack(documents(step)), pack(documents(step + 10))] for step in (1, 2)]
    batches = [[one, replace(two, sample_ids=second[: len(two.sample_ids)])] for one, two in batches]
    known = record(tmp_path, batches)
    for step, (micro_batches, computed) in enumerate(zip(batches, known), start=1):
        found = {sample.sample_id: sample for sample in find_trained(tmp_path, step)}
        assert len(found) > 20
        for mb, (logprobs, entropy) in zip(micro_batches, computed):
            for name, start, end in zip(mb.sample_ids, mb.cu_seqlens, mb.cu_seqlens[1:]):
                here = slice(start, end)
                if not mb.loss_mask[here].any():
                    assert name not in found
                    continue
                streams = found[name].streams(end - start)
                ratio = np.where(mb.loss_mask[here], np.exp(logprobs[here] - mb.logprobs[here]), np.nan)
                np.testing.assert_allclose(streams["ratio"], ratio, rtol=3e-3)
                np.testing.assert_allclose(
                    streams["entropy"], np.where(mb.loss_mask[here], entropy[here], np.nan), rtol=1e-3
                )
                assert "advantage" not in streams or mb.advantages[here][mb.loss_mask[here]].std() > 0


def test_a_token_costs_four_bytes_and_more_only_if_its_advantage_is_its_own():
    tokens, values, same = np.arange(5, 1005), np.linspace(0, 1, 1000), np.full(1000, 0.5)
    assert len(encode_trained([trained_sample("g1.0/0", tokens, values, values, same)])) < 4 * 1000 + 30
    own = trained_sample("g1.0/0", tokens, values, values, values)
    assert np.nanmax(np.abs(own.streams(1005)["advantage"][5:] - values)) < 1e-3


def test_stretches_of_tokens_are_where_they_were():
    tokens = np.array([3, 4, 7, 9, 10])
    sample = trained_sample("g1.0/0", tokens, np.zeros(5), np.arange(5.0), np.zeros(5))
    assert sample.spans == ((3, 5), (7, 8), (9, 11))
    entropy = sample.streams(12)["entropy"]
    assert entropy[tokens].tolist() == [0, 1, 2, 3, 4] and np.isnan(np.delete(entropy, tokens)).all()
    assert sample.streams(8)["entropy"][7] == 2, "a rollout that lost its end"


def test_of_old_steps_every_tenth_and_hundredth_stay_longest():
    sizes = dict.fromkeys(range(1, 301), 1)
    assert beyond(sizes, 300) == []
    left = sizes.keys() - beyond(sizes, 100)
    assert len(left) == 100 and set(range(251, 301)) < left and {100, 200, *range(10, 251, 10)} < left
    left = sizes.keys() - beyond(sizes, 10)
    assert len(left) == 10 and set(range(296, 301)) < left and {100, 200, 270, 280, 290} < left


def test_without_a_limit_every_step_stays(tmp_path):
    record(tmp_path, [[pack(documents(each))] for each in range(1, 4)], keep_bytes=None)
    assert {path.name for path in tmp_path.iterdir()} == {"step_1.bin", "step_2.bin", "step_3.bin"}


@pytest.mark.heavy
def test_files_stay_within_their_bytes_also_those_of_an_earlier_process(tmp_path):
    for step in (1, 2):
        record(tmp_path, [[pack(documents(each))] for each in range(1, 3 * step)], keep_bytes=1500)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1500 and list(tmp_path.glob("step_5.bin"))


def test_a_folder_that_cannot_be_written_costs_one_warning_and_no_step(tmp_path, caplog):
    (tmp_path / "file").touch()
    record(tmp_path / "file", [[pack(documents(step))] for step in (1, 2)])
    assert [record.levelname for record in caplog.records if "not written down" in record.message] == ["WARNING"]


@pytest.mark.parametrize(
    "content", [b"", b"\x91\x01", encode_trained([])[:0] + b"\x91\x95\xa1a\x91\x92\x00\x02\xc4\x00\xc4\x00\xc4\x00"]
)
def test_a_file_that_is_no_record_is_named(tmp_path, content):
    (tmp_path / "step_1.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"step_1\.bin: it is no record of trained tokens"):
        list(find_trained(tmp_path, 1))
