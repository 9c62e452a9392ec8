"""The site of the documents, which several files look at."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pages.blocks import ROOT


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    # Not --quiet, with which a warning does not fail the build.
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder
