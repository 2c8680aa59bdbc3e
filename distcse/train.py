"""`python -m distcse.train …` is `distcse train …`."""

import sys

from distcse.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
