"""Makes tasks for `repo-repair` from published packages.

    python examples/repo_repair/make_tasks.py DIR parse==1.20.2 cachetools==5.5.0 --tasks 40

A package is NAME==VERSION (its source distribution, which pip downloads), a directory, or the name of an installed
package. pytest, and what the packages import, must be installed here.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from pathlib import Path

from stretto.base.errors import StrettoError
from stretto_repair.make import Maker


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("packages", nargs="+")
    parser.add_argument("--tasks", type=int, default=40, help="of each package")
    parser.add_argument("--tests", type=Path, help="a directory of tests, for packages that come without")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    maker = Maker(args.directory, args.seed)
    for package in args.packages:
        began = time.monotonic()
        try:
            made = await maker.add(package, args.tasks, args.tests)
        except StrettoError as error:
            print(f"{package}: {error}", file=sys.stderr)
            return 1
        print(f"{package}: {made} tasks in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
