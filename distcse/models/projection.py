"""Projection heads between the pooled vector and the objective, used in training only and never saved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from distcse.distributed import all_reduce_sum, world_size
from distcse.recipe import Projection


def build_projection(kind: Projection, width: int) -> nn.Module:
    """Create a projection head from (…, width) to (…, width) with random weights; `none` is the identity."""
    classes = {"tanh_mlp": TanhMLP, "batch_norm_mlp": BatchNormMLP}
    return classes[kind](width) if kind in classes else nn.Identity()


class TanhMLP(nn.Sequential):
    """SimCSE's head: Linear and tanh, with weights from N(0, 0.02²), not those of the backbone's pooler."""

    def __init__(self, width: int) -> None:
        linear = nn.Linear(width, width)
        nn.init.normal_(linear.weight, std=0.02)
        nn.init.zeros_(linear.bias)
        super().__init__(linear, nn.Tanh())


class BatchNormMLP(nn.Sequential):
    """DiffCSE's head (App. A): Linear to 2 · width, batch norm, ReLU, Linear to width, batch norm without affine."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Linear(width, 2 * width, bias=False),
            GlobalBatchNorm(2 * width),
            nn.ReLU(),
            nn.Linear(2 * width, width, bias=False),
            GlobalBatchNorm(width, affine=False),
        )


class GlobalBatchNorm(nn.BatchNorm1d):
    """Batch norm over the global batch of all workers; with one worker, `nn.BatchNorm1d`.

    Output and gradients equal those of one worker with all rows. PyTorch's SyncBatchNorm runs on GPUs only.
    """

    def forward(self, rows: Tensor) -> Tensor:
        """Normalize (B, width) rows."""
        if not self.training or world_size() == 1:
            return super().forward(rows)
        dtype = rows.dtype
        rows = rows.to(torch.promote_types(dtype, torch.float32))  # bf16 cannot represent the sums and row counts
        ones = rows.new_ones(1)
        sums: Tensor = _AllReduceSum.apply(torch.cat([rows.sum(dim=0), ones * len(rows)]))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        variance = _AllReduceSum.apply(((rows - mean) ** 2).sum(dim=0)) / count
        self._update_running_stats(mean.detach(), variance.detach(), count)
        normalized = (rows - mean) * torch.rsqrt(variance + self.eps)
        return (normalized * self.weight + self.bias if self.affine else normalized).to(dtype)

    @torch.no_grad()
    def _update_running_stats(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        momentum = 0.1 if self.momentum is None else self.momentum
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.running_mean.lerp_(mean, momentum)
        self.running_var.lerp_(variance * count / (count - 1).clamp(min=1), momentum)
        self.num_batches_tracked += 1


class _AllReduceSum(torch.autograd.Function):
    """Sums over workers. Backward sums the gradients too, because every worker's loss depends on the sum."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return all_reduce_sum(tensor.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return all_reduce_sum(gradient.clone())
