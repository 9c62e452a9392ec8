"""launch/plan/plan.py and base/rundir.py: the processes of a run, their devices, and the run directory."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cases.plans import TOML, config_builder, isolate
from processes.add_ons import is_here, needs

from stretto.base import ports, process, rundir
from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.base.status import SUPERVISED_VAR
from stretto.check.devices import check_drafts
from stretto.config.load import PARTS, dump, load, shown_text
from stretto.config.root import EvalConfig, InferenceConfig, OrchestratorConfig, RLConfig, TrainerConfig
from stretto.config.sections.model import ModelSection, shares_prefixes, why_unshared
from stretto.data.model_file import find_model_file
from stretto.launch.plan import plan as planning
from stretto.launch.plan.plan import sharing_notes
from stretto.launch.plan.processes import ProcessSpec
from stretto.launch.plan.table import process_table, table
from stretto.orchestrator.main import build_bounds
from stretto.orchestrator.state import run_checkpoint
from stretto.records.weight_manifest import BFLOAT16_TOLERANCE


@pytest.fixture(autouse=True)
def isolated_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch)


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., RLConfig]:
    return config_builder(tmp_path)


@pytest.fixture
def listener() -> Iterator[int]:
    """A port that another process (this one) listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


def planned(cfg: RLConfig) -> planning.LaunchPlan:
    return planning.plan(cfg, cfg.run_dir)


# -- processes --


def test_every_process_is_started_from_the_config_the_plan_writes(config) -> None:
    plan = planned(config())
    planning.write(plan, plan.run.path)
    roots = {"trainer": TrainerConfig, "orchestrator": OrchestratorConfig, "inference": InferenceConfig}
    assert [spec.role for spec in plan.processes] == ["inference", "orchestrator", "trainer"]
    for spec in plan.processes:
        _, _, _, verb, at, path = spec.argv
        assert (verb, at) == (spec.role, "@")
        assert Path(path) == plan.run.config("inference" if verb == "inference" else "run")
        assert load(roots[verb], ["@", path]) == PARTS[roots[verb]](plan.config)
    assert load(RLConfig, ["@", str(plan.run.config("run"))]) == plan.config
    evaluation = load(EvalConfig, ["@", str(plan.run.config("eval"))])
    assert evaluation == plan.configs()["eval"]
    # The run's port is not written: another process may use it when the eval is run.
    assert "port" not in evaluation.inference.server.model_fields_set
    assert json.loads(plan.run.plan.read_text())["batch"]["rollouts"] == 32


def test_what_imports_torch_is_started_beside_the_orchestrator(config) -> None:
    assert [spec.role for spec in planned(config()).processes if spec.imports_early] == ["inference", "trainer"]


@pytest.mark.heavy
@pytest.mark.parametrize("is_supervised", [False, True])
@pytest.mark.parametrize(
    "words",
    [
        "--no-inference.router",
        pytest.param("--inference.router.policy round_robin", marks=needs("routers")),
        pytest.param("--inference.engine vllm", marks=needs("routers", "vllm")),
    ],
)
def test_the_config_of_a_run_with_several_engines_is_loaded_by_its_processes(
    config, words, is_supervised, monkeypatch
) -> None:
    plan = planned(config("--inference.deployment.num-replicas", "2", "--dry-run", *words.split()))
    planning.write(plan, plan.run.path)
    path = str(plan.run.config("run"))
    assert load(RLConfig, ["@", path]).orchestrator.client == plan.config.orchestrator.client
    if is_supervised:
        monkeypatch.setenv(SUPERVISED_VAR, "1")
    for cls in (TrainerConfig, OrchestratorConfig):
        assert load(cls, ["@", path]) == PARTS[cls](plan.config).model_copy(update={"dry_run": False})


def test_the_eval_config_of_a_run_has_the_settings_of_its_evals_without_their_intervals(tmp_path: Path) -> None:
    own = {"id": "sort-letters", "interval": 5, "num_examples": 7, "sampling": {"temperature": 0.5}}
    section = {"env": [own], "interval": 10, "skip_first_step": True, "group_size": 3, "retrigger_on_resume": True}
    cfg = RLConfig.model_validate(
        {"orchestrator": {"env": [{"id": "sort-letters", "ratio": 2.0}], "eval": section}, "output_dir": tmp_path}
    )
    evaluation = planned(cfg).configs()["eval"].eval
    assert evaluation.interval is None and evaluation.group_size == 3 and not evaluation.skip_first_step
    (env,) = evaluation.env
    assert (env.interval, env.num_examples, env.sampling.temperature) == (None, 7, 0.5)
    without = RLConfig.model_validate(
        {"orchestrator": {"env": [{"id": "sort-letters", "ratio": 2.0}]}, "output_dir": tmp_path}
    )
    assert [env.id for env in planned(without).configs()["eval"].eval.env] == ["sort-letters"]


