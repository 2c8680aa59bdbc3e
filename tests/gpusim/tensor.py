"""Tensors of the simulated GPU, and the rules that its operations obey."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.gpusim.graphs import compute
from tests.gpusim.simulation import Simulation, active
from tests.gpusim.streams import CopyToDevice, CopyToHost, Stream, current_stream, is_pinned, pin

_WAITING = frozenset(
    [
        *("_local_scalar_dense", "bincount", "equal", "masked_select", "nonzero", "embedding_renorm_"),
        *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
        *("_linalg_check_errors", "_linalg_eigh", "_linalg_svd"),
    ]
)
"""Operations whose output's shape or value the host needs."""
_INDEXING = frozenset(("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"))
_TAKES_CPU_SCALARS = frozenset(("where", "masked_fill", "masked_fill_", "fill_", "lerp_", "_fused_adamw_"))
"""Operations that read a scalar tensor on the CPU, as all pointwise operations do."""


class GpuTensor(Tensor):
    """A tensor of the simulated GPU.

    Attributes:
        raw: CPU tensor with its numbers.
    """

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, raw: Tensor) -> GpuTensor:
        made: GpuTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=torch.device("gpu:0"),
        )
        made.raw = raw
        active().allocate(raw)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run(function, *args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GpuTensor({self.raw!r})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        """Do nothing: memory of the simulated GPU is not reused while a copy reads it."""


def run(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on the device by a GPU's rules.

    Raises:
        RuntimeError: Its tensors are on different devices, or a graph is being recorded and the host would wait.
    """
    simulation, name = active(), function.overloadpacket.__name__
    simulation.count(name, _is_view(function))
    if name == "_to_copy":
        return _convert(simulation, function, *args, **kwargs)
    if name in ("copy_", "_copy_from"):
        return _copy(simulation, *(args if name == "copy_" else (args[1], args[0], *args[2:])), **kwargs)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    on_device = [tensor for tensor in tensors if isinstance(tensor, GpuTensor)]
    on_host = [tensor for tensor in tensors if not isinstance(tensor, GpuTensor)]
    _wait_for_result(simulation, function, name, args, kwargs)
    if on_device and name not in _INDEXING:
        _check_devices(simulation, function, name, on_host)
    target = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if target is not None:
        kwargs["device"] = "cpu"
    result = _compute(simulation, function, tree_map(_raw, args), tree_map(_raw, kwargs))
    for tensor in on_device:
        if tensor.raw.shape != tensor.shape:
            raise RuntimeError(f"{function} changes a tensor's shape in place, which is not simulated")
    if target == "cpu":
        return result
    wrappers = {id(tensor.raw): tensor for tensor in on_device}
    return tree_map(lambda part: wrappers[id(part)] if id(part) in wrappers else _wrap(part), result)


def _convert(simulation: Simulation, function: Any, source: Tensor, **kwargs: Any) -> Tensor:
    """Convert a tensor's type, or copy it to the host."""
    is_to_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
    options = {
        key: value
        for key, value in kwargs.items()
        if value is not None and key not in ("device", "non_blocking", "pin_memory")
    }
    if not is_to_host:
        return GpuTensor(_compute(simulation, function, (_raw(source),), options))
    converted: Tensor = function(_raw(source), **options)
    if not kwargs.get("non_blocking"):
        _wait_for_copy(simulation, converted, "blocking copy to the host")
        return converted
    target = pin(torch.empty_like(converted))
    current_stream().add(CopyToHost(_raw(source) if converted.dtype == source.dtype else converted, target))
    return target


def _copy(simulation: Simulation, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy into a tensor, within the device or between it and the host."""
    if isinstance(target, GpuTensor) and isinstance(source, GpuTensor):
        _compute(simulation, torch.ops.aten.copy_.default, (target.raw, source.raw), {})
    elif isinstance(target, GpuTensor):
        if not (non_blocking and is_pinned(source)):
            _wait_for_copy(
                simulation, source, f"blocking copy from {'pinned' if is_pinned(source) else 'pageable'} memory"
            )
        elif source.numel():
            current_stream().add(CopyToDevice(source))
        _compute(simulation, torch.ops.aten.copy_.default, (target.raw, source.clone()), {})
    elif non_blocking and is_pinned(target):
        current_stream().add(CopyToHost(_raw(source), target))
    else:
        _wait_for_copy(simulation, target, "blocking copy to the host")
        target.copy_(_raw(source))
    return target


def _wait_for_copy(simulation: Simulation, copied: Tensor, kind: str) -> None:
    if copied.numel():
        simulation.wait(kind)
        current_stream().finish()


def _wait_for_result(
    simulation: Simulation, function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Wait, if the host needs the operation's result to continue."""
    if name in _INDEXING:
        for index in args[1]:
            if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                _wait(simulation, f"{name} by a mask")
            elif isinstance(index, Tensor) and not isinstance(index, GpuTensor) and index.ndim:
                _wait(simulation, f"{name} by a CPU tensor")
    elif (
        name in _WAITING
        or (name == "repeat_interleave" and kwargs.get("output_size") is None)
        or (name == "histc" and (args[2:4] in ((), (0, 0))))
    ):
        _wait(simulation, "item" if name == "_local_scalar_dense" else name)


def _wait(simulation: Simulation, kind: str) -> None:
    simulation.wait(kind)
    current_stream().finish()


def _check_devices(simulation: Simulation, function: Any, name: str, on_host: Sequence[Tensor]) -> None:
    for tensor in on_host:
        takes_scalar = torch.Tag.pointwise in function.tags or name in _TAKES_CPU_SCALARS
        if tensor.ndim or not takes_scalar:
            simulation.refuse(
                RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, gpu:0 and cpu! "
                    f"({function} got {tuple(tensor.shape)} on the CPU)"
                )
            )


def _compute(simulation: Simulation, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if simulation.recording is None or not simulation.is_recording():
        return compute(function, args, kwargs)
    simulation.recording.before(function, args, kwargs)
    result = compute(function, args, kwargs)
    simulation.recording.after(function, args, kwargs, result)
    return result


_views: dict[Any, bool] = {}


def _is_view(function: Any) -> bool:
    """Return whether an operation only returns a view, for which a GPU launches nothing."""
    if function not in _views:
        _views[function] = any(
            result.alias_info is not None and not result.alias_info.is_write for result in function._schema.returns
        )
    return _views[function]


def _raw(value: Any) -> Any:
    return value.raw if isinstance(value, GpuTensor) else value


def _wrap(value: Any) -> Any:
    return GpuTensor(value) if isinstance(value, Tensor) else value
