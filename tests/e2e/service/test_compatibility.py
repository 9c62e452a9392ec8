"""docs/tinker.md says what works, and it is what works."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import table
from services import serving

pytest.importorskip("tinker", reason="the client of the extra `tinker`")

PAGE = Path(__file__).parents[3] / "docs" / "tinker.md"
pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_table_of_the_docs_is_what_a_live_service_does(sorter: Path, tmp_path: Path) -> None:
    with serving(tmp_path, sorter.resolve(), max_concurrent_runs=64) as service:
        rows = list(table.Calls(service).rows())
        service.close_clients()
    written, page = table.markdown(rows), PAGE.read_text()
    if os.environ.get("STRETTO_WRITE_DOCS"):
        around = re.escape(table.BEGIN) + ".*" + re.escape(table.END)
        PAGE.write_text(re.sub(around, lambda _: written, page, flags=re.DOTALL))
    works = sum(why is None for *_, why in rows)
    assert works >= 0.9 * len(rows), [row for row in rows if row[2] is not None]
    assert all(why for *_, why in rows if why is not None)
    assert os.environ.get("STRETTO_WRITE_DOCS") or written in page
