"""Sums gradients over the workers in buckets, while the backward pass computes the next ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 25 * 2**20
"""Size at which a bucket is sent: PyTorch's DistributedDataParallel uses the same."""


class GradientBuckets:
    """Starts the all-reduce of a bucket of gradients as soon as the backward pass has computed them.

    Workers must compute gradients of the same parameters.

    Args:
        parameters: The trained parameters, in the order of the forward pass.
        bucket_bytes: Size at which a bucket is sent. Default: 25 MiB.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> None:
        self._bucket_bytes = bucket_bytes
        self._fill(list(reversed(parameters)))  # the backward pass computes the last parameters' gradients first
        self._missing: list[int] = []
        self.sent: list[tuple[list[nn.Parameter], Tensor, Any]] = []
        self._is_reducing = False
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _fill(self, parameters: list[nn.Parameter]) -> None:
        """Put the parameters into buckets, in this order."""
        self._parameters = parameters
        self.buckets = _split(parameters, self._bucket_bytes)
        self._bucket_of = {parameter: number for number, bucket in enumerate(self.buckets) for parameter in bucket}

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Context manager: send the gradients that the backward pass inside completes. Call `finish` afterwards."""
        self._missing, self._is_reducing = [len(bucket) for bucket in self.buckets], True
        try:
            yield
        finally:
            self._is_reducing = False

    def finish(self) -> None:
        """Send the buckets that contain a parameter without gradient, and replace all gradients by their sums.

        Such parameters then go to the last buckets: buckets are sent in order, and wait for the earlier ones.
        """
        while len(self.sent) < len(self.buckets):
            self._send()
        for parameters, gradients, work in self.sent:
            if work is not None:
                work.wait()  # with NCCL, the GPU waits and not the host
            sizes = [parameter.numel() for parameter in parameters]
            for parameter, gradient in zip(parameters, gradients.split(sizes), strict=True):
                parameter.grad = gradient.view_as(parameter)
        self.sent.clear()
        unused = {parameter for parameter in self._parameters if parameter.grad is None}
        if unused != set(self._parameters[len(self._parameters) - len(unused) :]):
            self._fill(sorted(self._parameters, key=unused.__contains__))

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if not self._is_reducing:
            return
        self._missing[self._bucket_of[parameter]] -= 1
        # Only in the buckets' order: all workers must start the collectives in one order.
        while len(self.sent) < len(self.buckets) and not self._missing[len(self.sent)]:
            self._send()

    def _send(self) -> None:
        parameters = [parameter for parameter in self.buckets[len(self.sent)] if parameter.grad is not None]
        gradients = [parameter.grad.flatten() for parameter in parameters if parameter.grad is not None]
        bucket = torch.cat(gradients) if gradients else torch.empty(0)
        self.sent.append((parameters, bucket, dist.all_reduce(bucket, async_op=True) if gradients else None))


def _split(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Split parameters into consecutive buckets."""
    buckets: list[list[nn.Parameter]] = []
    size = bucket_bytes
    for parameter in parameters:
        if size >= bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return buckets
