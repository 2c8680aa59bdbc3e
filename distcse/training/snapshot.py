"""Snapshots of the model state: a checkpoint is written, and a dev score computed, while training continues."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from distcse.compat.torch import foreach_norm
from distcse.devices.device import HostCopies
from distcse.training.checkpoint_files import WEIGHTS, ModelState

Entry = tuple[str, str, Tensor]
"""Kind (see `ModelState.by_kind`), name and tensor."""


def entries_of(model: nn.Module, moments: Mapping[str, Mapping[str, Tensor]]) -> list[Entry]:
    """List a model's weights, and moments by parameter name and kind."""
    return [
        *((WEIGHTS, name, tensor) for name, tensor in model.state_dict().items()),
        *((kind, name, tensor) for name, kinds in moments.items() for kind, tensor in kinds.items()),
    ]


class Snapshot:
    """The model state after a step, readable by any thread. A GPU's copies may still be incomplete until `state` is called.

    Args:
        copies: The copied tensors, and last a vector with the number of updates and with norms.
        names: Kind and name of each tensor.
    """

    def __init__(self, copies: HostCopies, names: Sequence[tuple[str, str]]) -> None:
        self._copies = copies
        self._names = names

    def state(self) -> ModelState:
        """Wait for the copies and return them."""
        *tensors, numbers = self._copies.wait()
        kinds: dict[str, dict[str, Tensor]] = {}
        for tensor, (kind, name) in zip(tensors, self._names, strict=True):
            kinds.setdefault(kind, {})[name] = tensor
        return ModelState.of_kinds(kinds, int(numbers[0]))

    def is_finite(self) -> bool:
        """Wait for the copies, and return whether all norms are finite.

        If they are, all values are. If not, a value is not finite, or beyond 1e19, whose square overflows.
        """
        return bool(self._copies.wait()[-1].isfinite().all())


def take_snapshot(entries: Iterable[Entry], updates: Tensor, device: torch.device) -> Snapshot:
    """Take a snapshot of tensors without waiting for a GPU; an iterator may create each of them when it is due.

    A GPU's tensors are copied to pinned memory by the stream of the steps, which orders the copies before the next update. A
    CPU's tensors are not copied: they must be read before the next step changes them.

    Args:
        entries: All weights and moments.
        updates: Scalar on the device, the number of optimizer updates.
        device: Device of the model.
    """
    copies, names, norms = HostCopies(device), [], []
    for kind, name, tensor in entries:
        detached = tensor.detach()
        if detached.is_floating_point():
            norms += [norm.float() for norm in foreach_norm([detached])]  # not finite if a value is not
        copies.add(detached)
        names.append((kind, name))
    copies.add(torch.stack([updates.float(), *norms]))
    return Snapshot(copies, names)
