"""trainer.backend = "megatron": its meshes, the keys that it refuses, and the Python of the trainer's ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from processes.add_ons import needs

from stretto import __version__
from stretto.base.errors import ConfigError
from stretto.check.backend import check_trainer_python, trainer_python
from stretto.check.degrees import Degrees, Shape
from stretto.check.models import check_shape
from stretto.config.load import build, load
from stretto.config.root import RLConfig
from stretto.config.sections.model import ModelSection, ScratchSection
from stretto.config.sections.trainer import MegatronSection, TrainerKeys
from stretto.launch.plan.plan import plan
from stretto.models import hub
from stretto_megatron.backend import MADE, Megatron

DENSE = Shape(num_heads=8, num_kv_heads=4, intermediate_size=64, family="qwen3", num_layers=12)
SPARSE = Shape(num_heads=8, num_kv_heads=4, intermediate_size=64, num_experts=6, family="qwen3_moe", num_layers=12)


def degrees(ranks: int, shape: Shape = DENSE, model: dict | None = None, **section) -> Degrees:
    return Megatron(MegatronSection(**section)).degrees(ModelSection(**(model or {})), ranks, shape)


def test_what_tp_cp_and_pp_leave_are_replicas():
    found = degrees(24, model={"tp": 2, "cp": 2}, pp=3)
    assert found == Degrees(dp_shard=2, cp=2, tp=2, pp=3, splits_tokens=True)
    assert found.world_size == 24 and found.dp == 2


def test_experts_are_spread_over_all_ranks_of_a_stage():
    assert degrees(8, SPARSE, {"tp": 2, "ep": 2}, pp=2).ep == 2
    assert degrees(12, SPARSE, {"tp": 2}, pp=2).ep == 6, "auto: as many as there are"
    assert degrees(12, SPARSE, {"tp": 2}, pp=2, etp=2).ep == 3


@pytest.mark.parametrize(
    ("ranks", "shape", "model", "section", "said"),
    [
        (4, DENSE, {"tp": 2}, {"pp": 3}, "tp = 2 x cp = 1 x trainer.megatron.pp = 3 does not divide the 4"),
        (8, DENSE, {"tp": 8}, {}, "tp = 8 does not divide the 4 key and value heads"),
        (5, DENSE, {}, {"pp": 5}, "pp = 5: the 12 layers of this model do not make equal stages; valid"),
        (2, DENSE, {}, {"pp": 2, "first_stage_layers": 12}, "12 of them in stages of their own"),
        (2, DENSE, {}, {"pp": 2, "first_stage_layers": 5, "last_stage_layers": 6}, "do not make equal stages"),
        (2, DENSE, {}, {"pp": 2, "virtual_stages": 4}, "virtual_stages = 4 does not divide the 6 layers of a stage"),
        (2, DENSE, {}, {"virtual_stages": 2}, "are of pipelines, and pp = 1"),
        (2, DENSE, {"ep": 2}, {}, "the policy has no experts"),
        (2, DENSE, {}, {"etp": 2}, "etp = 2, but the policy has no experts"),
        (4, SPARSE, {"ep": 4}, {}, "must divide both tp x cp x dp / etp = 4 ranks and the 6 experts; valid: 1, 2"),
        (3, SPARSE, {}, {"etp": 2}, "etp = 2 does not divide tp x cp x dp = 3 ranks"),
    ],
)
def test_a_degree_that_does_not_fit_is_told_with_those_that_do(ranks, shape, model, section, said):
    with pytest.raises(ConfigError) as caught:
        degrees(ranks, shape, model, **section)
    assert said in str(caught.value)


def test_one_flag_turns_the_table_of_a_file_off_and_says_so(tmp_path, caplog):
    file = tmp_path / "rl.toml"
    file.write_text(f"""
