"""The losses of pairs are those of TRL, on the same texts and weights; skipped where TRL is not installed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sft_runs import SCRATCH, config, undisturbed_threads_and_logging  # noqa: F401

from stretto_sft import training as sft

trl = pytest.importorskip("trl")
pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A model directory, and another one that has trained a little."""
    folder = tmp_path_factory.mktemp("trl")
    cfg = config(folder, val=None, max_steps=40, ckpt={"weights": {"interval": 20}}, optim={"lr": 1e-2})
    sft.main(cfg)
    return cfg.run_dir.weights_step(20), cfg.run_dir.weights_step(40)


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(3)
    word = lambda low, high: "".join(rng.choice(list("abcdef"), rng.integers(low, high)))
    return [{"prompt": f"sort {word(3, 9)}: ", "chosen": word(2, 9), "rejected": word(2, 9)} for _ in range(9)]


def session_of(tmp_path, model, rows, loss, **data):
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"type": "preference", "name": str(tmp_path / "pairs.jsonl"), **data}
    keys = {"model": {"name": str(model)}, "data": source, "val": None, "loss": loss, "batch_size": len(rows)}
    return sft.build_session(config(tmp_path, **keys), None)


def batch_of(trainer):
    return next(iter(trainer.get_train_dataloader()))


ARGUMENTS = {"report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False}


@pytest.mark.parametrize(
    "loss",
    [
        {"loss_type": "sigmoid"},
        {"loss_type": "hinge"},
        {"loss_type": "ipo"},
        {"loss_type": "robust", "label_smoothing": 0.1},
    ],
)
def test_losses_of_dpo_are_those_of_trl(loss, start, rows, tmp_path):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference, trained = (AutoModelForCausalLM.from_pretrained(each) for each in start)
    trainer = trl.DPOTrainer(
        model=trained,
        ref_model=reference,
        args=trl.DPOConfig(
            output_dir=str(tmp_path),
            beta=0.3,
            per_device_train_batch_size=len(rows),
            max_length=None,
            **ARGUMENTS,
            **loss,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(start[0]),
    )
    theirs = trainer.compute_loss(trained, batch_of(trainer)).item()
    session = session_of(tmp_path, start[0], rows, {"type": "dpo", "beta": 0.3, **loss}, text="raw")
    learner, batches = session.learner, session.pack(range(len(rows)))
    learner.policy.load_state_dict(
        session_of(tmp_path, start[1], rows, {"type": "dpo"}, text="raw").learner.policy.state_dict()
    )
    mine = learner.evaluate(batches)["loss"]
    assert mine == pytest.approx(theirs, abs=1e-6, rel=1e-6)


@pytest.mark.parametrize("centre", [None, 0.05])
def test_the_loss_of_a_reward_model_is_that_of_trl(centre, start, rows, tmp_path):
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    loss = {"type": "reward"} | ({} if centre is None else {"center_rewards_coefficient": centre})
    rows = [row | {"margin": 0.1 * i} for i, row in enumerate(rows)]
    made = session_of(tmp_path, start[1], rows, loss, text="raw")
    for _ in range(3):
        sft.train_step(made)
    sft.export_weights(made.run, made.learner.network.weights, 3, made.tokenizer_dir)
    directory = made.run.weights_step(3)
    trainer = trl.RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(directory),
        args=trl.RewardConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=len(rows),
            max_length=None,
            center_rewards_coefficient=centre,
            disable_dropout=True,
            **ARGUMENTS,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(directory),
    )
    trainer.model.eval()
    theirs = trainer.compute_loss(trainer.model, batch_of(trainer)).item()
    session = session_of(tmp_path, directory, rows, loss, text="raw")
    assert session.learner.evaluate(session.pack(range(len(rows))))["loss"] == pytest.approx(theirs, abs=1e-6, rel=1e-6)