def test_the_batch_shape_names_prompts_times_group_and_ranks_times_micro_batches(config) -> None:
    batch = planned(config("--orchestrator.num-train-workers", "2")).batch
    assert (batch.prompts, batch.group_size, batch.rollouts, batch.ranks) == (4, 8, 32, 2)
    assert str(batch).startswith("4 prompts x group of 8 = 32 rollouts = 2 ranks x 1 to 16 micro batches")


def test_the_batch_has_as_many_rollouts_as_the_groups_of_environments(config) -> None:
    envs = '[{"id": "sort-letters", "group_size": 2}, {"id": "sort-letters", "name": "b", "group_size": 4}]'
    cfg = config("--orchestrator.num-train-workers", "2", "--orchestrator.env", envs)
    text = str(planned(cfg).batch)
    assert text.startswith("4 prompts x group of 2 to 4 = 8 to 16 rollouts = 2 ranks x 1 to 8 micro batches")
    assert build_bounds(cfg.orchestrator_config()).min_groups == 1
    cfg = config("--orchestrator.num-train-workers", "6", "--orchestrator.env", envs)
    assert build_bounds(cfg.orchestrator_config()).min_groups == 3, "two rollouts each, for six ranks"


def test_the_shape_of_a_batch_in_tokens_is_an_upper_bound(config) -> None:
    plan = planned(config("--orchestrator.batch-size", "32", "--orchestrator.token-batch-size", "600"))
    text = str(plan.batch)
    assert text.startswith("up to 4 prompts x group of 8 = 32 rollouts = 1 rank x 1 to 32 micro batches")
    assert text.endswith("; a batch ends with the group that brings it to 600 tokens")
    assert text in table(plan)


def test_memory_is_not_recorded_on_a_cpu(config) -> None:
    with pytest.raises(ConfigError, match=r"memory_profiler_path = "):
        planned(config("--trainer.memory-profiler-path", "snapshots"))


def test_a_divergence_that_holds_nothing_is_said(config) -> None:
    keys = ["--trainer.loss.reference-kl.estimator", "k1", "--trainer.loss.reference-kl.model", "None"]
    assert any("k3 and low_var do" in note for note in planned(config(*keys)).notes)
    unbiased = planned(config(*keys, "--trainer.loss.reference-kl.is-unbiased"))
    assert not any("low_var" in note for note in unbiased.notes)


@needs("vllm")
def test_a_deterministic_run_drafts_in_the_embedded_engine_only(config) -> None:
    keys = ["--deterministic", "--inference.speculation.method", "ngram"]
    if is_here("speculation"):
        assert planned(config(*keys)).config.inference.speculation is not None
    with pytest.raises(ConfigError, match=r"\[inference.speculation\] with deterministic = true"):
        planned(config(*keys, "--inference.engine", "vllm"))


@needs("vllm")
def test_drafts_that_do_not_follow_the_policy_are_said(config) -> None:
    keys = ["--inference.engine", "vllm", "--inference.speculation.method"]
    mtp, eagle, ngram = (
        " ".join(planned(config(*keys, *method)).notes)
        for method in (["mtp"], ["eagle3", "--inference.speculation.model", "some/draft"], ["ngram"])
    )
    assert "layer for further tokens is not trained with the policy" in mtp
    assert "the model some/draft is not trained with the policy" in eagle
    assert "is not trained with" not in ngram


@needs("vllm")
def test_vllm_does_not_draft_with_min_p(config) -> None:
    with pytest.raises(ConfigError, match="vLLM does not sample with it while it drafts"):
        config("--inference.engine", "vllm", "--inference.speculation.method", "ngram",
               "--orchestrator.eval.sampling.min-p", "0.1")  # fmt: skip


@needs("vllm")
@pytest.mark.parametrize(
    "drafts",
    [
        ["--inference.speculation.method", "mtp"],
        ["--inference.vllm-extra", '{"speculative_config": {"method": "mtp"}}'],
    ],
)
def test_what_drafts_ask_of_vllm_holds_where_the_engine_is_chosen_by_a_key(config, drafts) -> None:
    with pytest.raises(ConfigError, match="vLLM does not sample with it while it drafts"):
        config(*drafts, "--orchestrator.eval.sampling.min-p", "0.1")
    with pytest.raises(
        ConfigError, match=r"inference.enable_return_sampling_mask = true with inference.\S+: what vLLM"
    ):
        config(*drafts, "--inference.enable-return-sampling-mask")
    with pytest.raises(ConfigError, match=r"\[inference.\S+\] with deterministic = true"):
        planned(config(*drafts, "--deterministic"))


