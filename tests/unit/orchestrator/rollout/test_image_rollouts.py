"""Images from the task to the micro batch: token-exact over turns, stored once, found again by a resume."""

from __future__ import annotations

import copy
import os
import sqlite3
import threading
from typing import ClassVar

import msgspec
import numpy as np
import orchestrator_runs
import pytest
from fakes import FakeTrainer, run_virtual
from image_envs import PROCESSOR, Looks, SeeingEngine, build
from PIL.Image import Image as Picture

from stretto.chat.patches import ImageProcessor
from stretto.config.root import OrchestratorConfig
from stretto.config.sections.deployment import ResumeSection
from stretto.config.sections.orchestrator import SamplingSection
from stretto.envs.bundled.count_shapes import CountShapes
from stretto.ledger.audit import audit
from stretto.ledger.reader import LedgerReader
from stretto.orchestrator.batch import samples_of, to_micro_batch
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto.records.images import Image, image_hash, placeholder_spans
from stretto.records.rollout import RolloutStatus

STEPS = 3


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return build(tmp_path_factory.mktemp("letters"))


def play(env, engine, renderer, members=4):
    player = Player(engine=engine, renderer=renderer, sampling=SamplingSection(), seq_len=400, seed=1)
    return run_virtual(player.play(env, Draw(3, env.tasks("train").task(3), members, version=0)))


def test_a_group_of_one_turn_is_one_request_with_its_image(renderer):
    engine = SeeingEngine(renderer)
    group = play(CountShapes(), engine, renderer)
    assert len({id(each) for each in engine.requests}) == 4 and engine.num_requests == 1
    (image,) = engine.requests[0].images
    for rollout in group.rollouts:
        (branch,) = rollout.branches
        assert branch.images == (image,)
        renderer.check_images(branch.token_ids, branch.images)


def test_every_turn_of_a_branch_has_the_images_so_far(renderer):
    engine = SeeingEngine(renderer)
    group = play(Looks(), engine, renderer, members=2)
    assert sorted(len(request.images) for request in engine.requests) == [1, 1, 2, 2]
    for rollout in group.rollouts:
        (branch,) = rollout.branches  # the second turn extends the first, token for token
        assert len(branch.images) == 2
        counts = [image.num_tokens(2) for image in branch.images]
        spans = placeholder_spans(branch.token_ids, renderer.image_token_id, counts)
        assert spans is not None and not any(branch.is_sampled[a:b].any() for a, b in spans)
        (sample,) = samples_of(rollout, 1.0)
        assert sample.images == branch.images and sample.loss_mask.sum() == 14
        row = to_micro_batch([sample, sample])
        assert row.num_images == (2, 2) and row.images[0].patches is row.images[2].patches


def test_a_reply_with_a_sampled_placeholder_is_sampled_again(renderer):
    engine = SeeingEngine(renderer, placeholder_rate=0.25)
    for env in (CountShapes(), Looks()):
        group = play(env, engine, renderer, members=8)
        done = [rollout for rollout in group.rollouts if rollout.status is RolloutStatus.FINISHED]
        assert len(done) > 3 and engine.num_requests > 1
        for rollout in done:
            renderer.check_images(rollout.branches[0].token_ids, rollout.branches[0].images)
        for rollout in group.rollouts:
            assert rollout in done or "the placeholder of an image" in rollout.error


def config(path):
    base = {
        "env": [{"id": "image_envs:Looks", "name": "looks"}],
        "batch_size": 8, "group_size": 4, "seq_len": 400, "max_steps": STEPS, "max_async_level": 0,
        "filter_zero_advantages": False, "output_dir": path, "run": {"name": "test"},
    }  # fmt: skip
    return OrchestratorConfig.model_validate(base)


