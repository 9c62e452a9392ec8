"""vime's command line: every flag has a row, every command of the guide is a plan, and TOML says the same."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
from pathlib import Path

import pytest
from cases.vime import COMMANDS, CONFIG, GUIDE, MODEL_ARGS, SPLIT, put_files, words_of
from processes.add_ons import needs

from stretto.base import ports
from stretto.base.errors import ConfigError
from stretto.config.load import dump, load, shown_text
from stretto.config.root import RLConfig
from stretto.config.section import find
from stretto.launch.plan.table import engine_sum, gpu_sum
from stretto.launch.run.rl import plan_only
from stretto_vime.flags.command import read_command
from stretto_vime.flags.groups import BY_NAME, GROUPS
from stretto_vime.flags.pages import counts, help_text, markdown
from stretto_vime.flags.resolved import resolved

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "cases" / "vime_plans"


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A directory with what the commands name, on a machine with 8 GPUs that nobody uses."""
    put_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setattr(ports, "SCOPE", os.urandom(8).hex())
    return tmp_path


# -- the table --


def test_every_flag_of_the_guide_has_a_row_or_passes_through(files):
    through = [name for name in GUIDE if name not in BY_NAME]
    assert through == ["--router-balance-abs-threshold"]
    cfg, *_ = read_command(words_of(files, SPLIT, through[0], "0"))
    assert cfg.inference.router.extra == {"balance_abs_threshold": 0}
    assert cfg.inference.router.policy == "cache_aware"


def test_rows_name_keys_that_exist_and_refusals_say_why():
    for flag in BY_NAME.values():
        for key in flag.keys:
            found = find(RLConfig, [int(part) if part.isdigit() else part for part in key.split(".")])
            assert found.is_known or found.key.is_free_table, f"{flag.name}: {key}"
        assert flag.help, flag.name
        assert flag.state == "acts" or len(flag.note) > 10, flag.name
        assert bool(flag.keys) <= (flag.state == "acts"), flag.name
    assert sum(counts().values()) == len(BY_NAME) == sum(map(len, GROUPS.values()))


@pytest.mark.heavy
def test_the_page_and_help_list_every_flag():
    page = markdown()
    assert all(f"| `{name}` |" in page for name in BY_NAME)
    assert all(f"  {name}" in help_text() for name in BY_NAME)
    assert "--lr-decay-style" in help_text("lr") and "--colocate" not in help_text("lr")


# -- the guide's commands --


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs("critic") if " ppo " in words else ()) for name, words in COMMANDS.items()]
)
def test_a_command_of_the_guide_is_the_plan_that_is_written_down(name, files):
    cfg, notes, *_ = read_command(words_of(files, MODEL_ARGS, COMMANDS[name], "--dry-run"))
    plan, _ = plan_only(cfg.model_copy(update={"ray": None}) if cfg.ray else cfg)
    rows = [f"node {each.node} {each.name}: {','.join(each.devices) or 'CPU'}" for each in plan.processes]
    text = (
        "\n".join(
            [
                f"batch {plan.batch}",
                f"gpus {gpu_sum(plan)}",
                *[f"engines {counted}" for counted in [engine_sum(plan)] if counted],
                *rows,
                *(f"note: {note}" for note in notes),
            ]
        )
        + "\n"
    )
    text = text.replace(str(files), "DIR")
    golden = GOLDEN / f"{name.replace(' ', '_').replace('+', 'p')}.txt"
    if "STRETTO_WRITE_GOLDEN" in os.environ:
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


def test_defaults_are_those_of_vime(files):
    cfg, notes, *_ = read_command(["train.py", *words_of(files, SPLIT)][1:])
    loss, algo, env = cfg.trainer.loss, cfg.orchestrator.algo, cfg.orchestrator.env[0]
    assert (loss.type, loss.reduction, loss.use_rollout_logprobs, loss.clip_low) == ("ppo", "rollout", False, 0.2)
    assert (algo.type, algo.normalize_std, algo.whiten) == ("grpo", "unbiased", False)
    assert (cfg.orchestrator.max_async_level, cfg.orchestrator.filter_zero_advantages) == (0, False)
    assert (cfg.seed, cfg.trainer.optim.lr, cfg.orchestrator.train.sampling.temperature) == (42, 1e-6, 1.0)
    assert env.args["shuffle"] is False and cfg.ckpt is None and notes == []
    plain = [word for word in words_of(files, SPLIT) if word != "--apply-chat-template"]
    at = plain.index("--input-key")
    cfg, *_ = read_command(plain[:at] + plain[at + 2 :])
    assert cfg.orchestrator.env[0].args["input_key"] == "input"
    assert cfg.orchestrator.env[0].args["apply_chat_template"] is False