@needs("vllm")
def test_what_drafts_ask_of_vllm_holds_where_a_gpu_makes_it_the_engine(config, monkeypatch) -> None:
    monkeypatch.setattr("stretto.config.sections.inference.find_spec", lambda name: name)
    masks = config("--inference.speculation.method", "ngram", "--inference.enable-return-sampling-mask")
    if is_here("speculation"):
        check_drafts(masks, is_on_gpu=False)
    with pytest.raises(ConfigError, match=r"inference.enable_return_sampling_mask = true with inference.speculation"):
        check_drafts(masks, is_on_gpu=True)
    likely = config("--inference.speculation.method", "ngram", "--orchestrator.eval.sampling.min-p", "0.1")
    if is_here("speculation"):
        check_drafts(likely, is_on_gpu=False)
    with pytest.raises(ConfigError, match="vLLM does not sample with it while it drafts"):
        check_drafts(likely, is_on_gpu=True)


@needs("vllm")
def test_what_vllm_cannot_fix_is_said_with_its_own_switch(config) -> None:
    keys = ["--deterministic", "--inference.engine", "vllm"]
    word = "VLLM_BATCH_INVARIANT"
    assert any(word in note for note in planned(config(*keys)).notes)
    assert not any(word in note for note in planned(config(keys[0])).notes)
    switched = planned(config(*keys, "--inference.env-vars", json.dumps({word: "1"})))
    assert not any(word in note for note in switched.notes)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ((), None),
        (("--model.impl", "hf"), "modules of transformers take whole samples"),
        (("--model.cp", "2", "--model.cp-style", "ring", "--trainer-gpu-ids", "0,1"), "passes keys of whole samples"),
        (("--model.cp", "2", "--model.cp-style", "ulysses", "--trainer-gpu-ids", "0,1"), None),
    ],
)
def test_samples_that_are_computed_one_by_one_in_spite_of_the_key_are_said(config, keys, reason) -> None:
    found = list(sharing_notes(config("--model.shared-prefixes", "tree", *keys)))
    assert len(found) == (reason is not None) and all(reason in note for note in found)
    assert not list(sharing_notes(config(*keys)))


