"""A damaged config.json is one message that names it, wherever a start or a dry run reads it first."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes.add_ons import needs

from stretto.cli import main

BROKEN = {
    "{bad": "cannot be read",
    "[1]": "a list where a table of keys and values belongs",
    '{"model_type": 3}': "model_type = 3 must be a text",
    '{"model_type": "qwen3_vl", "text_config": [1]}': "text_config = [1] must be a table",
}
ENV = ["--orchestrator.env", '[{"id": "sort-letters"}]']


@needs("vllm")
@pytest.mark.parametrize("text", BROKEN)
@pytest.mark.parametrize("verb", ["rl", "inference"])
def test_a_damaged_file_is_one_message(
    verb: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "config.json").write_text(text)
    model = (
        ["--model.name", str(tmp_path), *ENV, "--inference.engine"]
        if verb == "rl"
        else ["--model", str(tmp_path), "--engine"]
    )
    assert main([verb, *model, "vllm", "--output-dir", str(tmp_path / "out"), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert str(tmp_path / "config.json") in said and BROKEN[text] in said, said
    assert "bug" not in said and said.count("\n") == 1