def run_once(cfg, renderer, *, resume=None, kill_at=None, stop_at=None):
    if resume is not None:
        cfg = cfg.model_copy(update={"resume": ResumeSection(step=resume)})
    start = resume or 0
    trainer = FakeTrainer(max_steps=STEPS, start=start, checkpoint_every=1)
    engine = SeeingEngine(renderer, delay=lambda request: 1.0)
    engine.version = start
    orchestrator_runs.run_once(cfg, engine, trainer, renderer, stop_at=stop_at, kill_at=kill_at)
    return trainer


def trained(trainer):
    found = []
    for batch in (batch for step in trainer.batches for batch in step):
        for m in batch.micro_batches:
            for image in m.images:
                assert image_hash(image.patches, image.grid) == image.hash
            hashes = [image.hash for image in m.images]
            found.append((m.sample_ids, m.token_ids.tolist(), m.logprobs.tolist(), hashes, m.num_images))
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("end", [{"kill_at": 3.5}, {"kill_at": 2.5}, {"stop_at": 2.5}])
def test_a_resumed_run_trains_the_same_images(tmp_path, renderer, end):
    whole = trained(run_once(config(tmp_path / "whole"), renderer))
    assert all(hashes for *_, hashes, _ in whole)
    cfg = config(tmp_path / "cut")
    first = run_once(cfg, renderer, **end)
    second = run_once(cfg, renderer, resume=first.step)
    assert trained(first) + trained(second) == whole
    assert audit(cfg.run_dir) == []


@pytest.mark.heavy
def test_images_that_a_power_cut_took_are_written_again_with_the_groups_that_show_them(tmp_path, renderer):
    cfg = config(tmp_path)
    run_once(cfg, renderer)
    with sqlite3.connect(cfg.run_dir.ledger) as db:
        query = "SELECT coalesce(max(offset + length), 0) FROM live_rollouts WHERE step <= ?"
        ((end,),) = db.execute(query, (1,)).fetchall()
        ((num_cut,),) = db.execute("SELECT count(*) FROM images WHERE offset >= ?", (end,)).fetchall()
    db.close()
    assert num_cut and end
    os.truncate(cfg.run_dir.segment(0), end)
    second = run_once(cfg, renderer, resume=1)
    assert second.step == STEPS and all(hashes for *_, hashes, _ in trained(second))
    assert audit(cfg.run_dir) == []


@pytest.mark.heavy
def test_pixels_are_in_the_ledger_once_and_come_back_with_the_group(tmp_path, renderer):
    cfg = config(tmp_path)
    run_once(cfg, renderer)
    with sqlite3.connect(cfg.run_dir.ledger) as db:
        stored = dict(db.execute("SELECT hash, length FROM images"))
        num_rollouts = db.execute("SELECT count(*) FROM rollouts WHERE status = 'finished'").fetchone()[0]
        groups = [g for (g,) in db.execute("SELECT DISTINCT group_id FROM rollouts WHERE status = 'finished'")]
    assert len(stored) == 2 * len(groups) and num_rollouts == 4 * len(groups)
    with LedgerReader(cfg.run_dir) as reader:
        group = reader.group(groups[0])
    images = {image.hash: image for rollout in group.rollouts for b in rollout.branches for image in b.images}
    assert len(images) == 2 and images.keys() <= stored.keys()
    for rollout in group.rollouts:
        for image in rollout.branches[0].images:
            assert image.patches is images[image.hash].patches


