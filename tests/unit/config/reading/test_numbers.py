"""A text where a number is needed gets a message with the key's unit and the number to write."""

from __future__ import annotations

import pytest

from stretto.base.errors import ConfigError
from stretto.config.load import load
from stretto.config.reading.numbers import number_meant
from stretto.config.root import RLConfig


def message(word: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(RLConfig, [f"--{word}", "--orchestrator.env.0.id", "sort-letters"])
    return str(error.value).splitlines()[1]


@pytest.mark.parametrize(
    ("word", "end"),
    [
        ("budget.max_hours=8h", 'budget.max_hours = "8h": must be a valid number; it counts in hours, so write 8'),
        ("budget.max_hours=1d12h", "it counts in hours, so write 36"),
        ("budget.max_hours=30 min", "it counts in hours, so write 0.5"),
        ("budget.max_hours=eight", 'budget.max_hours = "eight": must be a valid number; it counts in hours'),
        ("budget.max_hours=8GB", "it counts in hours, without a unit"),
        ("budget.max_hours=off", "for none leave it out, or write None on the command line"),
        ("budget.max_tokens=1.5M", "it counts in tokens, so write 1500000"),
        ("budget.max_cost=$1,000", "must be a valid number; write 1000"),
        ("orchestrator.env.0.rollout_timeout_s=01:30:00", "it counts in seconds, so write 5400"),
        (
            "orchestrator.env.0.rollout_timeout_s=1:30",
            "it counts in seconds, so write 5400 if that is hours and minutes, or 90 if it is minutes and seconds",
        ),
        ("budget.max_hours=1:30", "it counts in hours, so write 1.5"),
        ("orchestrator.env.0.worker_memory_bytes=16GB", "it counts in bytes, so write 16000000000"),
        ("orchestrator.env.0.worker_memory_bytes=2 GiB", "it counts in bytes, so write 2147483648"),
        ("seq_len=32k", "it counts in tokens, so write 32000, or 32768 where k is 1024"),
        ("ckpt.interval=1h", "it counts in steps, without a unit"),
        ("trainer.scheduler.warmup_steps=5%", "in steps, or, below 1, as a share of all steps, so write 0.05"),
        ("inference.gpu_memory_utilization=90%", "must be a valid number; write 0.9"),
        ("trainer.optim.lr=1,5", "write 1.5"),
        ("trainer.optim.lr=0,001", "write 0.001"),
        ("trainer.optim.lr=1,125", "must be a valid number"),
        ("orchestrator.batch_size=1,024", "write 1024"),
        ("trainer.optim.lr=1e\u22126", "write 1e-06"),
        ("trainer.optim.lr=nan", "must be a finite number"),
        ("budget.max_tokens=2^20", "write 1048576"),
        ("orchestrator.batch_size=4x8", "write 32"),
        ("inference.server.port=8000/tcp", "must be a valid integer"),
        ("orchestrator.filter_zero_advantages=maybe", "must be true or false"),
    ],
)
def test_the_unit_and_the_number_to_write_are_said(word: str, end: str) -> None:
    assert message(word).endswith(end), message(word)


@pytest.mark.parametrize("word", ["max_steps=1_000", "max_steps=1e3", "budget.max_hours=0.5", "trainer.optim.lr=1e-6"])
def test_numbers_as_python_writes_them_are_accepted(word: str) -> None:
    load(RLConfig, [f"--{word}", "--orchestrator.env.0.id", "sort-letters"])


@pytest.mark.parametrize(
    "text", ["", "-", "e5", "1/0", "2^65", "1 2", "9" * 400, "1e999999999", "1e999999k", "9e999999h", "h", "::", "5x"]
)
def test_any_text_gets_an_answer(text: str) -> None:
    for name in ("max_hours", "keep_bytes", "lr", "seq_len"):
        assert len(number_meant(name, text, is_whole=False)) < 600


def test_what_is_proposed_is_accepted() -> None:
    for word in ("budget.max_hours=90m", "seq_len=8k", "budget.max_tokens=3B", "trainer.optim.lr=1/1000"):
        key, proposed = word.split("=")[0], message(word).rpartition("write ")[2].partition(",")[0].split(" ")[-1]
        load(RLConfig, [f"--{key}={proposed}", "--orchestrator.env.0.id", "sort-letters"])
