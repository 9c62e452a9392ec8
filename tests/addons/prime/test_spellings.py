"""Keys of prime-rl: none is missing from the table, each leads to a key of ours or says what to write."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes.add_ons import needs

from stretto.base.errors import ConfigError
from stretto.config.describe import help_text
from stretto.config.load import load
from stretto.config.lookup import rows_of
from stretto.config.root import EvalConfig, InferenceConfig, OrchestratorConfig, RLConfig, SFTConfig, TrainerConfig
from stretto.config.section import all_paths, keys, meant
from stretto.config.sections.orchestrator import ClientSection
from stretto.launch.plan.engines import plan_engines
from stretto.orchestrator.clients import headers_of
from stretto.orchestrator.main import build_bounds
from stretto_prime.spelled import WITH_TABLES, Entry, State, entries, follow, markdown
from stretto_prime.table import TABLES

ROOT = Path(__file__).parents[3]
LISTED = (ROOT / "tests" / "cases" / "prime_rl" / "keys.txt").read_text().splitlines()
ENTRIES = {(entry.table.verb, entry.theirs): entry for _, entry in entries()}
ENV = '[[orchestrator.env]]\nid = "sort-letters"\n'


def listed() -> list[tuple[str, str]]:
    """Verb and path of every key of the list."""
    found = []
    for line in LISTED:
        if not line.startswith("#"):
            (verb, *table), names = line.partition(":")[0].split(), line.partition(":")[2].split()
            found += [(verb, ".".join([*table, name])) for name in names]
    return found


def rl(folder: Path, toml: str, *flags: str) -> RLConfig:
    path = folder / "rl.toml"
    path.write_text(toml)
    return load(RLConfig, ["@", str(path), *flags], verb="rl")


def test_no_key_of_prime_rl_is_missing():
    assert len(listed()) > 330
    assert [key for key in listed() if key not in ENTRIES] == []


def test_a_key_leads_to_one_of_ours_or_says_what_to_write():
    for key, entry in ENTRIES.items():
        if entry.state is State.REFUSED:
            assert len(entry.row.instead) > 20, key
        elif entry.state is State.IDLE:
            assert entry.row.note, key
        else:
            assert leads_somewhere(entry), f"{key} leads to {entry.ours}, which is no key"


def leads_somewhere(entry: Entry) -> bool:
    written = ".".join(filter(None, (entry.table.path, entry.row.theirs.replace("*", "NAME"))))
    found = follow(WITH_TABLES[entry.table.verb], written)
    is_item = not found.rest and isinstance(found.path[-1], int)
    return found.is_known or is_item or (found.key is not None and (found.key.is_free_table or found.key.is_list))


def test_names_of_ours_are_no_names_of_others():
    """A key of ours is not renamed, for its own path would then not reach it."""
    for root in (RLConfig, SFTConfig, EvalConfig, TrainerConfig, OrchestratorConfig, InferenceConfig):
        for path, _, _ in all_paths(root):
            found = follow(root, path)
            assert ".".join(map(str, found.path)) == path and not found.rest, path


def test_every_table_is_of_a_section_that_exists():
    sections = {section.__name__ for root in WITH_TABLES.values() for _, section, _ in all_paths(root)}
    above = {
        parent.__name__ for root in WITH_TABLES.values() for _, cls, _ in all_paths(root) for parent in cls.__mro__
    }
    assert {table.section for table in TABLES} - {""} <= sections | above
    assert all(rows_of(name) is not None for name in sections)


def test_the_page_lists_every_key():
    page = markdown()
    assert not [name for name in ("@COUNTS@", "@DEFAULTS@", "@REFUSED@", "@TABLES@") if name in page]
    for _, entry in entries():
        assert f"`{entry.row.theirs}`" in page, entry.theirs


VALUES = {
    'weight_broadcast.type = "nccl"': "weight_broadcast.type",
    'trainer.model.quantization = { type = "fp8" }': "model.fp8",
    "orchestrator.eval = { num_examples = -1 }": "orchestrator.eval.num_examples",
    'inference.router.type = "vllm-router"': "inference.router.type",
    "orchestrator.concurrency = { max_inflight = 64, min_inflight = 8 }": "orchestrator.concurrency",
    "orchestrator.buffer.online_difficulty_filtering = true": "orchestrator.filter_zero_advantages",
    'inference.vllm = { model = "m", tensor_parallel_size = 2, max_num_active_seqs = 3 }': "inference",
    'orchestrator.post_batch_filters = [{ type = "gibberish", enforce = true }]': "orchestrator.filters",
    "orchestrator.train.sampling.extra_body = { top_k = -1 }": "orchestrator.train.sampling.top_k",
    "trainer.metrics_server = {}": "monitors.prometheus.port",
    "orchestrator.batch_size = 64\norchestrator.token_batch_size = 4096": "orchestrator.token_batch_size",
    'trainer.memory_profiler_path = "snapshots"': "trainer.memory_profiler_path",
    'inference.model = { name = "m", max_model_len = 4096 }': "inference.max_model_len",
    'resume.dir = "a"\ntrainer.ckpt.skip_progress = true': "resume.skip_progress",
    "trainer.ckpt.weights_only = true": "ckpt.skip_optimizer",
    "orchestrator.mask_truncated_completions = true": "orchestrator.mask_truncated_completions",
    'trainer.model.fused_lm_head_token_chunk_size = "disabled"': "model.fused_lm_head_token_chunk_size",
    'slurm.project_dir = "there"': "slurm.project_dir",
    "orchestrator.eval.max_retries = 5": "orchestrator.eval.max_rollout_retries",
}
EXPECTED = [
    "collective", True, None, "vllm", ("adaptive", 8, 64), True, ("m", 2, {"max_num_active_seqs": 3}),
    [("gibberish", True)], None, 9400, 4096, Path("snapshots"), 4096, True, True, True, 2048, Path("there"), 5,
]  # fmt: skip


@pytest.mark.parametrize("line, expected", list(zip(VALUES, EXPECTED)), ids=list(VALUES))
def test_values_are_said_in_our_words(line, expected, tmp_path):
    cfg = rl(tmp_path, f"{line}\n{ENV}")
    value = cfg
    for part in VALUES[line].split("."):
        value = getattr(value, part)
    match VALUES[line].split(".")[-1]:
        case "concurrency":
            value = (value.type, value.min_rollouts, value.max_rollouts)
        case "inference":
            value = (value.model, value.parallel.tp, value.vllm_extra)
        case "filters":
            value = [(each.type, each.enforce) for each in value]
    assert value == expected


def test_an_environment_has_its_own_retries_and_deadline_and_may_stand_in_one_table(tmp_path):
    source = 'id = "sort-letters"\npool = { type = "elastic" }\nmax_retries = 5\ntimeout = 9\n'
    toml = f"[[orchestrator.train.source]]\n{source}[[orchestrator.eval.source]]\n{source}"
    cfg = rl(tmp_path, toml).orchestrator
    assert cfg.eval is not None
    for env in (cfg.env[0], cfg.eval.env[0]):
        assert (env.max_rollout_retries, env.rollout_timeout_s, env.num_workers) == (5, 9, None)
    toml = '[orchestrator.environment]\nid = "sort-letters"\nargs = { num_letters = 4 }\n'
    (env,) = rl(tmp_path, toml).orchestrator.env
    assert (env.id, env.args) == ("sort-letters", {"num_letters": 4})


SOURCES = {
    "0.8": '[[orchestrator.train.source]]\nenv.taskset = { id = "a-v1", level = 2 }\n'
    'env.agent.harness = { id = "null", runtime = { type = "subprocess" } }\nenv.agent.max_turns = 3\n',
    "0.7": '[[orchestrator.train.env]]\ntaskset = { id = "a-v1", level = 2 }\n'
    'harness = { id = "null", runtime = { type = "subprocess" } }\nargs = { agent = { max_turns = 3 } }\n',
}


@pytest.mark.parametrize("toml", SOURCES.values(), ids=list(SOURCES))
def test_a_taskset_with_a_harness_is_an_environment_of_verifiers(toml, tmp_path):
    (env,) = rl(tmp_path, toml).orchestrator.env
    assert (env.id, env.name) == ("verifiers", "a-v1")
    assert env.args == {
        "taskset": {"id": "a-v1", "level": 2},
        "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 3},
    }


def test_a_name_that_is_given_stays(tmp_path):
    toml = '[[orchestrator.train.source]]\nenv.taskset.id = "a-v1"\nname = "mine"\n'
    assert rl(tmp_path, toml).orchestrator.env[0].name == "mine"
    assert rl(tmp_path, toml, "--orchestrator.train.source.0.name", "x").orchestrator.env[0].name == "x"


def test_nodes_of_inference_shape_it(tmp_path):
    toml = '[deployment]\ntype = "multi_node"\nnum_train_nodes = 4\nnum_infer_nodes = 12\nnodes_per_fsdp_group = 2\n'
    cfg = rl(tmp_path, toml + "[inference.vllm]\ntensor_parallel_size = 4\n" + ENV, "--dry-run")
    assert cfg.inference is not None and cfg.model.dp_replicate == 2
    shape, parallel = cfg.inference.deployment, cfg.inference.parallel
    assert (shape.type, shape.num_nodes, parallel.tp, parallel.dp) == ("multi_node", 12, 4, 2)


REFUSED = {
    'trainer.trace_path = "t"': 'rl.toml:1: trainer.trace_path = "t": give --profile STEPS on',
    'weight_broadcast.type = "nixl"': 'rl.toml:1: weight_broadcast.type = "nixl": weights do not travel by NIXL',
    'trainer.model.quantization = { type = "mxfp8" }': "only 128-block floats are here; write fp8 = true",
    "trainer.ckpt.skip_progress = true": "rl.toml:1: resume.skip_progress = true begins a run of its own",
    "trainer.data.fake.batch_size = 2": "rl.toml:1: trainer.data.fake.batch_size = 2: made-up data are what",
    'trainer.modle.name = "m"': "rl.toml:1: trainer.modle: unknown key; did you mean",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_refused_key_says_where_it_stands_and_what_to_write(line, tmp_path):
    with pytest.raises(ConfigError) as caught:
        rl(tmp_path, f"{line}\n{ENV}")
    assert REFUSED[line] in str(caught.value)


def test_flags_are_refused_as_keys_are():
    with pytest.raises(ConfigError, match=r"--trainer\.trace-path t: .*give --profile STEPS"):
        load(RLConfig, ["--trainer.trace-path", "t", "--orchestrator.env", '[{"id": "sort-letters"}]'])
    with pytest.raises(ConfigError, match=r"--bench: .*on the command line"):
        load(RLConfig, ["--bench", "--orchestrator.env", '[{"id": "sort-letters"}]'])


def test_values_that_hold_anyway_are_accepted(tmp_path, caplog):
    lines = 'trainer.model.moe_router_dtype = "float32"\ntrainer.model.index_cache.topk_freq = 1\n'
    assert rl(tmp_path, f"{lines}trainer.gc.interval = 9\n{ENV}").max_steps is None
    assert "trainer.gc.interval decides nothing here" in caplog.text


def test_a_number_that_counts_something_else_is_noted(tmp_path, caplog):
    path = tmp_path / "sft.toml"
    path.write_text('max_steps = 1\n[data]\nname = "x"\nbatch_size = 8\n')
    cfg = load(SFTConfig, ["@", str(path)])
    assert cfg.batch_size == 8 and f"{path}:4: data.batch_size: examples are counted here" in caplog.text


def test_the_orchestrators_model_is_that_of_the_engines_where_the_trainer_has_its_own(tmp_path):
    trainer, orchestrator = '[trainer.model]\nname = "m"\n', '[orchestrator.model]\nname = "m-fp8"\n'
    for toml in (trainer + orchestrator, orchestrator + trainer):
        cfg = rl(tmp_path, toml + ENV)
        assert cfg.inference is not None and (cfg.model.name, cfg.inference.model) == ("m", "m-fp8")
    other = rl(tmp_path, orchestrator + ENV, "--model.name", "k")
    assert other.inference is not None and (other.model.name, other.inference.model) == ("k", "k")
    alone = rl(tmp_path, orchestrator + ENV, "--no-inference", "--weight-broadcast.type", "filesystem")
    assert (alone.model.name, alone.inference) == ("m-fp8", None)
    with pytest.raises(ConfigError, match=r'inference\.model = "k" .*orchestrator\.model\.name = "m-fp8"'):
        rl(tmp_path, f'inference.model = "k"\n{trainer}{orchestrator}{ENV}')


def test_the_trainers_length_beside_the_orchestrators_is_that_of_its_rows(tmp_path, caplog):
    trainer, orchestrator = "trainer.model.seq_len = 512\n", "orchestrator.seq_len = 128\n"
    for toml in (trainer + orchestrator, orchestrator + trainer):
        cfg = rl(tmp_path, toml + ENV)
        assert (cfg.seq_len, cfg.orchestrator.row_tokens, cfg.row_tokens) == (128, 512, 512)
    assert rl(tmp_path, trainer + ENV).row_tokens == rl(tmp_path, trainer + ENV).seq_len == 512
    short = rl(tmp_path, f"trainer.model.seq_len = 64\n{orchestrator}{ENV}")
    assert (short.seq_len, short.row_tokens) == (128, 64)


def test_filters_before_and_after_a_batch_are_one_list(tmp_path):
    pre, post = "[[orchestrator.pre_batch_filters]]\n", "[[orchestrator.post_batch_filters]]\n"
    toml = f'{pre}type = "gibberish"\n{post}type = "repetition"\nwindow = 9\n{post}type = "zero_advantage"\n'
    found = rl(tmp_path, toml + ENV).orchestrator.filters
    assert [each.type for each in found] == ["gibberish", "repetition", "zero_advantage"]


def sft_data(tmp_path, lines: str) -> list[str]:
    path = tmp_path / "sft.toml"
    path.write_text(f"max_steps = 1\n[data]\n{lines}\n")
    data = load(SFTConfig, ["@", str(path)]).data
    return [*data.sources, data.probabilities]


@needs("sft")
def test_subsets_and_sources_of_sft_are_data_sets_of_the_hub(tmp_path):
    two = ["A/B:x[train]", "A/B:y[test]"]
    assert sft_data(tmp_path, 'name = "A/B"\nsubsets = ["x", "y"]\nsplits = ["train", "test"]') == [*two, "equal"]
    shares = sft_data(tmp_path, 'name = "A/B"\nsubsets = ["x", "y"]\nprobabilities = [0.2, 0.8]')
    assert shares == ["A/B:x[train]", "A/B:y[train]", [0.2, 0.8]]
    source = '[[data.source]]\ndataset = "A/B"\nsplit = "math"\n'
    assert sft_data(tmp_path, source) == ["A/B[math]", "equal"]
    assert sft_data(tmp_path, source + source.replace("B", "C")) == ["A/B[math]", "A/C[math]", "equal"]
    with pytest.raises(ConfigError, match=r"sft.toml:5: data.splits has 1 .*2 data sets"):
        sft_data(tmp_path, 'name = "A/B"\nsubsets = ["x", "y"]\nsplits = ["train"]')


def test_experimental_keys_are_not_passed_over(tmp_path):
    assert rl(tmp_path, f"experimental = {{}}\ntrainer.experimental = {{}}\n{ENV}")
    with pytest.raises(ConfigError, match=r"trainer\.experimental\.lora\.rank = 8: .*experimental"):
        rl(tmp_path, f"[trainer.experimental.lora]\nrank = 8\n{ENV}")


def test_oversampling_is_relative_to_one_batch(tmp_path, caplog):
    def bounds(*lines):
        cfg = rl(tmp_path, "[orchestrator]\nbatch_size = 32\ngroup_size = 4\n" + "\n".join([*lines, ENV]))
        found = build_bounds(cfg.orchestrator_config())
        return found.num_slots, found.max_running_groups

    assert bounds() == (16, None)
    assert bounds("oversampling_factor = 1") == (16, 8)
    assert bounds("oversampling_factor = 3") == (24, 24)
    assert bounds("oversampling_factor = 3", "max_inflight_rollouts = 40") == (24, 10)
    assert not caplog.records
    assert bounds("max_inflight_rollouts = 256") == (16, 64)
    assert "64 rollouts are in flight at most; for more give oversampling_factor = 8" in caplog.text


def test_a_part_of_a_file_serves_its_process_alone(tmp_path):
    path = tmp_path / "part.toml"
    path.write_text('[inference]\nmodel = "m"\n[inference.deployment]\ntype = "disaggregated"\n')
    assert load(InferenceConfig, ["@", str(path)]).model == "m"
    path.write_text('[trainer.model]\nimpl = "custom"\n')
    assert load(TrainerConfig, ["@", str(path)]).model.impl == "custom"
    with pytest.raises(ConfigError, match="no environment to train on"):
        load(OrchestratorConfig, ["@", str(path)])


def test_both_spellings_of_a_key_must_agree(tmp_path):
    with pytest.raises(ConfigError, match="max_completion_tokens"):
        rl(tmp_path, f"orchestrator.train.sampling = {{ max_tokens = 3, max_completion_tokens = 4 }}\n{ENV}")
    assert rl(tmp_path, f"orchestrator.train.sampling = {{ max_tokens = 3, max_completion_tokens = 3 }}\n{ENV}")


def test_sections_take_other_spellings_without_a_file():
    section = RLConfig.model_validate(
        {"trainer": {"model": {"name": "m"}}, "orchestrator": {"rollouts_per_example": 4}}
    )
    assert (section.model.name, section.orchestrator.group_size) == ("m", 4)
    assert meant(RLConfig, ("trainer", "gc", "interval"), 3).values == {}
    assert "env_vars" in keys(RLConfig)


# -- keys that came over with their features --


RULES = {
    "deployment = { num_train_gpus = 4, num_infer_gpus = 4, gpus_per_node = 6 }\ninference.parallel.dp = 4": (
        "deployment.gpus_per_node = 6 is less than the 8 GPUs of trainer and inference"
    ),
    'deployment = { type = "multi_node", num_train_nodes = 3, nodes_per_fsdp_group = 2 }': (
        "deployment.nodes_per_fsdp_group = 2 must divide deployment.num_train_nodes = 3"
    ),
    'deployment = { type = "multi_node", num_train_nodes = 4, nodes_per_fsdp_group = 2 }\nmodel.dp_replicate = 4': (
        "deployment.nodes_per_fsdp_group = 2 makes 2 copies of the weights, but model.dp_replicate = 4"
    ),
    'trainer.env_vars = { CUDA_VISIBLE_DEVICES = "1" }': (
        "trainer.env_vars.CUDA_VISIBLE_DEVICES is the launcher's to set; give GPUs as trainer_gpu_ids"
    ),
    'inference.deployment = { type = "disaggregated", decode_vllm_overrides = { tensor_parallel_size = 2 } }': (
        "inference.deployment.decode_vllm_overrides.tensor_parallel_size: the key is inference.deployment.decode_tp"
    ),
    'inference.deployment = { type = "disaggregated", decode_vllm_overrides = { max_num_sequences = 2 } }': (
        "has no option --max-num-sequences; did you mean"
    ),
}


@pytest.mark.parametrize("lines", RULES)
def test_wrong_combinations_are_said(lines, tmp_path):
    with pytest.raises(ConfigError) as caught:
        rl(tmp_path, f"{lines}\n{ENV}", "--dry-run")
    assert RULES[lines] in str(caught.value)


@needs("routers")
def test_a_side_of_a_disaggregated_deployment_has_options_of_its_own(tmp_path):
    toml = (
        '[inference.deployment]\ntype = "disaggregated"\nprefill_vllm_overrides = { enable_dbo = true }\n'
        "decode_vllm_overrides = { max_num_seqs = 96, long_prefill_token_threshold = 5 }\n"
    )
    cfg = rl(tmp_path, toml + ENV, "--dry-run")
    assert cfg.inference is not None
    prefill, decode = plan_engines(cfg.inference, ["a", "b"]).engines
    assert (prefill.section.enable_dbo, decode.section.enable_dbo) == (True, False)
    assert (prefill.section.max_num_seqs, decode.section.max_num_seqs) == (1024, 96)
    assert decode.section.vllm_extra["long_prefill_token_threshold"] == 5


def test_environment_variables_of_a_process_go_before_those_of_all(tmp_path):
    toml = 'env_vars = { A = "all", B = "all" }\ntrainer.env_vars = { A = "trainer" }\n'
    cfg = rl(tmp_path, toml + ENV)
    assert cfg.trainer_config().env_vars == {"A": "trainer", "B": "all"}
    assert cfg.orchestrator_config().env_vars == {"A": "all", "B": "all"}


def test_headers_come_from_the_file_and_from_the_environment(monkeypatch):
    monkeypatch.setenv("GATEWAY_KEY", "secret")
    section = ClientSection(headers={"X-A": "1"}, headers_from_env={"X-Key": "GATEWAY_KEY"})
    assert headers_of(section) == {"X-A": "1", "X-Key": "secret"}
    monkeypatch.delenv("GATEWAY_KEY")
    with pytest.raises(ConfigError, match="GATEWAY_KEY is not set"):
        headers_of(section)


def test_gpus_of_inference_are_ranks_or_embedded_engines(tmp_path):
    def shape(*lines: str) -> tuple[int, int]:
        found = rl(tmp_path, "\n".join([*lines, ENV]), "--dry-run").inference
        assert found is not None
        return found.parallel.dp, found.deployment.num_engines

    assert shape("deployment.num_infer_gpus = 6", 'inference.engine = "vllm"') == (6, 1)
    assert shape("deployment.num_infer_gpus = 6", 'inference = { engine = "vllm", parallel = { tp = 2 } }') == (3, 1)
    assert shape("deployment.num_infer_gpus = 6", 'inference.engine = "embedded"') == (1, 6)


def test_thresholds_of_a_buffer_are_pools_that_are_not_drawn_again(tmp_path):
    buffer = "[orchestrator.buffer]\neasy_threshold = 1.0\n"
    one = rl(tmp_path, f"{buffer}seed = 3\n{ENV}").orchestrator.curriculum.sampler
    assert one.type == "difficulty_pool" and 0.99999 < one.easy_threshold < 1.0
    assert (one.easy_weight, one.hard_weight, one.normal_weight) == (0.0, 1.0, 1.0)
    both = rl(tmp_path, f"{buffer}hard_threshold = 0\n{ENV}").orchestrator.curriculum.sampler
    assert (both.hard_threshold, both.easy_weight, both.hard_weight) == (0.0, 0.0, 0.0)
    own = f'{buffer}{ENV}curriculum.sampler.type = "standard"\n'
    section = rl(tmp_path, own).orchestrator
    assert section.curriculum_of(section.env[0]).sampler.type == "standard"


def test_keys_of_an_algorithm_are_read_in_an_environment_too(tmp_path):
    weights = "{ num_output_tokens_weight = 0.0, num_input_tokens_weight = 0.3 }"
    for toml in (
        f"orchestrator.algo.length_penalty = {weights}\n{ENV}",
        f'{ENV}algo = {{ type = "grpo", length_penalty = {weights} }}\n',
    ):
        section = rl(tmp_path, toml).orchestrator
        penalty = section.algo_of("sort-letters").length_penalty
        assert (penalty.output_weight, penalty.input_weight) == (0.0, 0.3)


def test_top_k_of_a_request_is_trained_as_it_was_sampled(tmp_path):
    train = rl(tmp_path, f"orchestrator.train.sampling.extra_body = {{ top_k = 20 }}\n{ENV}").orchestrator.train
    assert train.sampling.top_k == 20 and train.replay is not None
    assert rl(tmp_path, f"orchestrator.train.sampling.extra_body.top_k = -1\n{ENV}").orchestrator.train.replay is None


@pytest.mark.parametrize(
    ("verb", "word", "line"),
    [
        ("rl", "rollouts_per_example", "orchestrator.rollouts_per_example: --orchestrator.group-size"),
        ("rl", "max-inflight-requests", "orchestrator.max_inflight_requests: --orchestrator.max-inflight-rollouts"),
        ("rl", "full_offload", "trainer.model.full_offload: --"),
        ("rl", "student", "orchestrator.student.model.name: --model.name"),
        ("rl", "post_batch_filters", "orchestrator.post_batch_filters: --orchestrator.filters"),
        ("rl", "max_concurrent_runs", "trainer.max_concurrent_runs: refused: "),
        ("rl", "micro_batch", "decides nothing: "),
        ("rl", "sampling.source", "orchestrator.algo.sampling.source.name: --orchestrator.algo.teacher.model"),
        ("sft", "data.source", "data.source.0.dataset: --data.name"),
        ("inference", "use_pd_kv_transfer", "refused: caches travel"),
    ],
)
def test_help_knows_the_words_of_prime_rl(verb: str, word: str, line: str) -> None:
    assert line in " ".join(help_text(verb, WITH_TABLES[verb], word, width=400).split())
