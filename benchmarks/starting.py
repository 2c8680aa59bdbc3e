"""A process that starts a run and tells when its first step was done; the second run of the same process too.

python -m benchmarks.starting RECIPE [OVERRIDE ...]
"""

from __future__ import annotations

import json
import sys
import time

import psutil

from distcse.events import Event, Steps, Watch
from distcse.recipe import load_recipe
from distcse.student.houses import house_of
from distcse.student.run import run


def main() -> None:
    recipe = load_recipe(sys.argv[1], sys.argv[2:])
    started = psutil.Process().create_time()
    house, surroundings = house_of(recipe)
    told = []
    with surroundings:
        for begun in (started, None):
            seen: list[float] = []

            def listen(event: Event, seen: list[float] = seen) -> None:
                if isinstance(event, Steps):
                    seen.append(time.time())

            begin = begun if begun is not None else time.time()
            run(recipe, Watch(listen), house=house)
            told.append(seen[0] - begin)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
