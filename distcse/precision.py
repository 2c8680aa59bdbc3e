"""`precision: auto` replaced by what the devices of each role are fast at: once for a run, before anything is spent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from distcse.device import DeviceSpeed
from distcse.events import Listener, LogMessage, StageProgress
from distcse.recipe import MutualRecipe, Recipe

R = TypeVar("R", bound=Recipe | MutualRecipe)


@dataclass(frozen=True)
class Role:
    """A part of a run that computes in one precision."""

    name: str
    """For people: `student`, `teacher 0`, `evaluation`."""
    key: str
    """The recipe key that asks for its precision, such as `training.precision`."""
    asked: str
    """What that key says."""
    devices: Sequence[DeviceSpeed]
    """The devices that it may be put on: its precision is one for all of them."""

    @property
    def precision(self) -> str:
        """What was asked for; where that is `auto`, bf16 if every device is fast at it, else fp32."""
        if self.asked != "auto":
            return self.asked
        return "bf16" if self.devices and all(device.precision == "bf16" for device in self.devices) else "fp32"

    @property
    def no_gain_on(self) -> list[DeviceSpeed]:
        """Devices, one of each name, on which its half precision is not faster than fp32."""
        if self.precision == "fp32":
            return []
        return [device for device in slowest_by_name(self.devices) if not device.is_fast_at(self.precision)]


def decide_precisions(recipe: R, roles: Sequence[Role], post: Listener) -> R:
    """The recipe with a precision in place of each `auto`; see `report_precisions` for what is posted."""
    report_precisions(roles, post)
    for role in roles:
        if role.asked == "auto":
            recipe = _with(recipe, role.key.split("."), role.precision)
    return recipe


def _with(part: Any, path: Sequence[str], value: str) -> Any:
    """A copy of a recipe with one value replaced. Validating it anew would forget which keys the user left out."""
    if not path:
        return value
    key, *rest = path
    if isinstance(part, list):
        return [_with(entry, rest, value) if str(number) == key else entry for number, entry in enumerate(part)]
    return part.model_copy(update={key: _with(getattr(part, key), rest, value)})


def report_precisions(roles: Sequence[Role], post: Listener) -> None:
    """Post the precisions in one line, and a warning for a half precision that a device is slow at, with the measured ratio.

    Nothing is posted where fp32 was asked for everywhere.
    """
    if all(role.asked == "fp32" for role in roles):
        return
    post(StageProgress("precision", 1, 1, "", finished=True, note=describe_roles(roles)))
    keys_of: dict[str, list[str]] = {}
    for role in roles:
        for device in role.no_gain_on:
            keys_of.setdefault(
                f"{role.precision} is no gain on this device ({device.describe(role.precision)})", []
            ).append(role.key)
    for no_gain, keys in keys_of.items():
        post(LogMessage(f"{', '.join(keys)}: {no_gain}; write auto or fp32", warning=True))


def slowest_by_name(devices: Iterable[DeviceSpeed]) -> list[DeviceSpeed]:
    """One device of each name, the one that gains least by bf16: nodes of one kind differ by noise."""
    found: dict[str, DeviceSpeed] = {}
    for device in devices:
        known = found.setdefault(device.name, device)
        if device.speedups.get("bf16", 0.0) < known.speedups.get("bf16", 0.0):
            found[device.name] = device
    return list(found.values())


def describe_roles(roles: Sequence[Role]) -> str:
    """The chosen precisions and the devices they were chosen for, in one line."""
    names_of: dict[str, list[str]] = {}
    for role in roles:
        names_of.setdefault(role.precision, []).append(role.name)
    devices = slowest_by_name(device for role in roles for device in role.devices)
    chosen = "; ".join(f"{precision}: {', '.join(names)}" for precision, names in names_of.items())
    return f"{chosen} ({'; '.join(device.describe() for device in devices)})"
