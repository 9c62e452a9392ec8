"""The YAML files of vime's command line: what they set, and what is said of mistakes."""

from __future__ import annotations

import textwrap

import pytest
from cases.vime import put_files, words_of
from processes.add_ons import needs

from stretto.base.errors import ConfigError
from stretto.launch.plan.engines import plan_engines
from stretto.launch.plan.nodes import plan_nodes
from stretto.launch.plan.plan import plan
from stretto.launch.plan.serving import plan_serving
from stretto.launch.plan.table import engine_sum
from stretto_vime.flags.command import read_command

TWO = """
vllm:
  - name: policy
    server_groups: [{worker_type: regular, num_gpus: 4, num_gpus_per_engine: 2, overrides: {max_model_len: 1100}}]
  - name: ref
    model_path: /models/ref
    update_weights: false
    server_groups: [{num_gpus: 2, num_gpus_per_engine: 2, overrides: {enforce-eager: true}}]
"""
FLAGS = "--actor-num-gpus-per-node 2 --rollout-num-gpus {gpus}"


@pytest.fixture
def read(tmp_path, monkeypatch):
    put_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")

    def command(flag, text, *more, gpus=4):
        (tmp_path / "file.yaml").write_text(textwrap.dedent(text))
        file = "" if " " in flag else "file.yaml"
        flags = f"{FLAGS.format(gpus=gpus)} {flag} {file} {' '.join(more)}"
        return read_command(words_of(tmp_path, flags))[0]

    return command


@needs("frozen")
def test_models_become_engines_of_the_policy_and_frozen_ones(read):
    cfg = read("--vllm-config", TWO, gpus=6)
    assert cfg.inference.parallel.tp == 2 and cfg.inference.deployment.num_replicas == 2
    assert cfg.inference.max_model_len == 1100 and cfg.orchestrator.client.name == "policy"
    ref = cfg.models["ref"]
    assert (ref.model, ref.parallel.tp, ref.enforce_eager) == ("/models/ref", 2, True)
    cfg = cfg.model_copy(update={"dry_run": True})
    made = plan(cfg, cfg.run_dir)
    devices = {spec.name: spec.devices for spec in made.processes}
    assert devices["model_ref"] == ("6", "7") and devices["trainer_0"] == ("4",)
    urls = made.config.orchestrator.frozen_models
    assert list(urls) == ["ref"] and urls["ref"].base_url.startswith("http://127.0.0.1:")


def test_placeholders_keep_gpus_free_and_prefill_has_decode_beside_it(read):
    cfg = read("--vllm-config", """
        vllm:
          - name: actor
            server_groups:
              - {worker_type: prefill, num_gpus: 1}
              - {worker_type: placeholder, num_gpus: 2}
              - {worker_type: decode, num_gpus: 3}
    """, gpus=6)  # fmt: skip
    shape = cfg.inference.deployment
    assert (shape.type, shape.num_prefill_replicas, shape.num_decode_replicas) == ("disaggregated", 1, 3)
    assert cfg.inference_gpu_ids == [0, 3, 4, 5] and cfg.trainer_gpu_ids == [6, 7]


def test_regular_groups_of_a_model_differ_in_size_and_options(read):
    cfg = read("--vllm-config", """
        vllm:
          - name: actor
            server_groups:
              - {num_gpus: 2, overrides: {max_num_seqs: 96, max_model_len: 1100}}
              - {num_gpus: 2, num_gpus_per_engine: 2, overrides: {max_model_len: 1100, quantization: fp8}}
    """)  # fmt: skip
    assert cfg.inference.max_model_len == 1100
    cfg = cfg.model_copy(update={"dry_run": True})
    made = plan(cfg, cfg.run_dir)
    found = {spec.name: spec.devices for spec in made.processes}
    assert [found[f"inference_{i}"] for i in range(3)] == [("0",), ("1",), ("2", "3")]
    configs = [made.configs()[f"inference_{i}"] for i in range(3)]
    assert [(c.parallel.tp, c.max_num_seqs) for c in configs] == [(1, 96), (1, 96), (2, 1024)]
    assert [c.vllm_extra for c in configs] == [{}, {}, {"quantization": "fp8"}]
    assert len(made.config.orchestrator.client.admin_base_url) == 3 and found["router"] == ()
    assert engine_sum(made) == "2 x 1 + 1 x 2 = 4 GPUs"


