"""`python -m finitune`."""

import sys

from finitune.cli import main

if __name__ == "__main__":
    sys.exit(main())
