"""Wrong flags are one line each, which says what to do; all of them at once, and before anything starts."""

from __future__ import annotations

import sys

import pytest
from cases.vime import MODEL_ARGS, SPLIT, put_files, put_megatron, words_of

from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.cli import run_verb
from stretto_vime.flags.command import read_command
from stretto_vime.flags.groups import BY_NAME

WRONG = {
    "a flag that is none": ("--rollot-batch-size 4",
        ["--rollot-batch-size: unknown flag; did you mean --rollout-batch-size?"]),
    "a flag of vLLM's that is none": ("--vllm-max-model-length 4", ["did you mean --vllm-max-model-len?"]),
    "a flag of the router's that is none": ("--router-balance-abs-treshold 0",
        ["has no option", "did you mean --router-balance-abs-threshold?"]),
    "a value of another type": ("--lr fast", ["--lr fast: a number is needed"]),
    "half an update": ("--num-steps-per-rollout 1.5", ["--num-steps-per-rollout 1.5: an integer is needed"]),
    "no value": ("--save --rollout-shuffle", ["--save: needs a value"]),
    "a value too many": ("--lr 1e-6 1e-5", ["one value is needed; is a flag missing before 1e-5?"]),
    "a switch with a value": ("--rollout-shuffle true", ["--rollout-shuffle true: a switch takes no value"]),
    "a choice that is none": ("--advantage-estimator gpro",
        ["--advantage-estimator gpro: must be grpo", "did you mean g"]),
    "no JSON": ("--apply-chat-template-kwargs {a}", ["--apply-chat-template-kwargs {a}: a JSON object is needed"]),
    "a refused value that comes last": ("--pg-loss-type ppo --pg-loss-type other",
        ["--pg-loss-type other: set trainer"]),
    "experts on no rank": ("--expert-model-parallel-size 0", ["--expert-model-parallel-size 0: must be more than 0"]),
    "a size of 0": ("--rollout-max-prompt-len 0", ["--rollout-max-prompt-len 0: must be more than 0"]),
    "a batch that updates do not divide": ("--global-batch-size 7",
        ["--global-batch-size 7: must divide the 16 samples"]),
    "two sizes of an update": ("--global-batch-size 8 --num-steps-per-rollout 4",
                               ["--global-batch-size 8 and --num-steps-per-rollout 4 contradict"]),
    "a loss of nobody": ("--loss-type custom_loss",
        ["--loss-type custom_loss needs --custom-loss-function-path: give the function"]),
    "GPUs that are no engines": ("--rollout-num-gpus 3",
        ["3 GPUs are no whole number of engines of 2; use 2 or 4 GPUs"]),
    "an engine of one and a half nodes": ("--rollout-num-gpus 12 --rollout-num-gpus-per-engine 12",
        ["an engine of 12 GPUs is larger than a node and has whole nodes; use a multiple of 8"]),
    "data-parallel ranks over nodes": (
        "--rollout-num-gpus 16 --rollout-num-gpus-per-engine 16 --vllm-data-parallel-size 2",
        ["divide its data-parallel ranks only with --vllm-enable-expert-parallel"]),
    "readers of half a node": (
        "--rollout-num-gpus 16 --rollout-num-gpus-per-engine 4 --prefill-num-servers 1 --actor-num-gpus-per-node 8",
        ["1 prefill engines x 4 GPUs = 4 do not fill whole nodes of 8"]),
    "engines that leave a node half empty": (
        "--rollout-num-gpus 12 --rollout-num-gpus-per-engine 4 --actor-num-gpus-per-node 8",
        ["engines of 4 GPUs must fill whole nodes of 8"]),
    "nobody who writes": ("--prefill-num-servers 2",
        ["of 2 engines at least one must read prompts and one write replies"]),
    "GPUs of the critic": ("--advantage-estimator ppo --critic-num-gpus-per-node 3",
        ["--critic-num-gpus-per-node 3, --actor-num-nodes 1", "must divide the actor's 4"]),
    "a critic on the CPU": ("--advantage-estimator ppo --critic-num-gpus-per-node 0",
        ["both are on GPUs, or both on the CPU"]),
    "turns without memory": ("--colocate --no-offload", ["no process would free memory"]),
    "a critic beside turns": ("--colocate --advantage-estimator ppo --critic-num-nodes 2",
        ["the critic takes its turn with the actor, on the same GPUs; leave it out"]),
    "another shape": ("--num-layers 28 --hidden-size 1024 --untie-embeddings-and-output-weights",
                      ["--num-layers 28 (there 36), --hidden-size 1024 (there 2560), "
                       "--untie-embeddings-and-output-weights "
                       "(there false)", "Qwen3-4B/config.json says otherwise"]),
    "shards of an engine": ("--vllm-data-parallel-size 3", ["parallel sizes, 3 together, must divide it"]),
    "another backend": ("--train-backend fsdp", ["--train-backend fsdp: must be megatron"]),
    "a stage of no pipeline": ("--train-backend megatron --decoder-last-pipeline-num-layers 2",
        ["--decoder-last-pipeline-num-layers 2 needs --pipeline-model-parallel-size"]),
    "ranks of stages": ("--train-backend megatron --pipeline-model-parallel-size 3",
        ["4: --pipeline-model-parallel-size 3 times", "must divide the GPUs of the actor"]),
    "a critic's ranks of stages": ("--train-backend megatron --advantage-estimator ppo --critic-num-gpus-per-node 2 "
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        ["--critic-num-gpus-per-node 2: --pipeline-model-parallel-size 2 times", "must divide the GPUs of the critic"]),
    "layers of virtual stages": ("--train-backend megatron --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 5",
        ["--num-layers-per-virtual-pipeline-stage 5: the 36 layers of this model in 2 stages"]),
    "a reference that is not there": ("--ref-load nowhere", ["--ref-load nowhere: no such directory"]),
    "an iteration that is not there": ("--ref-load megatron",
        ["--ref-load megatron: megatron: no iter_0000003; the iterations there are none"]),
    "weights without a config": ("--ref-load empty", ["--ref-load empty has no config.json"]),
    "a step of nothing": ("--ckpt-step 3", ["--ckpt-step 3 needs --load"]),
    "a step of the reference": ("--ref-load Qwen3-4B --ckpt-step 3", ["--ckpt-step 3 needs --load"]),
    "a reference's step of nothing": ("--ref-ckpt-step 3", ["--ref-ckpt-step 3 needs --ref-load"]),
    "a teacher's step of nothing": (
        "--use-opd --opd-type vllm --rm-url http://localhost:1/generate --opd-teacher-ckpt-step 3",
        ["--opd-teacher-ckpt-step 3 needs --opd-teacher-load"]),
    "a step of weights": ("--load Qwen3-4B --ckpt-step 3", ["--ckpt-step 3: --load Qwen3-4B has", "leave it out"]),
    "a reference's step of weights": ("--ref-load Qwen3-4B --ref-ckpt-step 3",
        ["--ref-ckpt-step 3: --ref-load Qwen3-4B has Hugging Face weights"]),
    "an interval without a place": ("--save-interval 3", ["--save-interval 3 needs --save"]),
    "evals of nothing": ("--eval-interval 3", ["--eval-interval 3 needs --eval-prompt-data"]),
    "a data set without a file": ("--eval-prompt-data a b c", ["--eval-prompt-data a b c: write NAME FILE"]),
    "two divergences": ("--advantage-estimator ppo --kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.1 --ref-load Qwen3-4B",
                        ["--kl-coef 0.1 and --kl-loss-coef 0.1 both hold the policy"]),
    "a divergence from nothing": ("--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k3",
        ["--kl-loss-coef 0.1 needs --ref-load"]),
    "no baseline": ("--advantage-estimator reinforce_plus_plus", ["needs --normalize-advantages"]),
    "two corrections": ("--use-tis --use-rollout-logprobs", ["--use-rollout-logprobs and --use-tis both correct"]),
    "a dual clip below 1": ("--eps-clip-c 0.5", ["--eps-clip-c 0.5: must be above 1"]),
    "groups of one": ("--n-samples-per-prompt 1", ["--n-samples-per-prompt"]),
    "no room for a prompt": ("--rollout-max-context-len 256", ["--rollout-max-context-len"]),
    "a reward that is not built in": ("--rm-type f2", ["--rm-type"]),
    "half a router": ("--vllm-router-ip 10.0.0.1", ["--vllm-router-ip 10.0.0.1 needs --vllm-router-port"]),
    "what another flag sets": ("--vllm-tensor-parallel-size 3", ["it is --rollout-num-gpus-per-engine"]),
    "a longer rise than the run": ("--lr-warmup-iters 9",
        ["--lr-warmup-iters 9 is longer than the run, 3 rollouts of 1 updates"]),
    "a share above 1": ("--lr-warmup-fraction 1.5", ["--lr-warmup-fraction 1.5: must be at least 0 and less than 1"]),
    "a rise of less than nothing": ("--lr-warmup-iters -1", ["--lr-warmup-iters -1: must be 0 or more"]),
    "a fall that ends elsewhere": ("--lr-decay-iters 3 --global-batch-size 8",
        ["--lr-decay-iters 3: the schedule ends with the run, after 6 updates"]),
    "a clip range below 0": ("--eps-clip -1", ["--eps-clip -1: must be 0 or more"]),
    "an update of no samples": ("--global-batch-size 0", ["--global-batch-size 0: must be more than 0"]),
    "nothing after the sign": ("--lr=", ["--lr: needs a value"]),
    "an empty path": ("--custom-rm-path=", ["--custom-rm-path: needs a value"]),
    "engines of no GPU": ("--rollout-num-gpus-per-engine 0 --vllm-server-concurrency 4",
        ["--rollout-num-gpus-per-engine 0: must be more than 0"]),
    "a port that is none": ("--vllm-router-ip 10.0.0.1 --vllm-router-port 99999",
        ["--vllm-router-port 99999: inference.router.address", "is not an address"]),
    "experts of a model without": ("--num-experts 8", ["--num-experts 8 (there 0)"]),
    "a file as a run": ("--load rows.jsonl", ["--load rows.jsonl is a file"]),
    "copies that the GPUs do not hold": ("--context-parallel-size 3",
        ["--tensor-model-parallel-size 1 times --context-parallel-size 3 must divide the GPUs of the actor"]),
    "fine-tuning": ("--loss-type sft_loss", ["the mean over all trained tokens; add --calculate-per-token-loss"]),
}  # fmt: skip
"""By name: flags after a command that is right, and what is said."""

