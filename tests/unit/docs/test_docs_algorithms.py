"""docs/algorithms.md holds: its settings load, its table of corrections too, and its own code runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from stretto.algorithms.custom import CreditInputs, LossInputs
from stretto.algorithms.sample_index import SampleIndex
from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.config.sections.algorithm import Algo, Loss, Turns

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "algorithms.md").read_text()
ENV = '[[orchestrator.env]]\nid = "sort-letters"\n'
CORRECTIONS = re.findall(r"^\| .* \| `((?:weights|reject|veto) = .*)` \|$", PAGE, re.M)


def loaded(tmp_path, toml):
    file = tmp_path / "c.toml"
    file.write_text(toml if "orchestrator.env" in toml else toml + "\n" + ENV)
    return load(RLConfig, ["@", str(file)], verb="rl")


@pytest.mark.parametrize("line", CORRECTIONS)
def test_every_correction_in_the_table_loads(tmp_path, line):
    cfg = loaded(tmp_path, f'[trainer.loss]\ntype = "reinforce"\n[trainer.loss.correction]\n{line}\n')
    assert cfg.trainer.loss.correction is not None and len(CORRECTIONS) == 6


@pytest.mark.parametrize("union", [Loss, Algo, Turns], ids=["loss", "algo", "turns"])
def test_every_type_has_its_row(union):
    for cls in get_args(get_args(union)[0]):
        assert f"\n- **`{cls.model_fields['type'].default}`**" in PAGE


def test_the_code_shown_runs(tmp_path, monkeypatch):
    (tmp_path / "my_science.py").write_text(re.findall(r"```python\n(.*?)```", PAGE, re.S)[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_science

    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    ones = torch.ones(3)
    inputs = LossInputs(logprobs, -ones, ones, ones.bool(), SampleIndex.of(torch.tensor([2, 1])))
    assert my_science.clipped(inputs, bound=0.2).loss.shape == (3,)
    credit = my_science.best_of(CreditInputs(np.array([1.0, 0.0]), np.ones(2, bool), None))
    assert credit.tolist() == [0.5, -0.5]
    sys.modules.pop("my_science")