@pytest.mark.parametrize(
    ("found", "keys", "word"),
    [
        pytest.param(
            {"model_type": "nemotron_h"}, {}, "nemotron_h has layers that pass a state", marks=needs("families")
        ),
        ({"model_type": "llama"}, {}, None),
        ({"num_attention_heads": 4, "num_key_value_heads": 2}, {"cp": 2}, None),
        ({"num_attention_heads": 4, "num_key_value_heads": 2}, {"cp": 4, "tp": 2}, "which cp = 4 uses for this model"),
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, {"cp": 2}, "which cp = 2 uses for this model"),
    ],
)
def test_what_a_model_is_decides_whether_its_samples_are_packed_by_what_they_share(tmp_path, found, keys, word) -> None:
    """As the trainer does: a row packed so is too long for one that computes each sample."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama"} | found))
    section = ModelSection(name=str(tmp_path / "model"), shared_prefixes="tree", **keys)
    found = find_model_file(section.name)
    reason = why_unshared(section, found)
    assert shares_prefixes(section, found, is_on_cpu=False) == (word is None)
    assert reason is None if word is None else word in (reason or "")
    chosen = section.model_copy(update={"shared_prefixes": "auto"})
    assert shares_prefixes(chosen, found, is_on_cpu=True) == (word is None)
    assert not shares_prefixes(chosen, found, is_on_cpu=False), "a GPU computes each sample"


def test_a_plan_says_whether_what_samples_begin_with_is_computed_once(config) -> None:
    def said(*words: str) -> bool:
        return "packed as trees" in str(planned(config(*words)).batch)

    assert said() and said("--model.shared-prefixes", "tree")  # on CPUs
    assert not said("--model.shared-prefixes", "off") and not said("--model.shared-prefixes", "prompts")


@needs("vllm")
def test_what_an_adapter_loses_in_bfloat16_is_said_where_it_is_merged(config, tmp_path) -> None:
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "config.json").write_text('{"model_type": "qwen3"}')
    name = ["--model.name", str(tmp_path / "served")]
    keys = ["--model.lora.rank", "4", "--inference.engine", "vllm", "--inference.dtype", "bfloat16"]
    merged = ["--inference.lora.compute-policy", "false"]

    def said(*keys: str) -> list[str]:
        return [note for note in planned(config(*name, *keys)).notes if "merges the adapter" in note]

    assert said(*keys) == []  # vLLM computes it
    [note] = said(*keys, *merged)
    assert "under the last bit of a weight are lost: inference.lora.compute_policy = false" in note
    merged_notes = planned(config(*name, *keys, *merged, "--inference.lora.max-loras", "2")).notes
    assert any("adapters with names on top of the run's" in note for note in merged_notes)
    [note] = said(*keys[:-1], "float32", *merged)
    assert "in float32 nothing is lost" in note
    [note] = said(*keys, "--model.lora.rank", "1024")
    assert "ranks up to 512" in note
    assert said(*keys[2:]) == [] and said(*keys[:2]) == []
    (tmp_path / "served" / "config.json").unlink()
    [note] = said(*keys)
    assert "the model is not here" in note
    [note] = said(*keys[:2], "--no-inference")
    assert "--policy-lora.rank 4" in note


def test_without_inference_no_engine_is_started(config) -> None:
    plan = planned(config("--no-inference"))
    assert [spec.role for spec in plan.processes] == ["orchestrator", "trainer"]
    assert "already running at" in table(plan)


def test_an_api_key_reaches_the_orchestrator_and_no_readable_file(config) -> None:
    plan = planned(config("--inference.api-key", "s3cret"))
    planning.write(plan, plan.run.path)
    [orchestrator] = [spec for spec in plan.processes if spec.role == "orchestrator"]
    assert orchestrator.env["VLLM_API_KEY"] == "s3cret"
    for path in [plan.run.plan, *plan.run.configs.iterdir()]:
        assert "s3cret" not in path.read_text() or path.stat().st_mode & 0o077 == 0


def test_an_existing_file_becomes_unreadable_to_others_when_a_key_is_written(config) -> None:
    plan = planned(config())
    planning.write(plan, plan.run.path)
    open_before = plan.run.config("run").stat().st_mode
    with_key = planned(config("--inference.api-key", "s3cret"))
    planning.write(with_key, plan.run.path)
    assert open_before & 0o044
    for path in plan.run.configs.iterdir():
        assert "s3cret" not in path.read_text() or path.stat().st_mode & 0o077 == 0, path


def test_a_key_is_not_shown(config) -> None:
    cfg = config("--inference.api-key", "s3cret", "--inference.vllm-extra.hf-token", "s3cret")
    assert "s3cret" in json.dumps(dump(cfg)) and "s3cret" not in shown_text(cfg)


# -- cores and GPUs --


@pytest.mark.parametrize(
    ("cores", "engine", "trainer"), [(1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 1, 2), (8, 3, 4), (64, 16, 16)]
)
def test_each_core_is_assigned_once(
    config, monkeypatch: pytest.MonkeyPatch, cores: int, engine: int, trainer: int
) -> None:
    monkeypatch.setattr(process, "num_cores", lambda: cores)
    plan = planned(config())
    threads = {spec.role: spec.threads for spec in plan.processes}
    assert threads == {"inference": engine, "orchestrator": 1, "trainer": trainer}
    assert plan.config.trainer.num_threads == trainer and plan.config.inference is not None
    assert plan.config.inference.num_threads == engine
    for spec in plan.processes:
        assert spec.env["OMP_NUM_THREADS"] == str(spec.threads)
        assert spec.env["OMP_WAIT_POLICY"] == "PASSIVE" and spec.env["CUDA_VISIBLE_DEVICES"] == ""


def test_the_users_threads_are_kept_and_too_many_are_noted(config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "num_cores", lambda: 2)
    plan = planned(config("--trainer.num-threads", "3"))
    assert plan.config.trainer.num_threads == 3
    assert any("4 threads on 2 cores" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("visible", "words", "inference", "trainer"),
    [
        ("0,1", [], ("0",), ("1",)),
        ("6,7", [], ("6",), ("7",)),
        ("0,1,2", ["--trainer-gpu-ids", "0", "--inference-gpu-ids", "2"], ("2",), ("0",)),
        ("0,1", ["--inference.device", "cpu"], (), ("0",)),
        ("0,1", ["--deployment.num-train-gpus", "0"], ("0",), ()),
        ("GPU-ab", [], ("GPU-ab",), ("GPU-ab",)),
    ],
)
def test_inference_gets_the_first_gpu_and_the_trainer_the_next(
    config, monkeypatch: pytest.MonkeyPatch, visible: str, words: list[str], inference: tuple, trainer: tuple
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    plan = planned(config(*words))
    devices = {spec.role: spec.devices for spec in plan.processes}
    assert devices == {"inference": inference, "orchestrator": (), "trainer": trainer}
    [spec] = [spec for spec in plan.processes if spec.role == "trainer"]
    assert spec.env["CUDA_VISIBLE_DEVICES"] == ",".join(trainer)


def test_the_table_says_between_which_levels_a_run_is_steered(config) -> None:
    assert "up to 1 ahead\n" in table(planned(config()))
    words = ["--orchestrator.steering.max-level", "6"]
    assert "1 ahead at first, steered between 1 and 6\n" in table(planned(config(*words)))
    words += ["--orchestrator.steering.max-update-interval", "4"]
    assert "steered between 1 and 6, new weights every 1 to 4 steps\n" in table(planned(config(*words)))


@pytest.mark.parametrize(
    ("visible", "words", "tolerance"),
    [
        ("", [], None),
        ("0,1", [], BFLOAT16_TOLERANCE),
        ("0,1", ["--inference.device", "cpu"], BFLOAT16_TOLERANCE),
        ("0,1", ["--model.dtype", "float32"], None),
        ("", ["--model.dtype", "bfloat16"], BFLOAT16_TOLERANCE),
        ("", ["--dry-run", "--deployment.num-train-gpus", "1", "--deployment.num-infer-gpus", "1"], BFLOAT16_TOLERANCE),
    ],
)
def test_a_plan_keeps_dtype_auto_and_sets_the_canary_tolerance_of_its_devices(
    config, monkeypatch: pytest.MonkeyPatch, visible: str, words: list[str], tolerance: float | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    plan = planned(config(*words))
    assert plan.config.weight_broadcast.canary_tolerance == tolerance
    expected = words[1] if words[:1] == ["--model.dtype"] else "auto"
    assert plan.config.model.dtype == plan.config.inference.dtype == expected


def test_an_engine_on_the_trainers_gpu_takes_half_of_its_memory(config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    plan = planned(config())
    assert plan.config.inference is not None and plan.config.inference.gpu_memory_utilization == 0.5
    assert any("share GPU 0" in note for note in plan.notes)
    plan = planned(config("--inference.gpu-memory-utilization", "0.3"))
    assert plan.config.inference is not None and plan.config.inference.gpu_memory_utilization == 0.3


def test_each_trainer_rank_has_its_gpu(config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    plan = planned(config("--trainer-gpu-ids", "1,2"))
    ranks = [spec for spec in plan.processes if spec.role == "trainer"]
    assert [(spec.name, spec.devices, spec.env["RANK"], spec.env["WORLD_SIZE"]) for spec in ranks] == [
        ("trainer_0", ("1",), "0", "2"),
        ("trainer_1", ("2",), "1", "2"),
    ]


def test_a_missing_gpu_is_refused_except_in_a_dry_run(config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match=r"GPU 6, .*shows 1"):
        planned(config("--trainer-gpu-ids", "6"))
    assert any("GPU 6" in note for note in planned(config("--trainer-gpu-ids", "6", "--dry-run")).notes)


# -- ports --


@pytest.mark.parametrize(
    ("key", "flag"),
    [
        ("inference.server.port", "--inference.server.port"),
        ("control.port", "--control.port"),
        ("rollout_transport.port", "--rollout-transport.port"),
    ],
)
def test_a_given_port_that_is_taken_is_refused(config, listener: int, key: str, flag: str) -> None:
    with pytest.raises(ConfigError) as error:
        planned(config(flag, str(listener)))
    assert f"{key} = {listener} is taken" in str(error.value) and flag in str(error.value)


def test_a_port_in_the_given_address_of_the_engine_is_kept(config, listener: int) -> None:
    words = ("--inference.server.port", str(listener))
    address = ("--orchestrator.client.base-url", f"http://127.0.0.1:{listener}/v1")
    with pytest.raises(ConfigError, match="is taken"):
        planned(config(*words, *address))


def test_default_ports_that_are_taken_move_in_every_config(config, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {8000, 8001, 5555, 5556}
    monkeypatch.setattr(ports, "is_free", lambda host, port: port not in taken)
    plan = planned(config())
    assert plan.config.inference is not None and plan.config.inference.server.port == 8002
    assert plan.config.orchestrator.client.base_url == "http://127.0.0.1:8002/v1"
    # 5555 and 5556 are both taken: the two wires must not end up on one port.
    assert plan.config.control.port == 5557 and plan.config.rollout_transport.port == 5558
    assert len(plan.notes) == 3


def test_a_port_is_free_when_no_process_listens(listener: int) -> None:
    assert not ports.is_free("127.0.0.1", listener)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    assert ports.is_free("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on '192\.0\.2\.1'"):
        ports.is_free("192.0.2.1", 8000)


def test_two_launchers_do_not_choose_the_same_port_before_either_listens(config) -> None:
    first, second = ports.PortClaims(), ports.PortClaims()
    plans = [planning.plan(cfg, cfg.run_dir, ports=p) for cfg, p in ((config(), first), (config(), second))]
    chosen = [port for plan in plans for spec in plan.processes for port in spec.ports.values()]
    assert len(chosen) == len(set(chosen)) == 6
    first.close()
    again = ports.PortClaims()
    assert again.claim("127.0.0.1", chosen[0])
    again.close()
    second.close()


# -- run directory --


def fresh(run: RunDir) -> rundir.Claim:
    return rundir.claim(run, resume=False, step=None, clean=False)


def with_checkpoint(run: RunDir, step: int) -> None:
    """A complete checkpoint, as far as its plain values tell."""
    (run.checkpoint(step) / "trainer").mkdir(parents=True)
    values = {"schema": 2, "num_bytes": {}, "cursor": {}, "optim": "adamw"}
    (run.checkpoint(step) / "trainer" / "state.json").write_text(json.dumps(values))
    run_checkpoint.save(run, run_checkpoint.Progress(step=step))


def test_a_name_given_twice_is_refused_with_both_ways_out(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with_checkpoint(run, 20)
    with pytest.raises(ConfigError, match=r"(?s)--resume from step 20.*--clean.*--run.name"):
        fresh(run)


def test_the_files_of_a_dry_run_are_not_a_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.configs.mkdir(parents=True)
    run.plan.touch()
    fresh(run).close()
    with pytest.raises(ConfigError, match="there is no run 'run'"):
        rundir.claim(run, resume=True, step=None, clean=False)


def test_resume_of_a_run_that_does_not_exist_names_those_that_do(tmp_path: Path) -> None:
    RunDir(tmp_path / "other").configs.mkdir(parents=True)
    RunDir(tmp_path / "other").ledger.touch()
    with pytest.raises(ConfigError, match=r"no run 'run' .*: other"):
        rundir.claim(RunDir(tmp_path / "run"), resume=True, step=None, clean=False)
    assert not (tmp_path / "run").exists()


def test_resume_without_a_complete_checkpoint_lists_what_there_is(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.checkpoint(5).mkdir(parents=True)
    run.ledger.write_bytes(b"x" * 200_000)
    with pytest.raises(ConfigError) as error:
        rundir.claim(run, resume=True, step=None, clean=False)
    message = str(error.value)
    assert "a ledger of 0.2 MB" in message and "step_5" in message
    assert "Nothing was changed" in message and "--clean" in message and "ckpt.interval" in message
    assert run.checkpoint(5).exists()


def test_resume_takes_the_newest_complete_checkpoint_or_the_one_asked_for(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    for step in (10, 20):
        with_checkpoint(run, step)
    run.checkpoint(30).mkdir()
    for asked, got in ((None, 20), (10, 10)):
        claim = rundir.claim(run, resume=True, step=asked, clean=False)
        assert claim.resume_step == got
        claim.close()
    with pytest.raises(ConfigError, match="complete: 10, 20"):
        rundir.claim(run, resume=True, step=30, clean=False)


def test_resume_deletes_what_was_being_written_and_nothing_else(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    for step in (10, 20):
        with_checkpoint(run, step)
        run.weights_step(step).mkdir(parents=True)
    run.link_latest_weights(20)
    (run.checkpoint(30) / "trainer.part").mkdir(parents=True)
    (run.checkpoint(40) / "trainer").mkdir(parents=True)
    for name in ("step_30.part", ".step_20.old"):
        (run.weights / name).mkdir()
    with pytest.raises(ConfigError, match="no complete checkpoint of that step"):
        rundir.claim(run, resume=True, step=30, clean=False)
    assert run.checkpoint(30).exists()
    rundir.claim(run, resume=True, step=10, clean=False).close()
    assert sorted(os.listdir(run.checkpoints)) == ["step_10", "step_20"]
    assert sorted(os.listdir(run.weights)) == ["latest", "step_10", "step_20"]

    run.checkpoint(50).mkdir()
    with rundir.claim_part(run, "orchestrator", is_new=False, clean=False):
        assert run.checkpoint(50).exists()
    with rundir.claim_part(run, "trainer", is_new=False, clean=False):
        assert not run.checkpoint(50).exists()


def test_clean_deletes_a_run_and_nothing_else(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with_checkpoint(run, 10)
    run.configs.mkdir()
    claim = rundir.claim(run, resume=False, step=None, clean=True)
    assert sorted(os.listdir(run.path)) == ["launch.json", "run.lock"]
    claim.close()

    precious = RunDir(tmp_path / "precious")
    precious.path.mkdir()
    (precious.path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="does not look like a run directory"):
        rundir.claim(precious, resume=False, step=None, clean=True)
    assert (precious.path / "thesis.tex").exists()


@pytest.mark.parametrize("last", ["checkpoints", "weights", "logs", "tokens"])
def test_an_interrupted_clean_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    run, delete = RunDir(tmp_path / "run"), shutil.rmtree
    with_checkpoint(run, 10)
    for each in (run.configs, run.weights, run.logs, run.tokens):
        each.mkdir()

    def delete_until_stopped(path: Path) -> None:
        if path.name == last:
            raise KeyboardInterrupt
        delete(path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", delete_until_stopped)
        rundir.claim(run, resume=False, step=None, clean=True)
    rundir.claim(run, resume=False, step=None, clean=True).close()
    assert sorted(os.listdir(run.path)) == ["launch.json", "run.lock"]


def test_a_run_without_a_trained_step_frees_its_name_and_keeps_its_logs(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    claim = fresh(run)
    assert claim.is_new
    for each in (run.configs, run.logs, run.tokens, run.broadcasts):
        each.mkdir()
    run.ledger.touch()
    rundir.discard(run)
    claim.close()
    assert sorted(os.listdir(run.path)) == ["configs", "launch.json", "logs", "run.lock"]
    fresh(run).close()


def test_a_live_run_has_one_launcher(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with_checkpoint(run, 10)
    run.configs.mkdir()
    held = rundir.claim(run, resume=True, step=None, clean=False)
    for resume, clean in ((True, False), (False, True)):
        with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()}"):
            rundir.claim(run, resume=resume, step=None, clean=clean)
    assert run.complete_checkpoints() == [10], "a run in use was cleaned"
    held.close()
    rundir.claim(run, resume=True, step=None, clean=False).close()


@pytest.mark.heavy
def test_children_that_outlive_their_launcher_keep_the_claim_until_they_end(tmp_path: Path) -> None:
    code = f"""
