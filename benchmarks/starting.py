"""A process that starts a run and tells the seconds from its own start to the end of the first step.

python -m benchmarks.starting RECIPE [OVERRIDE ...]
"""

from __future__ import annotations

import sys
import time

import psutil

from distcse.events import Event, Steps, Watch
from distcse.recipe import load_recipe
from distcse.student.run import run


def main() -> None:
    recipe = load_recipe(sys.argv[1], sys.argv[2:])
    steps: list[float] = []

    def listen(event: Event) -> None:
        if isinstance(event, Steps):
            steps.append(time.time())

    run(recipe, Watch(listen))
    print(steps[0] - psutil.Process().create_time())


if __name__ == "__main__":
    main()
