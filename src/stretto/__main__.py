"""`python -m stretto <verb>`: how the launcher starts its children."""

import sys

from stretto.cli import main

if __name__ == "__main__":
    sys.exit(main())