def test_the_audit_finds_a_damaged_and_a_missing_image(tmp_path, renderer):
    cfg = config(tmp_path)
    run_once(cfg, renderer)
    with sqlite3.connect(cfg.run_dir.ledger) as db:
        (at, length), *_ = db.execute("SELECT offset, length FROM images ORDER BY offset").fetchall()
    segment = cfg.run_dir.segment(0)
    data = bytearray(segment.read_bytes())
    data[at + length // 2] ^= 1
    segment.write_bytes(data)
    (found,) = audit(cfg.run_dir)
    assert "the image" in found and "damaged or cut off" in found
    with sqlite3.connect(cfg.run_dir.ledger) as db:
        db.execute("DELETE FROM images")
    found = audit(cfg.run_dir)
    assert len(found) == 2 * 4 * 2 * STEPS and all("shows image" in line for line in found)


def test_another_picture_with_the_same_tokens_is_not_answered_from_a_saved_turn(renderer):
    from collections import deque

    from stretto.orchestrator.rollout.continuation import match_saved_turn
    from stretto.records.generate import GenerateRequest, SamplingParams
    from stretto.records.partial import Turn

    engine, shapes = SeeingEngine(renderer), CountShapes()
    requests = []
    for index in range(2):
        messages = shapes.prompt(shapes.tasks("train").task(index))
        requests.append(
            GenerateRequest(
                request_id="r",
                prompt_ids=renderer.render_prompt(messages),
                images=renderer.images_of(messages),
                image_token_id=renderer.image_token_id,
                sampling=SamplingParams(seed=1),
            )
        )
    np.testing.assert_array_equal(requests[0].prompt_ids, requests[1].prompt_ids)
    saved = Turn(
        agent="policy", index=0, attempt=0, seed=1, temperature=1.0, num_shared=0,
        prompt_ids=requests[0].prompt_ids, completion=engine._sample(requests[0], 0, 0, 1.0),
        images=tuple(image.without_patches() for image in requests[0].images),
    )  # fmt: skip
    none = np.empty(0, np.int32)
    assert match_saved_turn(deque([saved]), requests[0], 1.0, none, (), "g0.0") is saved
    assert match_saved_turn(deque([saved]), requests[1], 1.0, none, (), "g0.0") is None
    nameless = msgspec.structs.replace(saved, images=())
    assert match_saved_turn(deque([nameless]), requests[0], 1.0, none, (), "g0.0") is None


def test_the_processor_keeps_one_array_per_picture():
    shapes = CountShapes()
    messages = shapes.prompt(shapes.tasks("train").task(0))
    part = messages[0]["content"][0]
    assert PROCESSOR.image(part, "a").patches is PROCESSOR.image(dict(part), "b").patches


class Noting(ImageProcessor):
    """Notes which threads read pictures."""

    threads: ClassVar[list[int]] = []

    def process(self, picture: Picture, where: str = "the image") -> Image:
        self.threads.append(threading.get_ident())
        return super().process(picture, where)


@pytest.mark.parametrize("env", [CountShapes(), Looks()], ids=["one turn", "two turns"])
def test_pictures_are_read_in_another_thread_and_once(renderer, env):
    noting = Noting(patch_size=PROCESSOR.patch_size, min_pixels=PROCESSOR.min_pixels, max_pixels=PROCESSOR.max_pixels)
    Noting.threads.clear()
    seeing = copy.copy(renderer)
    seeing.images = noting
    group = play(env, SeeingEngine(seeing), seeing, members=2)
    assert all(rollout.status is RolloutStatus.FINISHED for rollout in group.rollouts)
    pictures = {image.hash for rollout in group.rollouts for image in rollout.branches[0].images}
    assert threading.get_ident() not in Noting.threads
    assert len(pictures) <= len(Noting.threads) <= 2 * len(pictures), "members may read one at the same time"


def test_images_of_examples_are_logged(tmp_path, renderer):
    from stretto.monitors.base import Monitors
    from stretto.monitors.file import MetricsFile
    from stretto.orchestrator.eval.results import example_rows

    group = play(Looks(), SeeingEngine(renderer), renderer, members=2)
    rows = example_rows([group], renderer, "sampled", version=3, count=2)
    assert [row["prompt"].count("<|image_pad|>") for row in rows] == [1, 1]
    monitors = Monitors({"file": MetricsFile(tmp_path / "metrics" / "orchestrator.jsonl")})
    monitors.log_table(3, "eval/samples", rows)
    monitors.close()
    names = {f"eval-samples-3-{i}-{j}.png" for i in range(2) for j in range(2)}
    assert {file.name for file in (tmp_path / "metrics" / "images").iterdir()} == names
