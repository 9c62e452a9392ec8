"""Meshes in configs: how many ranks rl starts, and which degrees it refuses, each with the valid values."""

from __future__ import annotations

import pytest
from processes.add_ons import needs

from stretto.base.errors import ConfigError
from stretto.check import degrees as mesh_degrees
from stretto.check.degrees import Shape
from stretto.config.load import build
from stretto.config.root import RLConfig, SFTConfig
from stretto.config.sections.model import ModelSection, ScratchSection
from stretto.families.table import FAMILIES
from stretto.launch.plan.plan import plan
from stretto.models import hub
from stretto.trainer.ranks import mesh

SCRATCH = {"num_heads": 4, "num_kv_heads": 2, "num_experts": 6}


def rl(tmp_path, *, workers: int | None = None, impl: str = "auto", gpus=None, **model):
    orchestrator = {"env": [{"id": "sort-letters"}], "batch_size": 16, "group_size": 4}
    if workers is not None:
        orchestrator["num_train_workers"] = workers
    return build(
        RLConfig,
        {
            "model": {"name": str(tmp_path), "impl": impl},
            "trainer": {"model": model},
            "orchestrator": orchestrator,
            "output_dir": str(tmp_path),
            "seq_len": 256,
            "dry_run": True,
        }
        | ({} if gpus is None else {"deployment": {"num_train_gpus": gpus}}),
    )


def ranks_of(cfg: RLConfig) -> list[dict[str, str]]:
    return [spec.env for spec in plan(cfg, cfg.run_dir).processes if spec.role == "trainer"]


@needs("prime")
@pytest.mark.parametrize(
    ("workers", "model", "num_ranks"),
    [
        (1, {}, 1),
        (2, {}, 2),
        (1, {"tp": 2}, 2),
        (2, {"cp": 2}, 4),
        (2, {"cp": 2, "tp": 2}, 8),
        (2, {"dp_replicate": 2}, 2),
    ],
)
def test_rl_starts_every_rank_of_the_mesh(tmp_path, workers, model, num_ranks):
    cfg = rl(tmp_path, workers=workers, **model)
    found = ranks_of(cfg)
    assert len(found) == num_ranks == cfg.num_train_ranks
    assert plan(cfg, cfg.run_dir).batch.ranks == workers, "batches are packed for data-parallel ranks"
    if num_ranks > 1:
        assert [env["RANK"] for env in found] == [str(i) for i in range(num_ranks)]
        assert {env["WORLD_SIZE"] for env in found} == {str(num_ranks)}


@needs("prime")
def test_ranks_that_share_batches_are_counted_out_of_the_gpus(tmp_path):
    assert rl(tmp_path, gpus=8, cp=2, tp=2).orchestrator.num_train_workers == 2
    assert rl(tmp_path, gpus=2, tp=2).orchestrator.num_train_workers == 1
    with pytest.raises(ConfigError, match=r"3 trainer ranks, 2 \(model.cp x tp\)"):
        rl(tmp_path, gpus=3, tp=2)


REFUSED = {
    "dp_replicate": ({"workers": 4, "dp_replicate": 3}, "dp_replicate = 3 does not divide .* = 4 .*; valid: 1, 2, 4"),
    "hf beside tp": ({"tp": 2, "impl": "hf"}, 'model.tp = 2 with model.impl = "hf": only our own modules have tp'),
    "hf beside cp": ({"cp": 2, "impl": "hf"}, 'model.cp = 2 with model.impl = "hf": only our own modules have cp'),
    "hf beside ep": ({"ep": 2, "impl": "hf"}, "are sharded only, so leave ep out"),
}  # fmt: skip


@needs("prime")
@pytest.mark.parametrize("name", REFUSED)
def test_a_mesh_that_cannot_be_is_refused_with_what_can(tmp_path, name):
    settings, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        rl(tmp_path, **settings)


AT_RUN_TIME = {
    "cp x tp and ranks": (4, {"cp": 3}, "cp = 3 x tp = 1 does not divide the 4 trainer ranks; .*: 1, 2, 4"),
    "dp_replicate": (4, {"tp": 2, "dp_replicate": 4}, "dp_replicate = 4 does not divide the 2 ranks .*; valid: 1, 2"),
    "tp and heads": (4, {"tp": 4}, "tp = 4 does not divide the 2 key and value heads of this model; valid: 1, 2"),
    "ulysses": (3, {"cp": 3, "cp_style": "ulysses"}, 'cp = 3 does not divide the 4 query heads .*; valid: 1, 2, 4'),
    "tp of joint norms": (2, {"tp": 2, "family": "minimax_m2"}, "tp = 2: a minimax_m2 normalises .*; use tp = 1"),
    "ep without experts": (2, {"ep": 2}, "ep = 2, but the policy has no experts; leave ep out"),
    "ep over tp": (4, {"tp": 2, "ep": 3, "sequence_parallel": True, "family": "qwen3_moe"},
        'ep = 3 must divide both dp_shard x cp x tp = 4 ranks and the 6 experts; valid: 1, 2, or "auto"'),
    "ep over tp with whole tokens": (2, {"tp": 2, "ep": 2, "family": "qwen3_moe"},
        'ep = 2 must divide both dp_shard x cp = 1 ranks .*; valid: 1, or "auto"; or set sequence_parallel = true'),
    "ep": (4, {"ep": 3, "family": "qwen3_moe"}, 'ep = 3 must divide both .* and the 6 experts; valid: 1, 2, or "auto"'),
}  # fmt: skip