def test_limits_and_router_are_those_of_vime(files):
    cfg, *_ = read_command(words_of(files, SPLIT))
    assert (cfg.orchestrator.client.timeout_s, cfg.orchestrator.rollout_timeout_s) == (14400, 14400)
    assert (cfg.weight_broadcast.timeout_s, cfg.inference.router.policy) == (900, "cache_aware")
    assert cfg.orchestrator.max_inflight_rollouts is None
    cfg, *_ = read_command(words_of(files, SPLIT, "--vllm-server-concurrency 8"))
    assert cfg.orchestrator.max_inflight_rollouts == 16
    cfg, *_ = read_command(words_of(files, SPLIT, "--vllm-router-ip 10.0.0.1 --vllm-router-port 9"))
    assert cfg.inference.router.address == "http://10.0.0.1:9"


def test_functions_about_loss_and_weights_are_the_trainers(files):
    loss = "--loss-type custom_loss --custom-loss-function-path my.loss"
    assert read_command(words_of(files, SPLIT, loss))[0].trainer.hooks.loss == "my.loss"
    rest = "--custom-pg-loss-reducer-function-path my.sums --custom-update-weight-post-write-path my.note"
    cfg = read_command(words_of(files, SPLIT, rest, "--update-weight-transport disk"))[0]
    assert (cfg.trainer.hooks.pg_loss_reducer, cfg.trainer.hooks.post_write) == ("my.sums", "my.note")
    assert cfg.weight_broadcast.type == "filesystem"
    assert read_command(words_of(files, SPLIT))[0].trainer.memory_profiler_path is None
    recorded = "--record-memory-history --memory-snapshot-dir snapshots"
    assert read_command(words_of(files, SPLIT, recorded))[0].trainer.memory_profiler_path == Path("snapshots")


def test_a_schedule_in_updates_is_one_in_rollouts(files):
    flags = "--advantage-estimator ppo --lr-warmup-iters 3 --critic-lr-warmup-iters 5 --lr-decay-iters 6"
    cfg, *_ = read_command(words_of(files, SPLIT, flags, "--global-batch-size 8"))
    assert cfg.trainer.updates_per_step == 2
    assert (cfg.trainer.scheduler.warmup_steps, cfg.trainer.scheduler.decay_steps) == (2, 1)
    assert cfg.trainer.critic.lr_warmup_steps == 3


def test_without_an_interval_there_are_no_evals(files):
    cfg, notes, *_ = read_command(words_of(files, SPLIT, "--eval-prompt-data rows.jsonl"))
    assert cfg.orchestrator.eval is None
    assert notes == ["--eval-prompt-data rows.jsonl is not used without --eval-interval: there are no evals"]


def test_functions_see_a_switch_that_is_on_whatever_it_sets(files):
    for name in ("use_tensorboard", "use_wandb", "use_rollout_routing_replay", "use_tis", "rollout_shuffle"):
        for switch, is_on in (("", False), (f"--{name.replace('_', '-')}", True)):
            cfg, *_ = read_command(words_of(files, SPLIT, switch))
            assert resolved(dump(cfg))[name] is is_on, name


def test_training_is_asynchronous_under_the_name_that_says_so(files):
    words = words_of(files, SPLIT)
    assert read_command(["train.py", *words])[0].orchestrator.max_async_level == 0
    for program in ("train_async.py", "/root/vime/train_async.py"):
        assert read_command([program, *words])[0].orchestrator.max_async_level == 1


@pytest.mark.parametrize(("interval", "oldest"), [(2, 8), (12, 12)])
def test_engines_may_get_weights_as_rarely_as_the_flag_says(files, interval, oldest):
    words = words_of(files, SPLIT, f"--update-weights-interval {interval}")
    cfg = read_command(["train_async.py", *words])[0]
    assert cfg.weight_broadcast.interval == cfg.orchestrator.max_async_level == interval
    assert cfg.orchestrator.max_off_policy_steps == oldest, "no token is too old for its batch"


# -- the same run as TOML --