[model]
name = {json.dumps(str(tmp_path))}
[trainer.megatron]
pp = 2
[[orchestrator.env]]
id = "sort-letters"
""")
    with pytest.raises(ConfigError, match=r'trainer.megatron does nothing .*set backend = "megatron"'):
        load(RLConfig, ["@", str(file)])
    cfg = load(RLConfig, ["@", str(file), "--trainer.backend", "fsdp"])
    assert cfg.trainer.backend == "fsdp" and "[trainer.megatron] is not used with trainer.backend" in caplog.text
    assert load(RLConfig, ["@", str(file), "--trainer.backend", "megatron"]).trainer.megatron.pp == 2


def test_uneven_ends_leave_equal_stages():
    section = {"pp": 4, "first_stage_layers": 2, "last_stage_layers": 4}
    assert degrees(4, **section).pp == 4
    assert degrees(4, **section, virtual_stages=1).pp == 4


def rl(tmp_path, trainer: dict, **more) -> RLConfig:
    return build(
        RLConfig,
        {
            "model": {"name": str(tmp_path), **more.pop("model", {})},
            "trainer": {"backend": "megatron"} | trainer,
            "orchestrator": {"env": [{"id": "sort-letters"}], "batch_size": 16, "group_size": 4}
            | more.pop("orchestrator", {}),
            "output_dir": str(tmp_path),
            "seq_len": 256,
            "dry_run": True,
        }
        | more,
    )


def test_a_worker_has_the_ranks_of_all_stages(tmp_path):
    interpreter = tmp_path / "python"
    cfg = rl(tmp_path, {"megatron": {"pp": 2}, "interpreter": str(interpreter)}, model={"tp": 2})
    specs = [spec for spec in plan(cfg, cfg.run_dir).processes if spec.role == "trainer"]
    assert len(specs) == cfg.num_train_ranks == 4
    assert {spec.argv[0] for spec in specs} == {str(interpreter)}
    others = {spec.argv[0] for spec in plan(cfg, cfg.run_dir).processes if spec.role != "trainer"}
    assert others == {sys.executable}
    gpus = rl(tmp_path, {"megatron": {"pp": 2}}, deployment={"num_train_gpus": 8})
    assert gpus.orchestrator.num_train_workers == 4 and gpus.num_train_ranks == 8


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": {"lora": {}}}, "Megatron trains all weights"),
        ({"model": {"compile": {}}}, "only our own modules have it"),
        ({"model": {"optim_cpu_offload": True}}, "only our own modules have it"),
        ({"model": {"ep_comm_backend": "deepep"}}, "moe_token_dispatcher_type"),
        ({"model": {"shared_prefixes": "tree"}}, "computes each document whole"),
        ({"trainer": {"enable_router_replay": True}}, "only our own modules have it"),
        ({"trainer": {"optim": {"type": "muon"}}}, 'its optimizer is AdamW; use type = "adamw"'),
        ({"colocate": {}}, "memory of Megatron is not put away"),
    ],
)
def test_what_megatron_does_not_do_is_refused(tmp_path, given, said):
    given = dict(given)
    with pytest.raises(ConfigError) as caught:
        rl(tmp_path, given.pop("trainer", {}), **given)
    assert said in str(caught.value)


@needs("critic")
def test_the_reference_and_the_critic_must_fit_the_mesh_too(tmp_path):
    shape = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2}
    for name, layers in (("policy", 4), ("other", 3)):
        hub.save_hf(hub.random_model(ScratchSection(family="qwen3", num_layers=layers, **shape), 50), tmp_path / name)
    other, model = str(tmp_path / "other"), {"name": str(tmp_path / "policy")}
    named = {
        "loss.reference_kl.model": {"loss": {"reference_kl": {"coef": 0.1, "model": other}}},
        "advantages.kl_model": {"advantages": {"type": "shaped", "kl_coef": 0.1, "kl_model": other}},
        "critic.load": {"advantages": {"type": "gae"}, "critic": {"load": other}},
    }
    for key, trainer in named.items():
        more = {"model": model, "orchestrator": {"algo": {"type": "ppo"}} if "critic" in trainer else {}}
        check_shape(rl(tmp_path, trainer, **more))
        with pytest.raises(ConfigError, match=f"trainer.{key} = .*/other'.*pp = 2: the 3 layers of this model"):
            check_shape(rl(tmp_path, trainer | {"megatron": {"pp": 2}}, **more))


def of_ppo(critic: dict, **more) -> dict:
    return {"advantages": {"type": "gae"}, "critic": critic, "megatron": {"pp": 2} | more}


@needs("critic")
def test_a_critic_on_ranks_of_its_own_has_the_stages_of_the_policy(tmp_path):
    ppo = {"orchestrator": {"algo": {"type": "ppo"}, "num_train_workers": 2}}
    cfg = rl(tmp_path, of_ppo({"placement": {}}), model={"tp": 2}, **ppo)
    assert cfg.num_train_ranks == 8 and cfg.num_critic_ranks == 4
    roles = [spec.role for spec in plan(cfg, cfg.run_dir).processes]
    assert roles.count("critic") == 4 and roles.count("trainer") == 8
    gpus = {"num_train_gpus": 8, "num_critic_gpus": 4}
    cfg = rl(tmp_path, of_ppo({}), orchestrator={"algo": {"type": "ppo"}}, deployment=gpus)
    assert cfg.critic_placement.num_workers == 2 and cfg.num_critic_ranks == 4
    with pytest.raises(ConfigError, match=r"give 2 \(num_workers x model.cp x model.tp x trainer.megatron.pp\)"):
        critic = {"placement": {"num_workers": 1}}
        rl(tmp_path, of_ppo(critic), orchestrator={"algo": {"type": "ppo"}}, deployment=gpus)
    shape = {"hidden_size": 32, "num_layers": 2, "num_experts": 4}
    hub.save_hf(hub.random_model(ScratchSection(family="qwen3_moe", **shape), 50), tmp_path)
    check_shape(rl(tmp_path, of_ppo({"placement": {"num_workers": 2}}), model={"ep": 2}, **ppo))
    with pytest.raises(ConfigError, match=r"of the ranks in trainer.critic.placement\] ep = 2 must divide"):
        check_shape(rl(tmp_path, of_ppo({"placement": {}}), model={"ep": 2}, **ppo))


@needs("critic")
def test_what_a_critic_computes_again_is_checked_too(tmp_path):
    hub.save_hf(hub.random_model(ScratchSection(family="qwen3", num_layers=2), 50), tmp_path)
    ppo = {"orchestrator": {"algo": {"type": "ppo"}}}
    selective = {"mode": "selective", "targets": ["attn_proj"]}
    with pytest.raises(ConfigError, match=r"^\[trainer.critic.ac\] targets has attn_proj, and Megatron computes norm"):
        check_shape(rl(tmp_path, of_ppo({"ac": selective}), **ppo))
    check_shape(rl(tmp_path, of_ppo({"ac": {"group_size": 2}}), **ppo))
    both = of_ppo({"ac": {"group_size": 2}}, overrides={"recompute_granularity": "full"})
    with pytest.raises(ConfigError, match=r"with trainer.megatron.overrides.recompute_granularity: arguments of Mega"):
        rl(tmp_path, both, **ppo)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"norm_topk_prob": False}, "sigmoids are not divided by their sum"),
        ({"num_experts_per_tok": 1}, "a single expert per token with a gate of 1"),
        ({"n_group": 2, "num_experts_per_tok": 4}, "groups of experts"),
    ],
)
def test_gates_of_experts_that_megatron_does_not_compute_are_refused(tmp_path, found, said):
    hub.save_hf(hub.random_model(ScratchSection(family="glm4_moe", num_layers=2), 50), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    Megatron(None).check("glm4_moe", config, ModelSection())
    with pytest.raises(ConfigError, match=said):
        Megatron(None).check("glm4_moe", config | found, ModelSection())


@pytest.mark.parametrize(
    ("family", "found", "said"),
    [
        pytest.param(
            "deepseek_v3", {"q_lora_rank": None}, "latent attention whose queries have no rank", marks=needs("families")
        ),
        pytest.param("deepseek_v3", {"attention_bias": True}, "biases in latent attention", marks=needs("families")),
        pytest.param("deepseek_v3", {"rms_norm_eps": 1e-5}, "another epsilon than the others", marks=needs("families")),
        pytest.param(
            "deepseek_v3",
            {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 8},
            "of which it adds up others",
            marks=needs("families"),
        ),
        pytest.param("gpt_oss", {"swiglu_alpha": 1.5}, "another factor than 1.702", marks=needs("families")),
        pytest.param(
            "gpt_oss",
            {"attention_bias": False},
            "biases in experts without biases in attention",
            marks=needs("families"),
        ),
        ("llama", {"attention_bias": True}, "biases behind attention without biases in all experts"),
        ("llama", {"mlp_bias": True}, "biases in dense MLPs"),
    ],
)
def test_parts_that_megatron_does_not_compute_are_refused(tmp_path, family, found, said):
    shape = {"num_experts": 16, "num_layers": 2, "num_experts_per_tok": 2}
    hub.save_hf(hub.random_model(ScratchSection(family=family, **shape), 50), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    Megatron(None).check(family, config, ModelSection())
    with pytest.raises(ConfigError, match=said):
        Megatron(None).check(family, config | found, ModelSection())


@needs("families")
def test_degrees_that_megatron_does_not_have_for_sinks_and_biases_are_refused(tmp_path):
    hub.save_hf(hub.random_model(ScratchSection(family="gpt_oss", num_layers=2), 50), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    Megatron(MegatronSection(pp=2)).check("gpt_oss", config, ModelSection(tp=2, ep=2))
    with pytest.raises(ConfigError, match="cp = 2: Megatron does not split tokens of attention with windows or sinks"):
        Megatron(None).check("gpt_oss", config, ModelSection(cp=2))
    with pytest.raises(ConfigError, match="etp = 2: Megatron does not divide experts with biases"):
        Megatron(MegatronSection(etp=2)).check("gpt_oss", config, ModelSection())


@pytest.mark.parametrize(
    ("name", "said"),
    [("num_layers", "the model's config.json"), ("pipeline_model_parallel_size", "trainer.megatron.pp; set that")],
)
def test_overrides_of_the_mesh_and_the_model_are_refused(name, said):
    with pytest.raises(ConfigError, match=f"trainer.megatron.overrides: {name} is said by {said}"):
        Megatron(MegatronSection(overrides={name: 2})).check("qwen3", {}, ModelSection())
    Megatron(MegatronSection(overrides={"moe_grouped_gemm": True})).check("qwen3", {}, ModelSection())


def stand_in(path: Path, **found) -> Path:
    """A Python that answers the question what it has; it is not one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{json.dumps(found)}'\n")
    path.chmod(0o755)
    return path