import os, subprocess, sys
from stretto.base import rundir
from stretto.base.paths import RunDir
claim = rundir.claim(RunDir({str(tmp_path / "run")!r}), resume=False, step=None, clean=False)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"], pass_fds=(claim.lock_fd,))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    # The launcher is gone and its child ends a moment later: claim waits for it instead of refusing.
    fresh(RunDir(tmp_path / "run")).close()


# -- the command --


def dry_run(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "rl.toml"
    file.write_text(TOML)
    command = [sys.executable, "-X", "importtime", "-m", "stretto", "rl", "@", str(file), "--dry-run", *words]
    return subprocess.run([*command, "--output-dir", str(tmp_path)], capture_output=True, text=True, check=False)


@pytest.mark.heavy
def test_a_dry_run_prints_and_writes_the_plan_and_imports_nothing_heavy(tmp_path: Path) -> None:
    result = dry_run(tmp_path, "--run.name", "first")
    assert result.returncode == 0, result.stderr
    for text in ("4 prompts x group of 8 = 32 rollouts", "inference", "trainer", "control:", "threads"):
        assert text in result.stdout
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert "pydantic" in imported
    assert not imported & {"torch", "transformers", "renderers", "zmq", "matplotlib", "aiohttp", "openai", "pyarrow"}
    run = RunDir(tmp_path / "first")
    assert sorted(p.name for p in run.configs.iterdir()) == [f"{verb}.json" for verb in ("eval", "inference", "run")]
    assert json.loads(run.plan.read_text())["processes"][0]["role"] == "inference"
    assert dry_run(tmp_path, "--run.name", "first").returncode == 0


@pytest.mark.heavy
def test_a_dry_run_does_not_change_the_configs_of_an_existing_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "first")
    with_checkpoint(run, 10)
    run.configs.mkdir()
    run.config("run").write_text("the record")
    assert dry_run(tmp_path, "--run.name", "first").returncode == 2
    result = dry_run(tmp_path, "--run.name", "first", "--resume")
    assert result.returncode == 0 and "resumed from step 10" in result.stdout
    assert run.config("run").read_text() == "the record" and (run.path / "dry_run" / "plan.json").exists()
    assert dry_run(tmp_path, "--run.name", "first", "--clean").returncode == 0
    assert run.complete_checkpoints() == [10], "a dry run deleted something"