CHOICES: list[list[str]] = [
    ["", "--rollout-shuffle"],
    ["", "--save {dir}/runs/a --save-interval 5", "--save {dir}/runs/b --async-save --save-hf x"],
    ["", "--lr 3e-5 --lr-decay-style constant", "--lr-decay-style cosine --min-lr 1e-7 --lr-warmup-iters 1"],
    ["", "--optimizer sgd", "--adam-beta2 0.98 --weight-decay 0.1 --clip-grad 0"],
    ["", "--global-batch-size 8 --eps-clip-high 0.28 --eps-clip-c 3", "--num-steps-per-rollout 4",
     "--use-rollout-logprobs"],
    ["", "--rollout-temperature 0.7", "--rollout-top-p 0.9", "--rollout-top-k 20"],
    ["", "--lora-rank 8 --lora-alpha 16", "--tensor-model-parallel-size 2", "--context-parallel-size 2"],
    ["", "--recompute-granularity selective", "--recompute-granularity full --recompute-method uniform"],
    ["", "--entropy-coef 0.01", "--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type low_var_kl --ref-load {dir}/Qwen3-4B"],
    ["", "--eval-interval 2 --eval-prompt-data easy {dir}/rows.jsonl hard {dir}/rows.jsonl --eval-temperature 0.6",
     "--eval-prompt-data {dir}/rows.jsonl --n-samples-per-eval-prompt 4 --skip-eval-before-train"],
    ["", "--dynamic-sampling-filter-path my.hooks.keep", "--buffer-filter-path my.hooks.choose",
     "--dynamic-sampling-filter-path vime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"],
    ["", "--vllm-max-num-seqs 64 --vllm-enforce-eager", "--router-policy round_robin", "--vllm-server-concurrency 64"],
    ["", "--partial-rollout --over-sampling-batch-size 16", "--use-wandb --wandb-project p --wandb-mode offline"],
    ["", "--update-weight-transport disk --update-weight-mode delta", "--update-weight-transport nccl"],
    ["", "--apply-chat-template-kwargs '{\"enable_thinking\": false}'", "--save-debug-train-data x.pt"],
    ["--advantage-estimator grpo", "--advantage-estimator gspo", "--advantage-estimator cispo",
     "--normalize-advantages",
     "--disable-grpo-std-normalization", "--advantage-estimator ppo --critic-lr 1e-4 --gamma 0.99"],
]  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(12))
def test_the_printed_toml_is_the_same_run_byte_for_byte(seed, files):
    rng, num_tried = random.Random(seed), 0
    for _ in range(6):
        extra = [rng.choice(options) for options in CHOICES]
        try:
            cfg, *_ = read_command(words_of(files, SPLIT, *extra))
        except ConfigError:  # drawn flags may contradict each other
            continue
        num_tried += 1
        (files / "run.toml").write_text(shown_text(cfg))
        same = load(RLConfig, ["@", str(files / "run.toml")])
        assert same == cfg
        assert shown_text(same) == shown_text(cfg)
    assert num_tried


def test_the_printed_toml_chooses_no_port_and_runs_where_the_usual_ones_are_taken(files):
    pytest.importorskip("stretto_broadcast")
    pytest.importorskip("stretto_vllm")
    pytest.importorskip("stretto_routers")
    cfg, *_ = read_command(words_of(files, SPLIT))
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # another program's: as good
            taken.bind(("127.0.0.1", 5555))
            taken.listen()
        (files / "run.toml").write_text(shown_text(cfg))
        plan, _ = plan_only(load(RLConfig, ["@", str(files / "run.toml")]))
    assert plan.processes
    cfg = load(RLConfig, ["@", str(files / "run.toml"), "--control.port", "7000"])
    assert "\nport = 7000\n" in shown_text(cfg) and "\n# port = 5555 " in shown_text(cfg)


# -- where training starts --


def test_a_missing_checkpoint_is_the_reference_and_a_note_says_so(files):
    (files / "ref").mkdir()
    (files / "ref" / "config.json").write_text(json.dumps(CONFIG))
    cfg, notes, *_ = read_command(words_of(files, SPLIT, "--load runs/a --save runs/a --ref-load ref"))
    assert cfg.model.name == "ref" and cfg.tokenizer.name == str(files / "Qwen3-4B")
    assert cfg.resume is None and (cfg.output_dir, cfg.run.name) == (Path("runs"), "a")
    assert notes == ["--load runs/a: nothing is there yet; training starts from --ref-load ref"]


def test_a_run_is_continued_where_it_is_saved_and_begun_anew_elsewhere(files):
    done = files / "runs" / "a" / "checkpoints" / "step_2"
    done.mkdir(parents=True)
    (done / "COMPLETE").write_text("")
    cfg, *_ = read_command(words_of(files, SPLIT, "--load runs/a --save runs/a"))
    assert cfg.resume is not None and cfg.resume.dir is None
    cfg, *_ = read_command(words_of(files, SPLIT, "--load runs/a --save runs/b --ckpt-step 2"))
    assert cfg.resume.dir == Path("runs/a") and cfg.resume.step == 2


def test_passes_over_the_data_are_counted(files):
    words = words_of(files, SPLIT)
    at = words.index("--num-rollout")
    cfg, *_ = read_command([*words[:at], *words[at + 2 :], "--num-epoch", "3"])
    assert cfg.max_steps == 6
