"""Files and flags compose; shared keys reach their places; a resolved config loads again to itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes.add_ons import needs
from pydantic import ValidationError

from stretto.base.errors import ConfigError
from stretto.config.describe import ROOTS
from stretto.config.load import dump, load, shown_text, write_json
from stretto.config.masks import masked
from stretto.config.root import (
    EvalConfig,
    InferenceConfig,
    OrchestratorConfig,
    RLConfig,
    SFTConfig,
    TrainerConfig,
    short_name,
)
from stretto.config.sections.trainer import SgdOptim, TrainerKeys

ENV = '[[orchestrator.env]]\nid = "sort-letters"\n'


def rl(folder: Path, *tomls: str, flags: str = "") -> RLConfig:
    """The config of files given left to right, then flags."""
    words = []
    for index, toml in enumerate(tomls):
        file = folder / f"{index}.toml"
        file.write_text(toml)
        words += ["@", str(file)]
    return load(RLConfig, words + flags.split())


# -- composition --


def test_files_compose_left_to_right_and_flags_override_them(tmp_path: Path) -> None:
    first = "max_steps = 10\nseed = 1\n[trainer.optim]\nlr = 1e-3\nweight_decay = 0.5\n" + ENV
    cfg = rl(tmp_path, first, "max_steps = 20\n[trainer.optim]\nlr = 1e-4\n", flags="--trainer.optim.lr 1e-5")
    assert (cfg.max_steps, cfg.seed) == (20, 1)
    assert (cfg.trainer.optim.lr, cfg.trainer.optim.weight_decay) == (1e-5, 0.5)


def test_arguments_of_an_environment_may_be_typed_with_hyphens_and_names_below_them_keep_theirs() -> None:
    at = "--orchestrator.env.0"
    cfg = load(RLConfig, [f"{at}.id", "dataset", f"{at}.args.label-key", "id", f"{at}.args.rewards.my-x", "1"])
    assert cfg.orchestrator.env[0].args == {"label_key": "id", "rewards": {"my-x": 1}}


def test_flags_override_files_wherever_they_stand(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("max_steps = 10\n" + ENV)
    assert load(RLConfig, ["--max-steps", "3", "@", f"{tmp_path}/a.toml"]).max_steps == 3
    assert load(RLConfig, [f"@{tmp_path}/a.toml", "--max-steps", "3", "--max-steps=4"]).max_steps == 4


def test_a_later_list_of_tables_replaces_an_earlier_one(tmp_path: Path) -> None:
    cfg = rl(tmp_path, ENV + ENV.replace("sort", "x"), '[[orchestrator.env]]\nid = "reverse-text"\n')
    assert [env.id for env in cfg.orchestrator.env] == ["reverse-text"]


@needs("prime")
def test_files_fill_sections(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text('max_steps = 7\n[model]\nname = "m"\n')
    (tmp_path / "orch.toml").write_text('batch_size = 16\n[model]\nname = "m"\n[[env]]\nid = "reverse-text"\n')
    (tmp_path / "infer.toml").write_text('[model]\nname = "m"\n')
    (tmp_path / "optim.json").write_text('{"lr": 0.25}')
    words = f"--trainer @ {tmp_path}/train.toml --orchestrator @{tmp_path}/orch.toml"
    words += f" --inference @ {tmp_path}/infer.toml --trainer.optim @ {tmp_path}/optim.json"
    cfg = load(RLConfig, words.split())
    assert cfg.inference is not None
    told = cfg.orchestrator_config()
    assert (cfg.model.name, cfg.inference.model, cfg.max_steps, told.max_steps) == ("m", "m", 7, 7)
    assert (cfg.orchestrator.batch_size, cfg.orchestrator.env[0].id, cfg.trainer.optim.lr) == (16, "reverse-text", 0.25)


def test_another_type_replaces_a_section_and_the_same_type_refines_it(tmp_path: Path) -> None:
    adamw = "[trainer.optim]\nlr = 0.5\nweight_decay = 0.25\n" + ENV
    assert rl(tmp_path, adamw, '[trainer.optim]\ntype = "sgd"\n').trainer.optim == SgdOptim()
    assert rl(tmp_path, adamw, flags="--trainer.optim.type sgd").trainer.optim == SgdOptim()
    # The order of flags does not matter: `type` says which section the others are for.
    cfg = rl(tmp_path, adamw, flags="--trainer.optim.momentum 0.5 --trainer.optim.type sgd")
    assert cfg.trainer.optim == SgdOptim(momentum=0.5)
    assert rl(tmp_path, adamw, flags="--trainer.optim.type adamw").trainer.optim.lr == 0.5
    cfg = rl(tmp_path, '[trainer.optim]\ntype = "sgd"\n' + ENV, "[trainer.optim]\nmomentum = 0.125\n")
    assert cfg.trainer.optim == SgdOptim(momentum=0.125)


FLAGS: dict[str, tuple[str, Any]] = {
    "--seed 5": ("seed", 5),
    "--seed=5": ("seed", 5),
    "--trainer.optim.lr 1e-5": ("trainer.optim.lr", 1e-5),
    "--trainer.optim.max-norm None": ("trainer.optim.max_norm", None),
    "--trainer.optim.max_norm None": ("trainer.optim.max_norm", None),
    "--no-trainer.optim.max-norm": ("trainer.optim.max_norm", None),
    "--clean": ("clean", True),
    "--clean true": ("clean", True),
    "--clean=false": ("clean", False),
    "--no-clean": ("clean", False),
    "--orchestrator.no-filter-zero-advantages": ("orchestrator.filter_zero_advantages", False),
    "--no-orchestrator.filter-zero-advantages": ("orchestrator.filter_zero_advantages", False),
    "--no-inference": ("inference", None),
    "--no-ckpt": ("ckpt", None),
    "--resume": ("resume.step", None),
    "--resume.step 4": ("resume.step", 4),
    "--run.name None": ("run.name", None),
    "--run.name 12": ("run.name", "12"),
    "--trainer-gpu-ids 0": ("trainer_gpu_ids", [0]),
    "--trainer-gpu-ids 0,1": ("trainer_gpu_ids", [0, 1]),
    "--trainer-gpu-ids 0 1": ("trainer_gpu_ids", [0, 1]),
    "--trainer-gpu-ids [0,1]": ("trainer_gpu_ids", [0, 1]),
    "--monitors.wandb": ("monitors.wandb.project", "stretto"),
    "--wandb.project p": ("monitors.wandb.project", "p"),
    "--monitors.wandb.tags a b": ("monitors.wandb.tags", ["a", "b"]),
    '--monitors.wandb.tags ["a","1"]': ("monitors.wandb.tags", ["a", "1"]),
    "--monitors.wandb.tags 7": ("monitors.wandb.tags", ["7"]),
    "--orchestrator.env.0.args.num 6": ("orchestrator.env.0.args", {"num": 6}),
    "--orchestrator.env.0.args.word six": ("orchestrator.env.0.args", {"word": "six"}),
    '--orchestrator.env.0.args {"my-key":"6"}': ("orchestrator.env.0.args", {"my-key": "6"}),
    "--orchestrator.env.1.id b": ("orchestrator.env.1.id", "b"),
    '--orchestrator.env [{"id":"c"}]': ("orchestrator.env.0.id", "c"),
    "--inference.server.port 8001": ("orchestrator.client.base_url", "http://127.0.0.1:8001/v1"),
    '--orchestrator.client.base-url ["http://127.0.0.1:8000/v1"]': (
        "orchestrator.client.base_url",
        ["http://127.0.0.1:8000/v1"],
    ),
    "--output-dir outputs2": ("output_dir", Path("outputs2")),
    "--orchestrator.eval.interval 5": ("orchestrator.eval.interval", 5),
}


@pytest.mark.parametrize("flag", FLAGS)
@needs("prime")
def test_a_flag_sets_what_it_says(flag: str, tmp_path: Path) -> None:
    path, expected = FLAGS[flag]
    value: Any = rl(tmp_path, ENV, flags=flag)
    for part in path.split("."):
        value = value[int(part)] if part.isdigit() else getattr(value, part)
    assert value == expected


def test_a_list_item_is_refined_without_losing_the_others(tmp_path: Path) -> None:
    cfg = rl(tmp_path, ENV + 'ratio = 2.0\n[[orchestrator.env]]\nid = "b"\n', flags="--orchestrator.env.0.ratio 3")
    assert [(env.id, env.ratio) for env in cfg.orchestrator.env] == [("sort-letters", 3.0), ("b", 1.0)]


@needs("prime")
def test_none_in_a_file_is_none_where_none_is_allowed(tmp_path: Path) -> None:
    cfg = rl(tmp_path, 'inference = "None"\n[trainer]\nckpt = "None"\n' + ENV + 'args = { word = "None" }\n')
    assert cfg.inference is None and cfg.trainer_config().ckpt is None and cfg.ckpt is None
    assert cfg.orchestrator.env[0].args == {"word": "None"}


def test_text_of_an_environment_stays_text(tmp_path: Path) -> None:
    assert rl(tmp_path, ENV + 'args = { alphabet = "123" }\n').orchestrator.env[0].args == {"alphabet": "123"}


# -- spellings of prime-rl --


ALIASES = {
    "orchestrator.rollouts_per_example = 4": ("orchestrator.group_size", 4),
    "orchestrator.sampling.max_tokens = 9": ("orchestrator.train.sampling.max_completion_tokens", 9),
    "orchestrator.max_inflight_requests = 64": ("orchestrator.max_inflight_rollouts", 64),
    'orchestrator.student.client.api_key_var = "K"': ("orchestrator.client.api_key_var", "K"),
    'orchestrator.wandb.project = "p"': ("monitors.wandb.project", "p"),
    'inference.model.name = "m"': ("model.name", "m"),
    'inference.vllm.model = "m"': ("model.name", "m"),
    "inference.tensor_parallel_size = 1": ("inference.parallel.tp", 1),
    "trainer.model.seq_len = 77": ("seq_len", 77),
    "orchestrator.eval.rollouts_per_example = 3": ("orchestrator.eval.group_size", 3),
    'weight_broadcast.type = "nccl"': ("weight_broadcast.type", "collective"),
}


@pytest.mark.parametrize("line", ALIASES)
@needs("prime")
def test_other_spellings_are_accepted_in_files_and_flags(line: str, tmp_path: Path) -> None:
    path, expected = ALIASES[line]
    key, _, text = line.partition(" = ")
    flag = f"--{key.replace('_', '-')} {json.loads(text)}"
    for cfg in (rl(tmp_path, f"{line}\n{ENV}"), rl(tmp_path, ENV, flags=flag)):
        value: Any = cfg
        for part in path.split("."):
            value = getattr(value, part)
        assert value == expected


@needs("prime")
def test_a_bare_flag_is_true_where_a_key_takes_words_too(tmp_path: Path) -> None:
    assert rl(tmp_path, ENV, flags="--trainer.model.fp8").model.fp8 is True
    assert rl(tmp_path, ENV, flags="--trainer.model.fp8 reference").model.fp8 == "reference"
    assert rl(tmp_path, ENV, flags="--no-trainer.model.fp8").model.fp8 is False


@needs("prime")
def test_an_alias_in_one_file_is_overridden_by_its_key_in_a_later_one(tmp_path: Path) -> None:
    first = "[orchestrator]\nrollouts_per_example = 4\n" + ENV
    assert rl(tmp_path, first, "[orchestrator]\ngroup_size = 16\n").orchestrator.group_size == 16
    assert rl(tmp_path, first, flags="--orchestrator.group-size 2").orchestrator.group_size == 2


EXAMPLES = sorted((Path(__file__).parents[3] / "examples").rglob("*.toml"))


# The recipes' files are combined, which tests/unit/docs/test_recipes.py does.
@pytest.mark.parametrize(
    "file", [file for file in EXAMPLES if file.parent.name != "broken" and file.stem in ROOTS], ids=str
)
@needs("prime")
def test_every_example_loads(file: Path) -> None:
    assert load(ROOTS[file.stem], ["@", str(file)])


# -- shared keys --


def test_root_keys_fill_the_sections(tmp_path: Path) -> None:
    root = (
        'max_steps = 5\nseq_len = 99\nseed = 3\n[model]\nname = "m"\ndtype = "bfloat16"\n'
        '[tokenizer]\nname = "t"\n'
        '[ckpt]\ninterval = 2\n[log]\nlevel = "debug"\n[rollout_transport]\ntype = "filesystem"\n'
        '[weight_broadcast]\ntype = "filesystem"\nkeep_versions = 3\n[control]\nport = 6000\n'
        "[monitors.tensorboard]\n"
    )
    cfg = rl(tmp_path, root + ENV)
    trainer, orchestrator, inference = cfg.trainer_config(), cfg.orchestrator_config(), cfg.inference
    assert inference is not None
    for section in (trainer, orchestrator):
        assert (section.max_steps, section.seq_len, section.seed) == (5, 99, 3)
        assert (section.model, section.tokenizer) == (cfg.model, cfg.tokenizer)
        assert (section.weight_broadcast, section.rollout_transport) == (cfg.weight_broadcast, cfg.rollout_transport)
        assert (section.control.port, section.monitors, section.log) == (6000, cfg.monitors, cfg.log)
    assert trainer.ckpt is not None and trainer.ckpt.interval == 2
    assert (inference.model, inference.dtype, inference.seed, inference.log) == ("m", "bfloat16", 3, cfg.log)


@needs("prime")
def test_what_a_section_says_of_the_run_holds_for_all(tmp_path: Path) -> None:
    toml = '[trainer]\nseed = 9\nmax_steps = 4\n[trainer.model]\nname = "m"\nimpl = "hf"\n'
    toml += "[orchestrator]\nseq_len = 50\n"
    cfg = rl(tmp_path, toml + '[orchestrator.weight_broadcast]\ntype = "filesystem"\n' + ENV)
    trainer, orchestrator = cfg.trainer_config(), cfg.orchestrator_config()
    assert (cfg.model.name, orchestrator.model.name, cfg.max_steps, trainer.seq_len) == ("m", "m", 4, 50)
    assert trainer.weight_broadcast == cfg.weight_broadcast == orchestrator.weight_broadcast
    assert (cfg.seed, orchestrator.seed, cfg.model.impl, orchestrator.model.impl) == (9, 9, "hf", "hf")


@needs("prime")
def test_equal_values_in_several_places_are_fine(tmp_path: Path) -> None:
    assert rl(tmp_path, "max_steps = 4\n[trainer]\nmax_steps = 4\n" + ENV, flags="--orchestrator.max-steps 4")


def test_sections_may_be_given_as_objects() -> None:
    trainer = TrainerKeys(optim=SgdOptim(lr=0.5))
    cfg = RLConfig.model_validate({"trainer": trainer, "max_steps": 6, "orchestrator": {"env": [{"id": "a"}]}})
    assert (cfg.trainer_config().max_steps, cfg.trainer.optim) == (6, SgdOptim(lr=0.5))


@needs("prime")
def test_files_of_two_processes_that_disagree_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text("max_steps = 20\n")
    (tmp_path / "orch.toml").write_text('max_steps = 40\n[[env]]\nid = "a"\n')
    with pytest.raises(ConfigError) as caught:
        load(RLConfig, ["--trainer", "@", f"{tmp_path}/train.toml", "--orchestrator", "@", f"{tmp_path}/orch.toml"])
    words = "trainer.max_steps = 20 but orchestrator.max_steps = 40; give it once, as max_steps"
    assert f"{tmp_path}/train.toml:1, {tmp_path}/orch.toml:1: {words}" in str(caught.value)


@needs("prime")
def test_the_engine_may_start_from_another_precision_of_the_model_that_is_trained(tmp_path: Path) -> None:
    """The trainer is told; a name that only the engine has is that of both."""
    both = rl(tmp_path, '[trainer.model]\nname = "org/GLM"\n[inference.model]\nname = "org/GLM-FP8"\n' + ENV)
    assert (both.model.name, both.inference.model) == ("org/GLM", "org/GLM-FP8")
    assert both.trainer_config().weight_broadcast.engine_model == "org/GLM-FP8"
    one = rl(tmp_path, '[inference.model]\nname = "org/GLM"\n' + ENV)
    assert (one.model.name, one.inference.model, one.weight_broadcast.engine_model) == ("org/GLM", "org/GLM", None)
    same = rl(tmp_path, '[model]\nname = "org/GLM"\n' + ENV)
    assert (same.inference.model, same.weight_broadcast.engine_model) == ("org/GLM", None)


@needs("prime")
def test_a_flag_overrides_a_file_in_any_spelling(tmp_path: Path) -> None:
    cfg = rl(
        tmp_path, '[trainer]\nmax_steps = 4\n[model]\nname = "a"\n' + ENV, flags="--max-steps 5 --trainer.model.name b"
    )
    assert (cfg.max_steps, cfg.model.name, cfg.inference.model) == (5, "b", "b")


@needs("prime")
def test_raw_data_given_to_a_root_is_not_changed() -> None:
    data = {"max_steps": 3, "orchestrator": {"env": [{"id": "a"}], "rollouts_per_example": 4}, "inference": "None"}
    before = json.dumps(data)
    assert RLConfig.model_validate(data).orchestrator.group_size == 4
    assert json.dumps(data) == before


def test_named_gpus_are_trainer_ranks(tmp_path: Path) -> None:
    assert rl(tmp_path, ENV, flags="--trainer-gpu-ids 6,7").orchestrator.num_train_workers == 2
    assert rl(tmp_path, ENV, flags="--deployment.num-train-gpus 4").orchestrator.num_train_workers == 4
    assert rl(tmp_path, ENV).orchestrator.num_train_workers == 1


def test_trainer_and_engine_share_a_gpu_when_memory_is_left(tmp_path: Path) -> None:
    flags = "--trainer-gpu-ids 0 --inference-gpu-ids 0 --inference.gpu-memory-utilization 0.5"
    assert rl(tmp_path, ENV, flags=flags).inference_gpu_ids == [0]


# -- resolved configs --


EVERYTHING = (
    'max_steps = 50\n[tokenizer]\nname = "t"\n'
    '[trainer]\nseed = 4\n[trainer.scheduler]\ntype = "cosine"\n'
    '[trainer.model]\nimpl = "custom"\n[trainer.log]\nlevel = "debug"\n[orchestrator.algo]\ntype = "zero"\n'
    "[trainer.loss]\nkl_tau = 0.0\n"
    "[orchestrator.eval]\ninterval = 10\n[monitors.wandb]\noffline = true\n[inference.server]\nport = 8123\n"
    '[weight_broadcast]\ntype = "filesystem"\n' + ENV + 'args = { length = 6, letters = "abc" }\n'
)


@needs("prime")
def test_a_dumped_config_loads_to_an_equal_one(tmp_path: Path) -> None:
    for number, toml in enumerate((ENV, EVERYTHING)):
        cfg = rl(tmp_path, toml, flags="--seq-len 128")
        file = tmp_path / f"{number}.json"
        write_json(file, dump(cfg))
        again = load(RLConfig, ["@", str(file)])
        assert again == cfg
        assert dump(again) == dump(cfg)


@needs("prime")
def test_each_process_gets_its_section_and_the_runs_whereabouts(tmp_path: Path) -> None:
    cfg = rl(tmp_path, EVERYTHING, flags="--seq-len 128 --output-dir o --run.name r --resume.step 3")
    parts = {
        TrainerConfig: (cfg.trainer_config(), cfg.trainer),
        OrchestratorConfig: (cfg.orchestrator_config(), cfg.orchestrator),
        InferenceConfig: (cfg.inference_config(), cfg.inference),
    }
    for number, (cls, (child, section)) in enumerate(parts.items()):
        assert section is not None
        assert child.run_path == cfg.run_path == Path("o/r")
        assert child.run_dir == cfg.run_dir
        assert child.resume == cfg.resume and not child.dry_run
        assert all(getattr(child, name) == getattr(section, name) for name in type(section).model_fields)
        file = tmp_path / f"{number}.json"
        write_json(file, dump(child))
        assert load(cls, ["@", str(file)]) == child


@needs("prime")
def test_the_other_roots_load_again_too(tmp_path: Path) -> None:
    sft = load(
        SFTConfig,
        [
            "--data.type",
            "environment",
            "--data.id",
            "sort-letters",
            "--max-steps",
            "3",
            "--val.data.type=file",
            "--val.data.name=a",
        ],
    )
    ev = load(EvalConfig, ["--model.name", "m", "--env.0.id", "sort-letters"])
    for number, cfg in enumerate((sft, ev)):
        write_json(tmp_path / f"{number}.json", dump(cfg))
        assert load(type(cfg), ["@", str(tmp_path / f"{number}.json")]) == cfg


def test_a_run_is_named_after_what_is_trained() -> None:
    env = {"env": [{"id": "sort-letters"}, {"id": "reverse-text", "name": "rev"}]}
    cfg = RLConfig.model_validate({"orchestrator": env, "model": {"name": "outputs/warm/weights/latest"}})
    assert cfg.run_path == Path("outputs/sort-letters+rev-warm")
    assert load(InferenceConfig, ["--model", "Qwen/Qwen3-0.6B"]).run_name == "rl-Qwen3-0.6B"
    names = {"Qwen/Qwen3-0.6B": "Qwen3-0.6B", "a/b/weights/step_40/": "b", "./m": "m", "latest": "latest", "~/x": "x"}
    assert {name: short_name(name) for name in names} == names


def test_configs_cannot_change_after_loading(tmp_path: Path) -> None:
    cfg = rl(tmp_path, ENV)
    with pytest.raises(ValidationError):
        cfg.trainer.seed = 4  # type: ignore[misc]


def test_roots_and_sections_know_no_rules() -> None:
    config = Path(__file__).parents[3] / "src" / "stretto" / "config"
    for file in [config / "root.py", config / "section.py", *(config / "sections").glob("*.py")]:
        assert "config.rules" not in file.read_text(), file


def test_every_root_has_docs_for_every_key() -> None:
    from stretto.config.section import all_paths

    for verb, cls in ROOTS.items():
        undocumented = [path for path, _, key in all_paths(cls) if not key.doc]
        assert not undocumented, (verb, undocumented)


def test_changes_alone_are_warned_of_where_trainer_and_engines_share_a_machine(tmp_path, caplog):
    path = tmp_path / "c.toml"
    path.write_text('[weight_broadcast]\ntype = "collective"\n[weight_broadcast.delta]\n[inference]\n' + ENV)
    load(RLConfig, ["@", str(path)])
    [record] = caplog.records
    assert record.message.startswith(f"warning: {path}:3: [weight_broadcast.delta]: trainer and engines are on one")
    caplog.clear()
    path.write_text('[weight_broadcast]\ntype = "collective"\n[inference]\n' + ENV)
    load(RLConfig, ["@", str(path)])
    assert not caplog.records


def test_what_finishes_first_is_warned_of_where_the_rest_grows_too_old(tmp_path, caplog):
    path = tmp_path / "c.toml"
    path.write_text('[orchestrator]\nbatch_order = "finished"\nmax_off_policy_steps = 2\nmax_async_level = 2\n' + ENV)
    load(RLConfig, ["@", str(path)])
    [record] = caplog.records
    assert record.message.startswith(f"warning: {path}:2, {path}:3, {path}:4: orchestrator.batch_order = ")
    assert "which is below orchestrator.max_async_level + 1 = 3" in record.message
    caplog.clear()
    load(RLConfig, ["@", str(path), "--orchestrator.max-off-policy-steps", "3"])
    load(RLConfig, ["@", str(path), "--orchestrator.batch-order", "dispatch"])
    assert not caplog.records


def test_an_engine_says_what_it_drew_from_where_that_is_replayed(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(ENV)
    words = ["@", str(path), "--orchestrator.train.replay"]
    assert load(RLConfig, words).inference.enable_return_sampling_mask
    assert not load(RLConfig, words[:2]).inference.enable_return_sampling_mask
    assert load(RLConfig, [*words, "--no-inference"]).inference is None


@pytest.mark.heavy
def test_a_process_takes_its_part_of_a_whole_runs_config(tmp_path):
    rl = tmp_path / "rl.toml"
    rl.write_text(
        "max_steps = 7\n[deployment]\nnum_train_gpus = 4\n[trainer.optim]\nlr = 1e-4\n"
        '[[orchestrator.env]]\nid = "sort-letters"\n[inference.server]\nport = 8123\n'
    )
    resolved = tmp_path / "run.json"
    write_json(resolved, dump(load(RLConfig, ["@", str(rl)])))
    for path in (str(rl), str(resolved)):
        words = ["@", path, "--trainer.optim.lr", "1e-3", "--output-dir", str(tmp_path)]
        whole = load(RLConfig, words)
        trainer = load(TrainerConfig, words)
        orchestrator = load(OrchestratorConfig, words)
        inference = load(InferenceConfig, words)
        assert trainer == whole.trainer_config() and trainer.optim.lr == 1e-3
        assert orchestrator == whole.orchestrator_config() and orchestrator.num_train_workers == 4
        assert inference == whole.inference_config() and inference.server.port == 8123
        assert trainer.run_path == orchestrator.run_path == inference.run_path == whole.run_path
    # A flag that `rl` does not have is the process's own.
    assert load(TrainerConfig, ["@", str(resolved), "--optim.lr", "0.5"]).optim.lr == 0.5
    own = load(InferenceConfig, ["@", str(resolved), "--gpu-memory-utilization", "0.4", "--no-enforce-eager"])
    assert own.gpu_memory_utilization == 0.4 and not own.enforce_eager
    over = ["--inference.deployment.type", "multi_node", "--inference.deployment.num_nodes", "2"]
    own = load(InferenceConfig, ["@", str(rl), "--hosts", "10.0.0.1", "10.0.0.2", *over, "--node-rank=1"])
    assert (own.hosts, own.node_rank, own.num_nodes) == (["10.0.0.1", "10.0.0.2"], 1, 2)
    with pytest.raises(ConfigError, match="--node-rank -1"):
        load(InferenceConfig, ["@", str(rl), "--node-rank", "-1"])
    with pytest.raises(ConfigError, match=r"--optim\.lr x: .*trainer\.optim\.lr"):
        load(TrainerConfig, ["@", str(resolved), "--optim.lr", "x"])
    with pytest.raises(ConfigError, match="none to start"):
        load(InferenceConfig, ["@", str(resolved), "--no-inference"])


def test_a_file_of_a_processs_own_keys_is_not_taken_for_a_runs(tmp_path):
    path = tmp_path / "train.toml"
    path.write_text("max_steps = 7\n[optim]\nlr = 1e-4\n")
    assert load(TrainerConfig, ["@", str(path), "--optim.lr", "1e-3"]).optim.lr == 1e-3


def test_only_the_owner_reads_a_config_with_a_key_in_it(tmp_path):
    keyed, open_ = tmp_path / "keyed.json", tmp_path / "open.json"
    write_json(keyed, {"eval": {"inference": {"api_key": "s3cret"}}})
    write_json(open_, {"inference": {"api_key": None}})
    assert keyed.stat().st_mode & 0o077 == 0 and open_.stat().st_mode & 0o044


def test_variables_that_hold_a_key_are_not_shown():
    data = {"env_vars": {"WANDB_API_KEY": "s3cret", "HF_TOKEN": "s3cret", "TOKENIZERS_PARALLELISM": "false"}}
    shown = {"WANDB_API_KEY": "***", "HF_TOKEN": "***", "TOKENIZERS_PARALLELISM": "false"}
    assert masked(data) == {"env_vars": shown}
    words = ["--data.type", "file", "--data.name", "x", "--max-steps", "1"]
    cfg = load(SFTConfig, [*words, "--env-vars", json.dumps(data["env_vars"])])
    assert "s3cret" not in shown_text(cfg) and "PARALLELISM" in shown_text(cfg)
