"""A teacher in a process of its own scores each token of a rollout by its own weights."""

from __future__ import annotations

import numpy as np
import torch
from ports import free_port
from test_engine_http import model_dir, scratch, serve

from stretto.config.sections.distill import TeacherSection
from stretto.models.attention import PackedLayout
from stretto.records.generate import VersionSpan
from stretto.records.rollout import Branch, Group, Rollout, RolloutStatus, Task
from stretto_frozen.run import build_teacher_client
from stretto_frozen.teachers import ScoringTeacher

__all__ = ["model_dir"]


async def test_a_teacher_process_scores_rollouts_of_many_lengths(model_dir, tmp_path):
    rng, task = np.random.default_rng(0), Task(env="e", task_id="0", data={})
    rollouts = []
    for member, length in enumerate((2, 17, 64, 200)):
        ids = rng.integers(3, 112, length).astype(np.int32)
        branch = Branch(
            token_ids=ids, is_sampled=np.arange(length) > 0, logprobs=np.zeros(length, np.float32),
            temperature=1.0, versions=(VersionSpan(0, 1, length),),
        )  # fmt: skip
        rollouts.append(
            Rollout(rollout_id=f"g0.{member}", group_id=0, member=member, task=task,
                    status=RolloutStatus.FINISHED, branches=(branch,))
        )  # fmt: skip
    port = free_port()
    with serve(model_dir, port, tmp_path / "log"):
        async with build_teacher_client(TeacherSection(base_url=f"http://127.0.0.1:{port}/v1")) as client:
            await client.wait_ready(60)
            group = await ScoringTeacher({"teacher": (client, 1.0)}).annotate(
                Group(group_id=0, task=task, rollouts=tuple(rollouts))
            )
    model = scratch(0)
    for rollout in group.rollouts:
        [branch] = rollout.branches
        ids = torch.from_numpy(branch.token_ids.astype(np.int64))
        with torch.no_grad():
            hidden = model.hidden(ids, PackedLayout((0, len(ids)), ids.device))
            reference = torch.log_softmax(hidden @ model.output_weight.T, -1)[:-1].gather(1, ids[1:, None])
        assert branch.ref_logprobs[0] == 0
        np.testing.assert_allclose(branch.ref_logprobs[1:], reference[:, 0].numpy(), atol=1e-5, rtol=0)