def test_groups_of_several_nodes_leave_the_gpus_of_placeholders(read):
    cfg = read("--vllm-config", """
        vllm:
          - name: actor
            server_groups:
              - {num_gpus: 16, num_gpus_per_engine: 16}
              - {worker_type: placeholder, num_gpus: 4}
              - {num_gpus: 4, num_gpus_per_engine: 2}
    """, gpus=24)  # fmt: skip
    cfg = cfg.model_copy(update={"dry_run": True})
    made = plan_nodes(cfg, cfg.run_dir)
    found = [(spec.node, spec.devices) for spec in made.processes if spec.role == "inference"]
    eight = tuple(map(str, range(8)))
    assert cfg.num_nodes == 4 and found == [(1, eight), (2, eight), (3, ("4", "5")), (3, ("6", "7"))]


@needs("frozen")
def test_frozen_models_over_nodes_may_be_larger_than_one_or_leave_gpus_idle(read):
    cfg = read("--vllm-config", """
        vllm:
          - name: actor
            server_groups: [{num_gpus: 8, num_gpus_per_engine: 8}]
          - name: large
            model_path: /models/large
            update_weights: false
            server_groups: [{num_gpus: 16, num_gpus_per_engine: 16}]
          - name: small
            model_path: /models/small
            update_weights: false
            server_groups:
              - {num_gpus: 2}
              - {worker_type: placeholder, num_gpus: 2}
              - {num_gpus: 4, num_gpus_per_engine: 4}
    """, gpus=32)  # fmt: skip
    cfg = cfg.model_copy(update={"dry_run": True})
    made = plan_nodes(cfg, cfg.run_dir)
    found = {spec.name: spec.node for spec in made.processes if spec.role.startswith("model_")}
    assert cfg.num_nodes == 5 and found == {"model_large_0": 2, "model_large_1": 3, "model_small": 4}
    large, small = (plan_serving(made.configs()[f"model_{name}"], cfg.run_dir).engines for name in ("large", "small"))
    assert [(e.node, e.section.parallel.tp) for e in large.engines] == [(0, 16), (1, 16)]
    assert [(e.first_gpu, e.num_gpus) for e in small.engines] == [(0, 1), (1, 1), (4, 4)]


@pytest.mark.parametrize("last", [True, False])
def test_prefill_and_decode_leave_gpus_of_a_node_idle_beside_other_nodes(read, last):
    kinds = ["{worker_type: prefill, num_gpus: 2, num_gpus_per_engine: 1}",
             "{worker_type: decode, num_gpus: 4, num_gpus_per_engine: 4}"]  # fmt: skip
    kinds.insert(2 if last else 1, "{worker_type: placeholder, num_gpus: 2}")
    text = f"vllm: [{{name: actor, server_groups: [{', '.join(kinds)}]}}]"
    cfg = read("--vllm-config", text, "--actor-num-gpus-per-node 8", gpus=8)
    made = plan_nodes(cfg.model_copy(update={"dry_run": True}), cfg.run_dir)
    found = [(spec.node, spec.devices) for spec in made.processes if spec.role == "inference"]
    assert found == [(1, ("0",)), (1, ("1",)), (1, ("2", "3", "4", "5"))]
    assert {"prefill_0", "prefill_1", "decode_0"} <= set(made.configs())


