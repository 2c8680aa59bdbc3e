"""Replace `precision: auto` by the precision that the devices of each role are fast at, once per run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from distcse.devices.device import DeviceSpeed, auto_precision, describe_gpu_defaults
from distcse.events import Listener, LogMessage, StageProgress
from distcse.recipe import BaseRecipe

R = TypeVar("R", bound=BaseRecipe)


@dataclass(frozen=True)
class Role:
    """A part of a run that computes in one precision."""

    name: str
    """Name in messages: `student`, `teacher 0`, `evaluation`."""
    key: str
    """Recipe key of its precision, such as `training.precision`."""
    requested: str
    """Value of that key."""
    devices: Sequence[DeviceSpeed]
    """Devices that it may run on, all in the same precision."""
    is_teacher: bool = False
    overflows_fp16: bool = False
    """Whether its model's numbers exceed fp16's range."""

    @property
    def precision(self) -> str:
        """The requested precision; for `auto`, the one that `auto_precision` selects."""
        if self.requested != "auto":
            return self.requested
        return auto_precision(self.devices, is_teacher=self.is_teacher, overflows_fp16=self.overflows_fp16)

    @property
    def slow_devices(self) -> list[DeviceSpeed]:
        """Devices, one per name, on which the role's half precision is not fast; see `DeviceSpeed.is_fast_at`."""
        if self.precision == "fp32":
            return []
        return [device for device in slowest_by_name(self.devices) if not device.is_fast_at(self.precision)]


def decide_precisions(recipe: R, roles: Sequence[Role], emit: Listener) -> R:
    """Return the recipe with each `auto` replaced by a precision, and report the precisions."""
    report_precisions(roles, emit)
    for role in roles:
        if role.requested == "auto":
            recipe = _replace_value(recipe, role.key.split("."), role.precision)
    return recipe


def _replace_value(part: Any, path: Sequence[str], value: str) -> Any:
    """Copy a recipe with one value replaced; validating it again would lose which keys the user left out."""
    if not path:
        return value
    key, *rest = path
    if isinstance(part, list):
        return [
            _replace_value(entry, rest, value) if str(number) == key else entry for number, entry in enumerate(part)
        ]
    return part.model_copy(update={key: _replace_value(getattr(part, key), rest, value)})


def report_precisions(roles: Sequence[Role], emit: Listener) -> None:
    """Emit devices and precisions in one line, and a warning for each half precision that is slow on a device.

    Nothing is emitted if all roles request fp32.
    """
    if all(role.requested == "fp32" for role in roles):
        return
    emit(StageProgress("precision", 1, 1, "", finished=True, note=describe_roles(roles)))
    keys_of: dict[str, list[str]] = {}
    for role in roles:
        for device in role.slow_devices:
            keys_of.setdefault(
                f"{role.precision} has no speed advantage on this device ({device.describe(role.precision)})", []
            ).append(role.key)
    for problem, keys in keys_of.items():
        emit(LogMessage(f"{', '.join(keys)}: {problem}; set auto or fp32", warning=True))


def slowest_by_name(devices: Iterable[DeviceSpeed]) -> list[DeviceSpeed]:
    """Return one device per name, the one with the lowest bf16 speedup: timings vary between nodes of the same kind."""
    found: dict[str, DeviceSpeed] = {}
    for device in devices:
        slowest = found.setdefault(device.name, device)
        if device.speedups.get("bf16", 0.0) < slowest.speedups.get("bf16", 0.0):
            found[device.name] = device
    return list(found.values())


def describe_roles(roles: Sequence[Role]) -> str:
    """Format the selected precisions and their devices as one line."""
    names_of: dict[str, list[str]] = {}
    for role in roles:
        names_of.setdefault(role.precision, []).append(role.name)
    devices = slowest_by_name(device for role in roles for device in role.devices)
    chosen = "; ".join(f"{precision}: {', '.join(names)}" for precision, names in names_of.items())
    line = f"{chosen} ({'; '.join(device.describe() for device in devices)})"
    return f"{line}; on GPUs {describe_gpu_defaults()}" if any(device.kind == "gpu" for device in devices) else line
