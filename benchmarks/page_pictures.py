"""The pictures of docs/seeing.md: what `stretto view` shows of a run, as Chromium draws it.

    python benchmarks/page_pictures.py RUN [--out docs] [--every DIR]

Two pictures go to `--out`: the curves, and a rollout beside the list. `--every` draws all views too, in light and dark,
on a desk and on a phone, to look at them. Needs the extra `browser` and a Chromium (`make test-all` installs both).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

VIEWS = ("now", "curves", "rollouts", "timeline", "evals", "config", "logs")
SIZES = {"desk": (1280, 800), "phone": (390, 800)}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SETTLED_MS = 400
"""After the last request: what was answered is drawn."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a run directory of `rl`")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs")
    parser.add_argument("--every", type=Path, metavar="DIR", help="draw all views into this directory too")
    given = parser.parse_args()
    with served(given.run) as address, sync_playwright() as kit:
        browser = kit.chromium.launch(executable_path=find_browser(), args=["--no-sandbox", "--disable-gpu"])
        draw(browser, address, "curves", given.out / "seeing-curves.png")
        draw(browser, address, "rollouts", given.out / "seeing-rollouts.png", keys="j")
        for view in VIEWS if given.every is not None else ():
            for size in SIZES:
                for scheme in ("light", "dark"):
                    draw(browser, address, view, given.every / f"{view}-{size}-{scheme}.png", size, scheme)
        browser.close()


def find_browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise SystemExit("there is no Chromium on this machine: apt install chromium")
    return found


def draw(
    browser: Any, address: str, view: str, path: Path, size: str = "desk", scheme: str = "light", keys: str = ""
) -> None:
    """One view as a picture. keys: pressed before it is taken."""
    width, height = SIZES[size]
    tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    tab.goto(f"{address}#/{view}")
    tab.locator("#view > * > *").first.wait_for()
    tab.wait_for_timeout(SETTLED_MS)
    for key in keys:
        tab.keyboard.press(key)
        tab.wait_for_timeout(SETTLED_MS)
    path.parent.mkdir(parents=True, exist_ok=True)
    tab.screenshot(path=path)
    tab.close()
    print(path)


@contextmanager
def served(run: Path) -> Iterator[str]:
    """The address at which a run is shown."""
    words = [sys.executable, "-m", "stretto", "view", str(run), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[1]
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