@needs("frozen")
def test_frozen_prefill_and_decode_leave_gpus_idle_beside_other_nodes(read):
    group = "{{worker_type: {}, num_gpus: {}}}"
    groups = ", ".join(group.format(*each) for each in (("prefill", 1), ("decode", 3), ("placeholder", 4)))
    text = f"""
        vllm:
          - {{name: actor, server_groups: [{{num_gpus: 8, num_gpus_per_engine: 8}}]}}
          - {{name: ref, model_path: /models/ref, update_weights: false, server_groups: [{groups}]}}
    """
    cfg = read("--vllm-config", text, "--actor-num-gpus-per-node 8", gpus=16)
    made = plan_nodes(cfg.model_copy(update={"dry_run": True}), cfg.run_dir)
    assert cfg.num_nodes == 3 and cfg.models["ref"].deployment.type == "disaggregated"
    assert [spec.node for spec in made.processes if spec.role.startswith("model_")] == [2]


def test_data_sets_have_what_differs_for_them(read):
    cfg = read("--eval-config", """
        eval:
          defaults: {max_response_len: 99, top_p: 0.9}
          datasets:
            - {name: a, path: rows.jsonl, rm_type: f1, n_samples_per_eval_prompt: 2, temperature: 0.5}
            - {name: b, path: rows.jsonl, max_response_len: 50, input_key: question, stop: null}
    """, "--eval-interval 2")  # fmt: skip
    first, second = cfg.orchestrator.eval.env
    assert (first.name, first.group_size, first.sampling.temperature, first.args["reward"]) == ("a", 2, 0.5, "f1")
    assert (first.sampling.max_completion_tokens, second.sampling.max_completion_tokens) == (99, 50)
    assert second.args["input_key"] == "question" and second.args["reward"] == "math" and second.group_size is None


def test_values_of_a_file_are_flags_or_reach_functions(read):
    cfg = read("--custom-config-path", "lr: 1e-3\nuse-kl-loss: false\nmine: {a: 1}\n")
    assert cfg.trainer.optim.lr == 1e-3 and cfg.orchestrator.env[0].args["hook_args"] == {"mine": {"a": 1}}
    cfg = read("--megatron-config-path", """
        megatron:
          - {name: default, role: actor, overrides: {lr: 1e-6, weight-decay: 0.2}}
          - {name: default, role: critic, args: {lr: "1e-5"}}
    """, "--advantage-estimator ppo")  # fmt: skip
    assert (cfg.trainer.optim.lr, cfg.trainer.optim.weight_decay, cfg.trainer.critic.lr) == (1e-6, 0.2, 1e-5)


def of_critic(overrides, role="critic"):
    return f"megatron: [{{name: default, role: {role}, overrides: {overrides}}}]"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("weight_decay: 0.2", "weight_decay", 0.2),
        ("weight-decay: 0", "weight_decay", 0),
        ("clip_grad: 0.5", "max_norm", 0.5),
        ("clip_grad: 0", "max_norm", None),
        ("adam_beta1: 0.8", "betas1", 0.8),
        ("adam_beta2: 0.95", "betas2", 0.95),
        ("adam_eps: 1e-6", "eps", 1e-6),
        ("optimizer: muon", "type", "muon"),
        ("optimizer: sgd", "type", "sgd"),
    ],
)
def test_the_critic_has_an_optimizer_of_its_own(read, override, key, value):
    flags = "--advantage-estimator ppo --critic-lr 1e-4 --weight-decay 0.1 --adam-beta2 0.98"
    cfg = read("--megatron-config-path", of_critic(f"{{{override}}}"), flags)
    own, actors = cfg.trainer.critic.optim, cfg.trainer.optim
    assert (getattr(own, key), own.lr, cfg.trainer.critic.lr) == (value, 1e-4, None)
    assert getattr(actors, key, None) != value and actors.lr == 1e-6
    if key != "weight_decay":
        assert own.weight_decay == 0.1
    if key != "betas2" and own.type != "sgd":
        assert own.betas2 == 0.98


