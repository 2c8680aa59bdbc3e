"""Two rounds of the soak test, on a cluster of several nodes: a node is killed, and a driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.soak import ROWS, Soak
from tests.kills import Nodes
from tests.wikipedia import wiki_sentences

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Iterator[Soak]:
    folder = tmp_path_factory.mktemp("soak")
    with Nodes(folder) as cluster_nodes:
        yield Soak(folder, cluster_nodes, wiki_sentences(data, ROWS))


@pytest.mark.parametrize(("seed", "kind"), [(10, "node"), (11, "driver")])
def test_a_disturbed_run_reaches_the_same_weights(soak: Soak, seed: int, kind: str) -> None:
    played = soak.play(seed, kind)
    assert played.survived and played.restarts == 1, played.line
