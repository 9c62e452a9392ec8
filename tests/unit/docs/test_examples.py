"""Every example loads, plans, and continues from what the one before it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.config.load import dump, load
from stretto.config.root import InferenceConfig, OrchestratorConfig, RLConfig, SFTConfig, TrainerConfig
from stretto.envs.base import load_environment
from stretto.launch.plan.plan import plan
from stretto.orchestrator.build import build_scratch_renderer

EXAMPLES = Path(__file__).parents[3] / "examples"
LARGE = ("qwen3_0.6b", "qwen3_30b_a3b", "qwen3_vl_4b", "glm4.5_air", "gpt_oss_20b", "glm5_pd_disag", "glm5_llmd")
OTHERS = (
    "agent",
    "broken",
    "gsm8k",
    "harbor",
    "judge",
    "notebooks",
    "preference",
    "repo_repair",
    "service",
    "smollm2",
    *LARGE,
)  # laid over the demo, or over its model; models of the Hub: test_recipes.py, test_smollm2.py
RL = [path for path in sorted(EXAMPLES.glob("*/rl.toml")) if path.parent.name not in OTHERS]
SFT = [path for path in sorted(EXAMPLES.glob("*/sft.toml")) if path.parent.name not in OTHERS]
FOLDERS = [path.name for path in EXAMPLES.iterdir() if path.is_dir() and path.name not in OTHERS]
BROKEN = sorted((EXAMPLES / "broken").glob("*.toml"))


def name(path):
    return path.parent.name


def test_every_example_has_both_stages_and_a_readme():
    assert {name(path) for path in RL} == {name(path) for path in SFT} == set(FOLDERS)
    for path in RL:
        assert (path.parent / "README.md").is_file()


@pytest.mark.parametrize("path", RL, ids=name)
def test_rl_starts_from_the_weights_its_sft_leaves(path):
    for where in ([], ["--output-dir", "/else/where"]):
        rl = load(RLConfig, ["@", str(path), *where])
        sft = load(SFTConfig, ["@", str(path.parent / "sft.toml"), *where])
        assert Path(rl.model.name) == sft.run_dir.latest_weights == Path(rl.inference_config().model)
        assert rl.run_path != sft.run_path
    assert [env.id for env in rl.orchestrator.env] == [sft.data.id]
    assert [env.args for env in rl.orchestrator.env] == [sft.data.args]


@pytest.mark.parametrize("path", RL, ids=name)
def test_rl_plans_three_processes(path):
    cfg = load(RLConfig, ["@", str(path)])
    assert [spec.role for spec in plan(cfg, cfg.run_dir).processes] == ["inference", "orchestrator", "trainer"]
    assert cfg.orchestrator.batch_size % cfg.orchestrator.group_size == 0
    assert cfg.trainer.scheduler.type == "constant" or cfg.max_steps is not None


@pytest.mark.heavy
@pytest.mark.parametrize("path", RL, ids=name)
def test_longest_solution_fits_into_a_reply_and_the_context(path):
    cfg, sft = load(RLConfig, ["@", str(path)]), load(SFTConfig, ["@", str(path.parent / "sft.toml")])
    renderer = build_scratch_renderer(sft.model.scratch, sft.renderer)
    env = load_environment(sft.data.id, sft.data.args)
    rows = env.sft_rows(200, seed=0)
    said = [message for row in rows for message in row["messages"] if message["role"] == "assistant"]
    replies = [len(renderer.tokenizer.encode(message["content"])) + 1 for message in said]
    prompts = [len(renderer.render_prompt(row["messages"][:-1], row.get("tools"))) for row in rows]
    longest = cfg.orchestrator.train.sampling.max_completion_tokens
    assert max(replies) <= longest
    assert max(prompts) + longest <= min(cfg.seq_len, sft.model.scratch.max_position_embeddings)
    used = {int(t) for row in rows for t in renderer.render_prompt(row["messages"], row.get("tools"))}
    assert renderer.tokenizer.unk_token_id not in used


@pytest.mark.parametrize("path", RL, ids=name)
@pytest.mark.parametrize("num_steps", [1, 7, 50])
def test_every_example_can_be_run_for_fewer_steps(path, num_steps):
    assert load(RLConfig, ["@", str(path), "--max-steps", str(num_steps)]).max_steps == num_steps


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_a_broken_example_is_laid_over_the_demo(path):
    load(RLConfig, ["@", str(EXAMPLES / "sort_letters" / "rl.toml"), "@", str(path)])


@pytest.mark.parametrize("folder", ["preference", "preference/smollm2"])
def test_examples_of_pairs_continue_from_what_the_one_before_leaves(folder):
    """A run's pairs are what DPO and the reward model learn from; the reward model is the only reward of the last."""
    path = EXAMPLES / folder
    played = load(RLConfig, ["@", str(path / "play.toml")]).run_path
    learners = [load(SFTConfig, ["@", str(path / f"{name}.toml")]) for name in ("dpo", "reward")]
    for cfg in learners:
        for source in (cfg.data.sources[0], cfg.val.data.sources[0]):
            assert Path(source.partition("@")[0]).parent == played / "exports"
    scored = load(RLConfig, ["@", str(path / "rl.toml")])
    assert Path(scored.models["rm"].model) == learners[1].run_path / "weights" / "best"
    assert [env.args["reward"] for env in scored.orchestrator.env] == ["models.rm"]
    assert scored.model.name == learners[0].model.name


def test_an_adapter_on_pairs_has_a_rate_of_its_own():
    path = EXAMPLES / "preference" / "smollm2"
    whole, adapted = (
        load(SFTConfig, ["@", str(path / "dpo.toml"), *more]) for more in ([], ["@", str(path / "lora.toml")])
    )
    assert adapted.model.lora and adapted.optim.lr >= 10 * whole.optim.lr and adapted.run_path != whole.run_path


def test_the_three_files_of_reverse_text_are_its_one_file(monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    folder = "examples/reverse_text/rl"
    parts = {"trainer": "train", "orchestrator": "orch", "inference": "infer"}
    words = [word for part, file in parts.items() for word in (f"--{part}", "@", f"{folder}/{file}.toml")]
    assert dump(load(RLConfig, words)) == dump(load(RLConfig, ["@", "examples/reverse_text/rl.toml"]))
    orchestrator = load(OrchestratorConfig, ["@", f"{folder}/orch.toml"])
    trainer = load(TrainerConfig, ["@", f"{folder}/train.toml"])
    assert orchestrator.run_path == trainer.run_path
    assert load(InferenceConfig, ["@", f"{folder}/infer.toml"]).model == orchestrator.model.name == trainer.model.name
