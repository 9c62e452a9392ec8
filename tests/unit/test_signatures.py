"""The check of shapes that conftest.py turns on."""

from __future__ import annotations

import pytest
import torch

from stretto.trainer.optim.muon import orthogonalise

pytest.importorskip("beartype")


def test_an_array_of_other_dims_or_dtype_than_the_signature_says_is_refused():
    orthogonalise(torch.ones(3, 4))
    for wrong in (torch.ones(3), torch.ones(3, 4, dtype=torch.int64)):
        with pytest.raises(TypeError, match=r"parameter 'matrices'"):
            orthogonalise(wrong)
