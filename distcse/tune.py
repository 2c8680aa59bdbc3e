"""`python -m distcse.tune …` is `distcse tune …`."""

import sys

from distcse.cli import main

if __name__ == "__main__":
    sys.exit(main(["tune", *sys.argv[1:]]))
