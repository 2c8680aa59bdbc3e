"""`python -m distcse …` and the command `distcse …`."""

import sys

from distcse.cli import main

if __name__ == "__main__":
    sys.exit(main())
