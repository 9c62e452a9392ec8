"""One server of each engine for all tests of the contract."""

from __future__ import annotations

import pytest
from servers import needs_vllm, scratch, serve_ready


@pytest.fixture(scope="session", params=["embedded", pytest.param("vllm", marks=needs_vllm)])
def engine(request, tmp_path_factory):
    """(name, address) of a ready engine that serves scratch(0)."""
    directory = tmp_path_factory.mktemp(request.param)
    with serve_ready(request.param, scratch(0), directory, "--served-model-name", "tiny") as url:
        yield request.param, url
