"""The documents as a site: a strict build finds wrong links and anchors; pages need nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages.blocks import PAGES, ROOT, text_of

pytestmark = pytest.mark.heavy

DOCUMENTS = [*PAGES, "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md"]
LOADED = re.compile(r'<(?:script|img|iframe)[^>]* src="([^"]+)"|<link[^>]* href="([^"]+)"')


def articles(site: Path) -> dict[str, str]:
    """The text of each page in HTML, without the theme's frame; pages with source are left out."""
    pages = (page for page in sorted(site.rglob("*.html")) if site / "source" not in page.parents)
    found = {str(page.relative_to(site)): page.read_text().partition("<article")[2] for page in pages}
    return {name: text.partition("</article>")[0] for name, text in found.items() if text}


def test_every_document_is_a_page_and_linked_source_too(site):
    names = set(articles(site))
    assert {f"{Path(page).stem}.html" for page in PAGES if page.startswith("docs/")} <= names
    assert {"index.html", "CHANGELOG.html", "SECURITY.html", "benchmarks/index.html"} <= names
    assert {f"examples/{path.parent.name}/index.html" for path in ROOT.glob("examples/*/README.md")} <= names
    assert "attend.py" in (site / "source/src/stretto/models/parts/files.html").read_text()
    source = (site / "source/src/stretto/trainer/rl.py.html").read_text()
    assert "def main(" in re.sub(r"<[^>]+>", "", source)


def test_generated_pages_are_built_and_linked(site):
    for page in ("config", "metrics", "from-prime-rl", "vime-flags"):
        assert len((site / f"{page}.html").read_text()) > 20_000
    assert 'href="config.html' in articles(site)["algorithms.html"]
    assert 'href="../../vime.html' in articles(site)["examples/judge/index.html"]


def test_pages_load_nothing_from_another_host(site):
    for page in site.rglob("*.html"):
        loaded = [script or style for script, style in LOADED.findall(page.read_text())]
        assert loaded and not [each for each in loaded if "://" in each or each.startswith("//")], page


def test_no_list_table_or_code_is_shown_as_plain_text(site):
    for name, text in articles(site).items():
        for paragraph in re.findall(r"<p>(.*?)</p>", text, re.S):
            for line in paragraph.splitlines():
                assert not re.match(r"\s*([-*] |\d+\. |\||#+ |```)", line), f"{name}: {line}"


@pytest.mark.parametrize("page", DOCUMENTS)
def test_placeholders_in_angle_brackets_are_code(page):
    """<name> outside of code is taken for HTML and vanishes."""
    text = re.sub(r"^ *```.*?^ *```|`[^`]*`", "", text_of(page), flags=re.S | re.M)
    assert not re.findall(r"<[a-zA-Z_/][^>]*>", text)


def test_search_finds_words_of_pages_but_not_of_source(site):
    index = (site / "search" / "search_index.json").read_text()
    assert "max_off_policy_steps" in index and "source/src" not in index