def test_the_critic_recomputes_blocks_of_its_own(read):
    flags = "--advantage-estimator ppo --recompute-granularity full --recompute-method uniform --recompute-num-layers 2"
    cfg = read("--megatron-config-path", of_critic("{recompute_num_layers: 4}"), flags)
    assert (cfg.model.ac.group_size, cfg.trainer.critic.ac.group_size, cfg.trainer.critic.ac.mode) == (2, 4, "full")
    assert read("--megatron-config-path", of_critic("{recompute_num_layers: 2}"), flags).trainer.critic.ac is None


def test_what_the_critic_has_in_common_may_be_said_again(read):
    overrides = "{tensor_model_parallel_size: 1, weight_decay: 0.1, lr_decay_style: constant, lr: 1e-5}"
    flags = "--advantage-estimator ppo --weight-decay 0.1"
    critic = read("--megatron-config-path", of_critic(overrides), flags).trainer.critic
    assert (critic.optim, critic.lr) == (None, 1e-5)


@pytest.mark.parametrize(
    ("typed", "override", "key"),
    [
        ("--critic-lr 1e-4", "lr: 2e-4", "lr"),
        ("--critic-lr-warmup-iters 1", "lr_warmup_iters: 2", "lr_warmup_steps"),
        ("--value-clip 0.1 --global-batch-size 8", "value_clip: 0.3", "value_clip"),
        ("--critic-load a", "load: Qwen3-4B", "load"),
        ("--critic-save a --save runs/x", "save: b", "save"),
    ],
)
def test_a_value_of_the_critic_in_a_file_beats_its_flag(read, typed, override, key):
    cfg = read("--megatron-config-path", of_critic(f"{{{override}}}"), "--advantage-estimator ppo", typed)
    assert str(getattr(cfg.trainer.critic, key)) == str(float(value) if "." in (value := override.split(": ")[1])
                                                        or "e-" in value else value)  # fmt: skip


def test_a_switch_that_a_file_sets_to_false_was_not_given(read):
    cfg = read("--custom-config-path", "offload: false\nasync_save: false\nnormalize_advantages: false\n")
    assert cfg.colocate is None and cfg.ckpt is None


def test_engines_that_read_prompts_have_options_of_their_own(read):
    cfg = read("--vllm-config", """
        vllm:
          - name: actor
            server_groups:
              - {worker_type: prefill, num_gpus: 2, overrides: {enable_dbo: true, gpu_memory_utilization: 0.5}}
              - {worker_type: decode, num_gpus: 2, overrides: {max-num-seqs: 96, gpu_memory_utilization: 0.5}}
    """)  # fmt: skip
    shape = cfg.inference.deployment
    assert shape.prefill_vllm_overrides == {"enable_dbo": True} and cfg.inference.gpu_memory_utilization == 0.5
    assert shape.decode_vllm_overrides == {"max_num_seqs": 96}
    engines = plan_engines(cfg.inference, ["here"]).engines
    found = {spec.role: (spec.section.enable_dbo, spec.section.max_num_seqs) for spec in engines}
    assert found["prefill"][0] is True and found["decode"] == (False, 96)


