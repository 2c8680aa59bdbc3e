"""Slots of a mutual distillation's workers: bundles of placement groups."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from distcse.ray_backend.event_channel import unique_name
from distcse.ray_backend.versions import draining_nodes

_STATES_AGE_S = 1.0
"""Seconds for which the states of a pool's placement groups are not asked for again."""


@dataclass(frozen=True)
class Slot:
    """Resources of one worker and its scorer."""

    placement_group: PlacementGroup
    bundle: int

    @property
    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """The strategy that schedules an actor in the slot."""
        return PlacementGroupSchedulingStrategy(self.placement_group, placement_group_bundle_index=self.bundle)


def reserve(
    number: int, resources: Mapping[str, float], node_labels: Mapping[str, str] | None, name: str
) -> list[Slot]:
    """Request a placement group for workers that start together, with one slot each.

    Args:
        number: Number of slots.
        resources: CPUs and GPUs of a slot.
        node_labels: Labels that the slots' nodes must have.
        name: Name of the placement group, such as the run's; it need not be unique.
    """
    labels = [dict(node_labels)] * number if node_labels else None
    group = placement_group(
        [dict(resources)] * number, name=unique_name(name), strategy="PACK", bundle_label_selector=labels
    )
    return [Slot(group, bundle) for bundle in range(number)]


def remove(slots: Sequence[Slot]) -> None:
    """Remove the placement groups of slots. Actors that still run there are killed."""
    for group in {slot.placement_group for slot in slots}:
        remove_placement_group(group)


def nodes_of(slots: Sequence[Slot]) -> set[str]:
    """Return the ids of the nodes of slots, without those of slots that wait for a node."""
    tables = {slot.placement_group: placement_group_table(slot.placement_group) for slot in slots}
    return {
        tables[slot.placement_group]["bundles_to_node_id"][slot.bundle]
        for slot in slots
        if tables[slot.placement_group].get("state") == "CREATED"
    }


class Reservation:
    """Slots of a group that keeps them, in one placement group.

    Args:
        number: Number of slots.
        resources: CPUs and GPUs of a slot.
        node_labels: Labels that the slots' nodes must have.
        name: Name of the placement group; see `reserve`.
    """

    def __init__(
        self, number: int, resources: Mapping[str, float], node_labels: Mapping[str, str] | None, name: str
    ) -> None:
        self._reserve = partial(reserve, number, resources, node_labels, name)
        self.slots = self._reserve()

    def renew(self) -> list[Slot]:
        """Give the slots back, and return others, which Ray places on nodes that it does not drain."""
        self.remove()
        self.slots = self._reserve()
        return self.slots

    def remove(self) -> None:
        """Remove the slots. Actors that still run there are killed."""
        remove(self.slots)


class SlotPool:
    """Slots that are reserved and lost one by one, each a placement group. Thread-safe: each group runs in a thread.

    Args:
        number: Number of slots.
        resources: CPUs and GPUs of a slot.
        node_labels: Labels that the slots' nodes must have.
        name: Name of the placement groups; see `reserve`.
    """

    def __init__(
        self, number: int, resources: Mapping[str, float], node_labels: Mapping[str, str] | None, name: str
    ) -> None:
        self.slots = [slot for _ in range(number) for slot in reserve(1, resources, node_labels, name)]
        self._nodes: dict[Slot, str] = {}
        self._usable: list[int] = []
        self._asked_at = float("-inf")
        self._asking = threading.Lock()

    def usable(self) -> list[int]:
        """Return the numbers of the slots whose nodes are there and not drained, those of one node next to each other."""
        with self._asking:
            self._ask()
            return self._usable

    def has_lost(self, slots: Sequence[Slot]) -> bool:
        """Return whether the node of one of these slots, which has been usable, was lost and Ray has no other one for it yet."""
        with self._asking:
            self._ask()
            return not self._nodes.keys() >= set(slots)

    def _ask(self) -> None:
        """Ask Ray for the nodes of the slots, unless it was asked a second ago."""
        if time.monotonic() - self._asked_at > _STATES_AGE_S:
            tables = [placement_group_table(slot.placement_group) for slot in self.slots]
            self._nodes = {
                slot: table["bundles_to_node_id"][0]
                for slot, table in zip(self.slots, tables, strict=True)
                if table.get("state") == "CREATED"
            }
            leaving = draining_nodes()
            staying = [(node, self.slots.index(slot)) for slot, node in self._nodes.items() if node not in leaving]
            self._usable = [number for _, number in sorted(staying)]
            self._asked_at = time.monotonic()

    def remove(self) -> None:
        """Remove all slots."""
        remove(self.slots)
