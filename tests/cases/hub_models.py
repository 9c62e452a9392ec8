"""A small model in the layout of large ones on the Hub: several files with an index, a tied head, files for others."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import build_policy

from stretto.chat.tokenizer import build_letters_tokenizer
from stretto.models import hub

GREETING = "hello, world"


def save_model(directory: Path) -> Path:
    """Two files of weights with an index, a tokenizer, and what other programs read."""
    tokenizer = build_letters_tokenizer(directory / "tokenizer")
    model = directory / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "MAX_SHARD_BYTES", 300_000)
        hub.save_hf(build_policy(), model, tokenizer)
    (model / "pytorch_model.bin").write_bytes(b"a pickle")
    for name in ("original", "onnx"):
        (model / name).mkdir()
        (model / name / "model.safetensors").write_bytes(b"the same in another layout")
    return model
