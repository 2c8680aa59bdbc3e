"""Read TensorBoard's event files."""

from __future__ import annotations

import struct
from pathlib import Path


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read TensorBoard's files: (step, value) by name, in the order of writing."""
    from tensorboardX.proto.event_pb2 import Event as StoredEvent

    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.iterdir()):
        content, position = file.read_bytes(), 0
        while position < len(content):
            (length,) = struct.unpack("<Q", content[position : position + 8])
            event = StoredEvent.FromString(content[position + 12 : position + 12 + length])
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found.setdefault(value.tag, []).append((event.step, value.simple_value))
            position += length + 16
    return found