HAS_ALL = {"python": [3, 12], "stretto": __version__, "torch": "2.13.0", "megatron-core": "0.19.2"}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (HAS_ALL | {"megatron-core": None, "python": [3, 11]}, "has no Megatron-Core, and 0.19 is needed"),
        (HAS_ALL | {"megatron-core": "0.16.1"}, "has megatron-core 0.16.1, and 0.19 is needed"),
        (HAS_ALL | {"megatron-core": "0.20.0"}, "has megatron-core 0.20.0, and 0.19 is needed"),
        (HAS_ALL | {"stretto": None}, f"has no stretto; install stretto {__version__} there"),
        (HAS_ALL | {"stretto": "0.0.1"}, "has stretto 0.0.1; install stretto"),
        (HAS_ALL | {"device": "no driver"}, "computes on GPUs, and there is none (no driver)"),
    ],
)
def test_what_the_trainers_python_lacks_is_told(tmp_path, found, said):
    python = stand_in(tmp_path / "python", **found)
    with pytest.raises(ConfigError) as caught:
        check_trainer_python(TrainerKeys(backend="megatron", interpreter=str(python)), needs_gpu=True)
    assert said in str(caught.value)


@pytest.mark.heavy
def test_a_python_that_does_not_answer_in_time_is_not_called_broken(tmp_path, monkeypatch):
    monkeypatch.setattr("stretto.check.backend.PROBE_S", 0.2)
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 20\n")
    slow.chmod(0o755)
    with pytest.raises(ConfigError, match=r"did not answer within 0\.2 s; try again when the machine is less busy"):
        check_trainer_python(TrainerKeys(interpreter=str(slow)))


def test_the_trainers_python_is_the_one_that_has_megatron_core(tmp_path, monkeypatch):
    keys = TrainerKeys(backend="megatron", interpreter=str(stand_in(tmp_path / "python", **HAS_ALL)))
    assert check_trainer_python(keys) == (f"Megatron-Core 0.19.2 with torch 2.13.0, Python 3.12, {tmp_path / 'python'}")
    with pytest.raises(ConfigError, match="is no Python that runs"):
        check_trainer_python(TrainerKeys(interpreter=str(tmp_path / "nothing")))
    assert check_trainer_python(TrainerKeys()) == ""
    assert trainer_python(TrainerKeys()) == sys.executable
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    made = stand_in(tmp_path / MADE, **HAS_ALL)
    found = trainer_python(TrainerKeys(backend="megatron"))
    assert found in (str(made), sys.executable)  # the latter if it has Megatron-Core itself


def test_this_python_is_asked_in_a_process_of_its_own():
    found = check_trainer_python(TrainerKeys(interpreter=sys.executable))
    assert found.endswith(sys.executable) and f"Python {sys.version_info.major}.{sys.version_info.minor}" in found