GROUP = "server_groups: [{num_gpus: 4}]"
MISTAKES = {
    "no such file": ("--vllm-config nowhere.yaml", None, "there is no such file; give the path of a YAML file"),
    "no YAML": ("--vllm-config", "vllm: [", "line 1: not YAML"),
    "a list": ("--eval-config", "- a", "a table is needed, and the file holds list"),
    "another key": ("--vllm-config", "sglang: []", "sglang: unknown key; known are vllm"),
    "nothing in it": ("--vllm-config", "vllm: []", "`vllm:` must be a list with one table each"),
    "no name": ("--vllm-config", f"vllm: [{{{GROUP}}}]", r"vllm[0]: name is missing"),
    "two of a name": ("--vllm-config", f"vllm: [{{name: a, {GROUP}}}, {{name: a, {GROUP}}}]", "there are two of this"),
    "a misspelt key": ("--vllm-config", "vllm: [{name: a, server_group: []}]", "did you mean server_groups?"),
    "no groups": ("--vllm-config", "vllm: [{name: a}]", "server_groups must be a list of groups"),
    "an unknown worker": ("--vllm-config", "vllm: [{name: a, server_groups: [{worker_type: x, num_gpus: 4}]}]",
        "worker_type x: must be regular or prefill"),
    "an encoder": ("--vllm-config", "vllm: [{name: a, server_groups: [{worker_type: encoder, num_gpus: 4}]}]",
        "pictures are read by the engines themselves"),
    "GPUs in words": ("--vllm-config", "vllm: [{name: a, server_groups: [{num_gpus: four}]}]", "must be an integer"),
    "no whole engines": ("--vllm-config", "vllm: [{name: a, server_groups: [{num_gpus: 4, num_gpus_per_engine: 3}]}]",
        "4 GPUs are no whole number of engines of 3"),
    "prefill alone": ("--vllm-config", "vllm: [{name: a, server_groups: [{worker_type: prefill, num_gpus: 4}]}]",
        "prefill engines need decode engines"),
    "both ways": ("--vllm-config",
        "vllm: [{name: a, server_groups: [{num_gpus: 2}, {worker_type: decode, num_gpus: 2}]}]",
        "regular engines beside prefill or decode"),
    "groups of a kind that differ": ("--vllm-config",
        "vllm: [{name: a, server_groups: [{num_gpus: 2, worker_type: prefill}, {num_gpus: 1, worker_type: decode}, "
        "{num_gpus: 1, worker_type: decode, overrides: {max_num_seqs: 8}}]}]",
        "decode engines of a model are alike, give these groups the same"),
    "a group that takes no whole group of samples": ("--vllm-config",
        "vllm: [{name: a, server_groups: [{num_gpus: 2, overrides: {max_num_seqs: 2}}, {num_gpus: 2}]}]",
        "groups.0.overrides.max_num_seqs = 2 (--vllm-config file.yaml); raise that or lower the group"),
    "a group with text for a number": ("--vllm-config",
        "vllm: [{name: a, server_groups: [{num_gpus: 2, overrides: {max_num_seqs: many}}, {num_gpus: 2}]}]",
        "max_num_seqs = \"many\" (--vllm-config file.yaml): input should be a valid integer"),
    "groups that leave GPUs of a node": ("--vllm-config",
        "vllm: [{name: a, server_groups: [{num_gpus: 2, num_gpus_per_engine: 2}, {num_gpus: 2}]}]",
        "the groups of a take 4 GPUs, which leave 2 of a node of 3; change num_gpus of a group, or add a placeholder",
        "--num-gpus-per-node 3"),
    "placeholders with turns": ("--vllm-config",
        "vllm: [{name: a, server_groups: [{num_gpus: 1}, {num_gpus: 1, worker_type: placeholder}]}]",
        "on each GPU of the actor there is an engine", "--colocate"),
    "what a group sets": ("--vllm-config",
        "vllm: [{name: a, server_groups: [{num_gpus: 4, overrides: {tensor-parallel-size: 2}}]}]",
        "overrides.tensor_parallel_size is not yours to set: it is num_gpus_per_engine"),
    "an option that vLLM has not": ("--vllm-config",
        "vllm: [{name: a, server_groups: [{num_gpus: 4, overrides: {enforce_eagre: true}}]}]", "enforce_eagre"),
    "two that are updated": ("--vllm-config",
        f"vllm: [{{name: a, {GROUP}}}, {{name: b, {GROUP}}}]", "a and b are updated, and one is trained"),
    "none that is updated": ("--vllm-config",
        f"vllm: [{{name: a, update_weights: false, {GROUP}}}]", "no model is updated, and one is trained"),
    "another path that is updated": ("--vllm-config",
        f"vllm: [{{name: a, model_path: /x, update_weights: true, {GROUP}}}]", "the updated model is --hf-checkpoint"),
    "other GPUs than the flag": ("--vllm-config", "vllm: [{name: a, server_groups: [{num_gpus: 6}]}]",
        "its groups take 6 GPUs, and --rollout-num-gpus 4"),
    "placeholders only": ("--vllm-config",
        "vllm: [{name: a, server_groups: [{worker_type: placeholder, num_gpus: 4}]}]", "has placeholders only"),
    "both name prefill": ("--vllm-config", f"vllm: [{{name: a, {GROUP}}}]",
        "both say which engines read prompts", "--prefill-num-servers 1"),
    "a role of nobody": ("--megatron-config-path", "megatron: [{name: a, role: judge}]", "role (actor or critic)"),
    "a role twice": ("--megatron-config-path",
        "megatron: [{name: a, role: actor}, {name: b, role: actor}]", "there are two entries for the actor"),
    "nodes in the file": ("--megatron-config-path",
        "megatron: [{name: a, role: critic, overrides: {num_nodes: 2}}]", "num_nodes is a flag: --critic-num-nodes"),
    "a flag of nobody": ("--megatron-config-path",
        "megatron: [{name: a, role: actor, overrides: {lrr: 1}}]", "--lrr: unknown flag; did you mean --lr?"),
    "only the actor's": ("--megatron-config-path",
        "megatron: [{name: a, role: critic, overrides: {bf16: false}}]",
        "bf16: False of the critic in file.yaml: the critic has the actor's, True; leave it out",
        "--advantage-estimator ppo"),
    "a fall of the critic's rate": ("--megatron-config-path",
        "megatron: [{name: a, role: critic, overrides: {lr_decay_style: cosine}}]", "rate stays after its rise; use",
        "--advantage-estimator ppo"),
    "a flag of nobody's critic": ("--megatron-config-path",
        "megatron: [{name: a, role: critic, overrides: {clip_gradd: 2}}]", "--clip_gradd: unknown flag; did you mean"),
    "no number of the critic": ("--megatron-config-path",
        "megatron: [{name: a, role: critic, overrides: {clip_grad: two}}]",
        "clip_grad: two of the critic in file.yaml: --clip-grad two: a number is needed"),
    "no number": ("--custom-config-path", "lr: fast", "lr: fast of file.yaml: --lr fast: a number is needed"),
    "no switch": ("--custom-config-path", "use_tis: 3", "--use-tis 3: true or false is needed"),
    "a flag that is refused": ("--custom-config-path", "fp16: true", "fp16: True of file.yaml: float16 overflows"),
    "no data sets": ("--eval-config", "eval: {defaults: {}}", "eval.datasets must be a list", "--eval-interval 2"),
    "a data set without a path": ("--eval-config", "eval: {datasets: [{name: a}]}", "path is missing",
        "--eval-interval 2"),
    "an unknown default": ("--eval-config", "eval: {defaults: {max_len: 3}, datasets: [{name: a, path: b}]}",
        "max_len: unknown key", "--eval-interval 2"),
    "two data sets of a name": ("--eval-config",
        "eval: {datasets: [{name: a, path: b}, {name: a, path: c}]}", "two data sets a", "--eval-interval 2"),
    "what nothing honours": ("--eval-config", "eval: {datasets: [{name: a, path: b, repetition_penalty: 1.1}]}",
        "repetition_penalty: it has no counterpart", "--eval-interval 2"),
    "both rewards": ("--eval-config", "eval: {datasets: [{name: a, path: b, rm_type: f1, custom_rm_path: c.d}]}",
        "rm_type and custom_rm_path both reward", "--eval-interval 2"),
    "evals that never come": ("--eval-config", "eval: {datasets: [{name: a, path: b}]}", "--eval-prompt-data",
        "--eval-interval 2 --eval-prompt-data a rows.jsonl"),
}  # fmt: skip
"""By name: flag, file, what is said, further flags."""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_file_is_told_with_flag_and_place(read, name):
    flag, text, message, *more = MISTAKES[name]
    with pytest.raises(ConfigError) as caught:
        read(flag, text or "", *more)
    assert message in str(caught.value) and len(str(caught.value).splitlines()) < 4


def test_there_are_forty_mistakes():
    assert len(MISTAKES) >= 40
