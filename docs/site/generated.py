"""Pages that are generated from the code when the site is built, and are not stored.

`python docs/site/generated.py DIR` writes them into a directory, to be read without the site.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

PAGES = {
    "config.md": "stretto.config.describe",
    "from-prime-rl.md": "stretto_prime.spelled",
    "metrics.md": "stretto.monitors.catalog",
    "vime-flags.md": "stretto_vime.flags.pages",
}
"""The module whose `markdown()` is the page, by the name that the page has beside the documents."""


def generated() -> Iterator[tuple[str, str]]:
    """Name and text of each page."""
    for name, module in PAGES.items():
        yield name, import_module(module).markdown()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} DIR    writes {', '.join(PAGES)} into DIR, which is made if need be")
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for page, text in generated():
        (directory / page).write_text(text, encoding="utf-8")
        print(directory / page)
