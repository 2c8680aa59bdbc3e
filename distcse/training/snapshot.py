"""Snapshots of the model state: a checkpoint is written, and a dev score computed, while training continues."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from distcse.compat.torch import foreach_norm
from distcse.devices.device import HostCopies, gpu_module, is_gpu, usable_memory
from distcse.training.checkpoint_files import WEIGHTS, ModelState

Entry = tuple[str, str, Tensor]
"""Kind (see `ModelState.by_kind`), name and tensor."""
_MEMORY_MARGIN = 1.1
"""Free memory that joining needs, relative to the size of the tensors."""


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
        layout: For each tensor, what it is the concatenation of: kind, name and shape.
        sources: Tensors to keep in the GPU's memory until the copies are complete. Default: none.
    """

    def __init__(
        self,
        copies: HostCopies,
        layout: Sequence[Sequence[tuple[str, str, torch.Size]]],
        sources: Iterable[Tensor] = (),
    ) -> None:
        self._copies = copies
        self._layout = layout
        self._sources = list(sources)

    def state(self) -> ModelState:
        """Wait for the copies and return them."""
        *tensors, numbers = self._copies.wait()
        self._sources.clear()
        kinds: dict[str, dict[str, Tensor]] = {}
        for tensor, parts in zip(tensors, self._layout, strict=True):
            split = [tensor] if len(parts) == 1 else tensor.split([shape.numel() for _, _, shape in parts])
            for part, (kind, name, shape) in zip(split, parts, strict=True):
                kinds.setdefault(kind, {})[name] = part.view(shape)
        return ModelState.of_kinds(kinds, int(numbers[0]))

    def release_copied(self) -> None:
        """Free the GPU's memory if the copies are complete, without waiting for them."""
        if self._copies.is_complete():
            self._sources.clear()

    def is_finite(self) -> bool:
        """Wait for the copies, and return whether all norms are finite.

        If they are, all values are. If not, a value is not finite, or beyond 1e19, whose square overflows.
        """
        return bool(self._copies.wait()[-1].isfinite().all())


class SnapshotTaker:
    """Takes snapshots of one engine's state without waiting for a GPU.

    PCIe needs as long for the weights and moments of BERT-base as several steps take. Therefore they are first copied within
    the GPU, to a few concatenated tensors, and from there by a side stream while steps continue. If the steps need that memory,
    the copies are queued between two steps instead, and only the GPU waits. Pinned memory of a snapshot is reused by PyTorch
    once its tensors are freed.

    A CPU's tensors are not copied: they must be read before the next step changes them.

    Args:
        device: Device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = gpu_module(device).Stream(device) if is_gpu(device) else None
        self.joins: bool | None = None

    def take(self, entries: Sequence[Entry], updates: Tensor) -> Snapshot:
        """Start the copies of tensors that the engine keeps.

        Args:
            entries: All weights and moments.
            updates: Scalar on the device, the number of optimizer updates.
        """
        has_moments = any(kind != WEIGHTS for kind, _, _ in entries)
        if self._stream is not None and self.joins is None and has_moments:
            # Decided at the first snapshot after a step: the peak of the memory then includes a step, and no snapshot.
            self.joins = self._has_room(sum(tensor.nbytes for _, _, tensor in entries))
        if self.joins:
            try:
                return self._take_joined(entries, updates)
            except torch.OutOfMemoryError:  # steps, or other processes, use more memory than at the first snapshot
                self.joins = False
        return self.take_each(entries, updates)

    def take_each(self, entries: Iterable[Entry], updates: Tensor) -> Snapshot:
        """Start the copies of tensors one by one, so that an iterator may create each of them when it is due.

        A GPU's tensors are copied by the stream of the steps, which order the copies before the next update.
        """
        copies, layout, norms = HostCopies(self._device), [], []
        for kind, name, tensor in entries:
            detached = tensor.detach()
            norms += _norms([detached])
            copies.add(detached)
            layout.append([(kind, name, tensor.shape)])
        copies.add(torch.stack([updates.float(), *norms]))
        return Snapshot(copies, layout)

    def _take_joined(self, entries: Sequence[Entry], updates: Tensor) -> Snapshot:
        groups: dict[tuple[str, torch.dtype], list[Entry]] = {}
        for entry in entries:
            groups.setdefault((entry[0], entry[2].dtype), []).append(entry)
        joined = [torch.cat([tensor.detach().reshape(-1) for _, _, tensor in group]) for group in groups.values()]
        joined.append(torch.stack([updates.float(), *_norms(joined)]))
        copies, module = HostCopies(self._device), gpu_module(self._device)
        assert self._stream is not None
        self._stream.wait_stream(module.current_stream(self._device))
        with module.stream(self._stream):
            for tensor in joined:
                copies.add(tensor)
        layout = [[(kind, name, tensor.shape) for kind, name, tensor in group] for group in groups.values()]
        return Snapshot(copies, layout, joined)

    def _has_room(self, size_bytes: int) -> bool:
        """Whether a copy of the state fits in the GPU's memory next to the largest step so far."""
        largest_step = gpu_module(self._device).max_memory_allocated(self._device)
        return bool(usable_memory(self._device) - largest_step >= _MEMORY_MARGIN * size_bytes)


def _norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the norms of floating-point tensors, of which one is not finite if a value is not."""
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    return [norm.float() for norm in foreach_norm(floating)] if floating else []