@pytest.mark.parametrize("name", AT_RUN_TIME)
def test_torchrun_refuses_the_same_when_the_model_is_known(name):
    world_size, model, words = AT_RUN_TIME[name]
    model = dict(model)
    if (family := model.pop("family", "qwen3")) not in FAMILIES:
        pytest.skip("the family is an add-on's, which is not here")
    shape = hub.random_model(ScratchSection(**SCRATCH, family=family, num_layers=1), 40).config
    with pytest.raises(ConfigError, match=words):
        mesh.find_degrees(ModelSection(**model), world_size, shape)


@pytest.mark.parametrize(
    ("model", "ep"), [({"ep": 8}, 8), ({"ep": "auto"}, 8), ({"ep": 2}, 2), ({"ep": "auto", "dp_replicate": 2}, 4)]
)
def test_ranks_of_tp_that_split_tokens_have_different_experts(model, ep):
    shape = Shape(8, 4, 64, num_experts=128, family="qwen3_moe")
    found = mesh.find_degrees(ModelSection(tp=4, sequence_parallel=True, **model), 8, shape)
    assert (found.tp, found.ep, found.world_size, found.splits_tokens) == (4, ep, 8, True)


SPARSE = [
    pytest.param(name, cp, "ring", marks=needs("families")) for name, cp in (("glm_moe_dsa", 2), ("deepseek_v32", 4))
]


@pytest.mark.parametrize(("family", "cp", "style"), [("qwen3", 2, "ulysses"), ("qwen3", 3, "ring"), *SPARSE])
def test_the_style_of_cp_is_chosen_by_heads_and_family(family, cp, style):
    shape = Shape(4, 2, 64, family=family)
    assert mesh_degrees.cp_style(ModelSection(cp=cp), shape) == style
    assert mesh.find_degrees(ModelSection(cp=cp), cp, shape).cp == cp


@pytest.mark.parametrize("key", ["tp", "cp", "ep"])
def test_transformers_modules_are_sharded_and_not_cut(key):
    assert mesh.find_plain_degrees(ModelSection(), 4) == mesh.Degrees(dp_shard=4)
    assert mesh.find_plain_degrees(ModelSection(dp_replicate=2), 4) == mesh.Degrees(dp_replicate=2, dp_shard=2)
    with pytest.raises(ConfigError, match=rf"\[model\] {key} = 2 .*modules of our own"):
        mesh.find_plain_degrees(ModelSection(**{key: 2}), 4)
    with pytest.raises(ConfigError, match=r"dp_replicate = 3 .*4 trainer ranks; valid: 1, 2, 4"):
        mesh.find_plain_degrees(ModelSection(dp_replicate=3), 4)


@needs("prime")
def test_a_step_to_resume_from_can_be_given_with_the_checkpoints(tmp_path):
    settings = {"output_dir": str(tmp_path), "ckpt": {"resume_step": 40, "interval": 20}}
    sft = SFTConfig.model_validate(settings | {"max_steps": 60, "data": {"type": "environment", "id": "sort-letters"}})
    assert sft.resume.step == 40 and sft.ckpt.interval == 20
    run = RLConfig.model_validate(
        settings | {"model": {"name": str(tmp_path)}, "orchestrator": {"env": [{"id": "sort-letters"}]}}
    )
    assert run.resume.step == 40 and run.ckpt.interval == 20


@needs("families")
@pytest.mark.parametrize(
    ("family", "degrees", "words"),
    [
        ("nemotron_h", {"cp": 2}, "cp = 2 cannot cut the state of its recurrent layers .* use .*dp_replicate, ep$"),
        ("qwen3_5_text", {"cp": 4}, "cp = 4 does not divide the 2 heads of the gated delta rule .*valid: 1, 2$"),
        ("qwen3_5_moe_text", {"tp": 2}, "tp = 2 cannot cut its recurrent layers .* use .*dp_replicate, cp, ep$"),
        ("deepseek_v3", {"tp": 2}, "tp = 2 cannot cut its latent attention .* use .*dp_replicate, cp, ep$"),
        ("glm_moe_dsa", {"tp": 2}, "tp = 2 cannot cut its latent attention .* use .*dp_replicate, cp, ep$"),
        (
            "deepseek_v32",
            {"cp": 2, "cp_style": "ulysses"},
            'cp_style = "ulysses" gives .* the same keys for all heads; leave cp_style out',
        ),
    ],
)
def test_an_axis_that_cannot_cut_a_family_is_refused_with_those_that_can(family, degrees, words):
    is_delta = family.startswith("qwen3_5")
    num_experts = 0 if family.endswith("5_text") else 8
    shape = Shape(4, 4, 64, num_experts=num_experts, family=family, num_state_heads=2 * is_delta)
    with pytest.raises(ConfigError, match=words):
        mesh.find_degrees(ModelSection(**degrees), 4, shape)
    assert mesh.find_degrees(ModelSection(ep=1), 4, shape) == mesh.Degrees(dp_shard=4)