MISSING = {
    "--hf-checkpoint": "--hf-checkpoint is missing",
    "--prompt-data": "--prompt-data is missing",
    "--num-rollout": "--num-rollout or --num-epoch is missing",
    "--rollout-batch-size": "--rollout-batch-size is missing",
    "--rollout-num-gpus": "--rollout-num-gpus is missing",
    "--rm-type": "nothing rewards a sample",
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    put_files(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("3")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    put_megatron(tmp_path, monkeypatch)
    return tmp_path


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_flag_is_told_with_what_to_do(name, files):
    flags, said = WRONG[name]
    replaced = [flag for flag in flags.split() if flag.startswith("--")]
    words = without(words_of(files, SPLIT), *replaced)
    with pytest.raises(ConfigError) as caught:
        read_command([*words, *flags.split()] if "{" not in flags else [*words, *flags.split(" ")])
    for part in said:
        assert part in str(caught.value)


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_flag_is_named(name, files):
    with pytest.raises(ConfigError, match=MISSING[name]):
        read_command(without(words_of(files, SPLIT), name))


def test_all_missing_flags_are_named_at_once(files):
    with pytest.raises(ConfigError) as caught:
        read_command([])
    assert all(f"{name} is missing" in str(caught.value) for name in ("--hf-checkpoint", "--prompt-data"))
    assert "--rollout-num-gpus is missing" in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_config_that_is_no_json_is_one_message(text, files):
    (files / "Qwen3-4B" / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json (is not JSON|holds no JSON object)"):
        read_command(words_of(files, SPLIT, MODEL_ARGS))


def test_every_mistake_is_told_at_once(files, capsys):
    words = words_of(files, SPLIT, "--lr x --nonsense 3 --fp16")
    assert run_verb("vime", [*words, "--dry-run"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: 3 problems" and len(lines) == 4


def test_a_refused_flag_takes_the_value_that_asks_for_nothing(files):
    quiet = [
        flag for flag in BY_NAME.values() if flag.state == "refused" and flag.kind in ("integer", "number", "text")
    ]
    words = [word for flag in quiet for value in flag.allowed[:1] for word in (flag.name, str(value))]
    assert len(words) > 10
    assert read_command([*words_of(files, SPLIT, MODEL_ARGS), *words])[1] == []


NAMED = {
    "a copied value": ("--vllm-max-model-len 10",
        "  --vllm-max-model-len 10 is shorter than --rollout-max-context-len 1024; raise it or lower"
        " --rollout-max-context-len"),
    "an option that is passed on": ("--vllm-max-num-seqs 2",
        "  --n-samples-per-prompt 4: an engine samples a group in one request, and takes --vllm-max-num-seqs 2; raise"),
    "an option that was not typed": ("--vllm-max-num-batched-tokens 2",
        "  --vllm-max-num-batched-tokens 2 cannot hold one token of each of --vllm-max-num-seqs = 1024 sequences;"),
    "a limit": ("--vllm-gpu-memory-utilization 1.5", "  --vllm-gpu-memory-utilization 1.5: must be less than or equal"),
    "two flags": ("--custom-model-provider-path a.b --tensor-model-parallel-size 2",
        "  --custom-model-provider-path a.b changes whole layers, and --tensor-model-parallel-size 2 cuts them"),
}  # fmt: skip
"""By name: flags, and a line of what is said."""


@pytest.mark.parametrize("name", NAMED)
def test_a_rule_between_keys_speaks_of_the_flags_that_were_typed(name, files):
    flags, line = NAMED[name]
    with pytest.raises(ConfigError) as caught:
        read_command(words_of(files, SPLIT, flags))
    assert any(said.startswith(line) for said in str(caught.value).splitlines()), caught.value


def test_a_plan_that_does_not_fit_the_machine_speaks_of_flags(files, monkeypatch, capsys):
    pytest.importorskip("stretto_broadcast")
    pytest.importorskip("stretto_vllm")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    flags = ["--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "4"]
    assert run_verb("vime", words_of(files, *flags)) != 0
    said = capsys.readouterr().err
    assert "inference takes 4 GPUs" in said and "inference.parallel (--rollout-num-gpus-per-engine 4)" in said


def test_words_of_a_message_that_are_no_keys_stay(files):
    names = read_command(words_of(files, SPLIT)).names
    text = "model /tmp/model.safetensors of the trainer and inference; run `rl`, see docs/inference.md, trainer.log"
    assert names.reword(text) == text
    way = "deployment.gpus_per_node is too small, give another port with --control.port"
    said = names.reword(way)
    assert said.endswith("with control.port of the TOML of --print-config")
    assert said.startswith("deployment.gpus_per_node (--actor-num-gpus-per-node) is too small")


def test_a_problem_between_keys_names_the_flags(files):
    with pytest.raises(
        ConfigError, match=r"--rollout-top-k 2000 is more than orchestrator.train.replay.max_tokens = 1024; lower it"
    ):
        read_command(words_of(files, SPLIT, "--rollout-top-k 2000"))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ("--dynamic-sampling-filter-path nowhere.keep", "nowhere"),
        ("--custom-generate-function-path own.two", "own"),
        ("--buffer-filter-path own.missing", "missing"),
        ("--input-key question", "no 'question' (input_key)"),
        ("--label-key answer", "no 'answer' (label_key)"),
        ("--prompt-data gone.jsonl", "gone.jsonl"),
        ("--prompt-data empty.jsonl", "empty.jsonl"),
        ("--eval-interval 2 --eval-prompt-data a gone.jsonl", "gone.jsonl"),
        ("--rollout-function-path own.two", "is defined as two(args) and called with 3"),
        ("--eval-interval 2 --eval-prompt-data a rows.jsonl --eval-function-path own.gone", "has no 'gone'"),
        ("--rollout-sample-filter-path own.two", "is defined as two(args) and called with 2"),
        ("--custom-reward-post-process-path own.words", "is a list, not a function"),
        ("--custom-convert-samples-to-train-data-path broken.f", "broken"),
        ("--custom-megatron-init-path own.none", "has no 'none'"),
        ("--custom-model-provider-path own.none", "has no 'none'"),
        ("--custom-megatron-before-log-prob-hook-path own.two", "called with 3"),
        ("--custom-megatron-before-train-step-hook-path own.two", "called with 6"),
        ("--custom-advantage-function-path own.two", "called with 2"),
        ("--rollout-data-postprocess-path own.two", "called with 3"),
        ("--load-debug-rollout-data saved/{rollout_id}.pt", "saved/0.pt: No such file or directory"),
        ("--vllm-config gone.yaml", "gone.yaml: there is no such file"),
        ("--eval-interval 2 --eval-config gone.yaml", "gone.yaml: there is no such file"),
        ("--custom-config-path gone.yaml", "gone.yaml: there is no such file"),
        ("--megatron-config-path gone.yaml", "gone.yaml: there is no such file"),
        ("--lora-rank 4 --target-modules nonsense", "has no layer nonsense; it has q_proj"),
    ],
)
def test_code_and_data_that_are_not_there_are_known_from_a_dry_run(extra, said, files, capsys, monkeypatch):
    import numpy as np
    from safetensors.numpy import save_file

    from stretto.chat.tokenizer import build_letters_tokenizer

    (files / "own.py").write_text("words = []\n\n\ndef two(args):\n    return 1\n")
    (files / "broken.py").write_text("def f(:\n")
    (files / "empty.jsonl").write_text("")
    tensors = {f"model.{name}.weight": np.zeros(2, np.float32) for name in ("layers.0.self_attn.q_proj", "norm")}
    save_file(tensors, files / "Qwen3-4B" / "model.safetensors")
    monkeypatch.syspath_prepend(str(files))
    for name in ("own", "broken"):  # another test's modules
        monkeypatch.delitem(sys.modules, name, raising=False)
    build_letters_tokenizer(files / "Qwen3-4B")
    words = without(words_of(files, SPLIT), extra.split()[0])
    assert run_verb("vime", [*words, *extra.split(), "--dry-run"]) in (1, 2)
    error = capsys.readouterr().err
    assert said in error and error.count("error: ") == 1 and "Traceback" not in error


@pytest.mark.parametrize("flag", ["--vllm-api-key", "--router-api-key"])
def test_a_key_on_the_command_line_is_refused_and_not_repeated(flag, files):
    with pytest.raises(ConfigError, match=f"{flag}:? .*") as caught:
        read_command([*words_of(files, SPLIT), flag, "s3cret"])
    assert "s3cret" not in str(caught.value)


def test_a_run_that_is_there_is_continued_only_with_load(files):
    words = [*without(words_of(files, SPLIT), "--load", "--save"), "--save", str(files / "mine")]
    marker = RunDir(files / "mine").complete_marker(3)
    marker.parent.mkdir(parents=True)
    marker.touch()
    with pytest.raises(ConfigError, match=r"mine has a run with a checkpoint of step 3; continue it with --load "):
        read_command(words)
    assert read_command([*words, "--load", str(files / "mine")])[0].resume is not None
    assert read_command([*words, "--print-config"])[0].resume is None


def without(words: list[str], *names: str) -> list[str]:
    """The words less some flags and their values."""
    kept, is_skipped = [], False
    for word in words:
        is_skipped = word in names if word.startswith("--") else is_skipped
        kept += [] if is_skipped else [word]
    return kept