def test_the_table_has_a_line_for_all_ranks_of_a_trainer(config) -> None:
    plan = planned(config("--deployment.num-train-gpus", "4", "--dry-run"))
    lines = [line.split("  ") for line in table(plan).splitlines() if line.startswith("trainer")]
    [(name, threads, *_, devices, _)] = [[cell.strip() for cell in line if cell] for line in lines]
    assert (name, threads[-4:], devices[:4]) == ("trainer_0 to 3", "each", "GPU ")


def test_a_long_table_has_a_line_for_like_processes_of_many_nodes() -> None:
    def spec(role: str, rank: int, node: int, devices: str, **ports: int) -> ProcessSpec:
        return ProcessSpec(role, rank, 1 if role == "orchestrator" else 2, (), {}, tuple(devices), 1, ports, node=node)

    trainers = [spec("trainer", rank, rank // 2, str(rank % 2)) for rank in range(20)]
    engines = [spec("inference", i, 10 + i, "01", http=8100 + 100 * (i > 3), nixl=5600 + i) for i in range(6)]
    processes = [spec("orchestrator", 0, 0, "", control=5556), *trainers, *engines]
    hosts = [f"n{node}" for node in range(16)]
    lines = [line.split("  ") for line in process_table(processes, hosts).splitlines()[2:]]
    assert [[cell.strip() for cell in line if cell] for line in lines] == [
        ["orchestrator", "0: n0", "1", "CPU", "control:5556"],
        ["trainer_0 to 19", "0: n0 to 9: n9", "1 each", "GPU 0,1 each", "-"],
        ["inference_0 to 3", "10: n10 to 13: n13", "1 each", "GPU 0,1 each", "http:8100 nixl:5600-5603"],
        ["inference_4 to 5", "14: n14 to 15: n15", "1 each", "GPU 0,1 each", "http:8200 nixl:5604-5605"],
    ]
    few = process_table([*trainers[:4], *engines[:2]], hosts).splitlines()[2:]
    assert len(few) == 4, "a short table has a line per node and engine"


@pytest.mark.heavy
def test_a_missing_model_is_refused_before_anything_is_deleted(tmp_path: Path) -> None:
    file = tmp_path / "rl.toml"
    file.write_text(TOML.replace("models/tiny", "models/of/nobody"))
    run = RunDir(tmp_path / "first")
    with_checkpoint(run, 10)
    run.configs.mkdir()
    words = ["--output-dir", str(tmp_path), "--run.name", "first", "--clean"]
    command = [sys.executable, "-m", "stretto", "rl", "@", str(file), *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "there is no such directory" in result.stderr and "sft" in result.stderr
    assert run.complete_checkpoints() == [10]


# -- GPUs that this machine does not have --


def placed(plan: planning.LaunchPlan) -> dict[str, tuple[str, ...]]:
    return {spec.name: spec.devices for spec in plan.processes if spec.role != "orchestrator"}


def test_a_dry_run_on_a_machine_without_gpus_plans_for_those_of_the_deployment(config, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = ("--deployment.num-train-gpus", "2", "--deployment.num-infer-gpus", "4")
    words += ("--inference.parallel.tp", "2", "--inference.parallel.dp", "2", "--orchestrator.batch-size", "32")
    plan = planned(config(*words, "--dry-run"))
    assert placed(plan) == {"inference": ("0", "1", "2", "3"), "trainer_0": ("4",), "trainer_1": ("5",)}
    assert plan.config.inference.gpu_memory_utilization == 0.9
    assert any("this machine shows 0: the plan is for one with 6 GPUs" in note for note in plan.notes)
    assert placed(planned(config("--dry-run"))) == {"inference": (), "trainer": ()}, "nothing asks for a GPU"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--inference.parallel.tp", "4"), r"inference takes 4 GPUs \(tp 4\), and this machine shows 2"),
        (
            ("--deployment.num-train-gpus", "1", "--deployment.num-infer-gpus", "2", "--inference.parallel.tp", "2"),
            r"num_train_gpus = 1 and num_infer_gpus = 2 need 3 GPUs, and this machine shows 2",
        ),
    ],
)
def test_engines_that_need_more_gpus_than_there_are_are_refused(config, monkeypatch, words, message) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ConfigError, match=message):
        planned(config(*words))


@needs("routers")
def test_one_engine_has_a_router_if_one_is_configured(config) -> None:
    plan = planned(config("--inference.router.policy", "round_robin"))
    assert [spec.name for spec in plan.processes] == ["inference", "router", "orchestrator", "trainer"]
    [router] = plan.engines.routers
    assert "round_robin" in router.argv
    http = {spec.name: spec.ports.get("http") for spec in plan.processes}
    assert plan.config.orchestrator.client.base_url == f"http://127.0.0.1:{http['router']}/v1"
    assert plan.config.orchestrator.client.admin_base_url == [f"http://127.0.0.1:{http['inference']}/v1"]
    own = plan.configs()["inference"]
    assert own.server.port == http["inference"] and not own.router.is_needed
    assert [spec.name for spec in planned(config()).processes] == ["inference", "orchestrator", "trainer"]


@needs("routers")
@pytest.mark.parametrize("replicas", ["1", "2"])
def test_a_remote_router_works_with_local_engines(config, replicas) -> None:
    words = ("--inference.router.address", "http://10.0.0.9:3000", "--inference.deployment.num-replicas", replicas)
    plan = planned(config(*words))
    assert plan.config.orchestrator.client.base_url == "http://10.0.0.9:3000/v1"
    assert len(plan.config.orchestrator.client.admin_base_url) == int(replicas)
    assert not plan.engines.routers and plan.config.weight_broadcast.type == "shm"
