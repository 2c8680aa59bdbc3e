"""Heads between the pooled vector and the objective. In training only: no saved model holds one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distcse.recipe import Projection


def build_projection(kind: Projection, width: int) -> nn.Module:
    """A fresh head from (…, width) to (…, width)."""
    makers = {"tanh_mlp": TanhMLP, "batch_norm_mlp": BatchNormMLP}
    return makers[kind](width) if kind in makers else nn.Identity()


class TanhMLP(nn.Sequential):
    """SimCSE's head: Linear and tanh, weights from N(0, 0.02), never the backbone's own pooler."""

    def __init__(self, width: int) -> None:
        linear = nn.Linear(width, width)
        nn.init.normal_(linear.weight, std=0.02)
        nn.init.zeros_(linear.bias)
        super().__init__(linear, nn.Tanh())


class BatchNormMLP(nn.Sequential):
    """DiffCSE's head (App. A): Linear to twice the width, batch norm, ReLU, Linear back, batch norm without affine."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Linear(width, 2 * width, bias=False),
            GlobalBatchNorm(2 * width),
            nn.ReLU(),
            nn.Linear(2 * width, width, bias=False),
            GlobalBatchNorm(width, affine=False),
        )


class GlobalBatchNorm(nn.BatchNorm1d):
    """Batch norm whose statistics span the batches of all workers, with the gradient of one worker on all rows.

    On one worker it is `nn.BatchNorm1d`. PyTorch's own SyncBatchNorm runs on GPUs only.
    """

    def forward(self, rows: Tensor) -> Tensor:
        """(B, width) -> (B, width)."""
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(rows)
        kind = rows.dtype
        rows = rows.to(torch.promote_types(kind, torch.float32))  # sums and numbers of rows are beyond bf16
        ones = rows.new_ones(1)
        sums: Tensor = _AddOverWorkers.apply(torch.cat([rows.sum(dim=0), ones * len(rows)]))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        variance = _AddOverWorkers.apply(((rows - mean) ** 2).sum(dim=0)) / count
        self._remember(mean.detach(), variance.detach(), count)
        normed = (rows - mean) * torch.rsqrt(variance + self.eps)
        return (normed * self.weight + self.bias if self.affine else normed).to(kind)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        momentum = 0.1 if self.momentum is None else self.momentum
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.running_mean.lerp_(mean, momentum)
        self.running_var.lerp_(variance * count / (count - 1).clamp(min=1), momentum)
        self.num_batches_tracked += 1


class _AddOverWorkers(torch.autograd.Function):
    """Sum over workers; every worker's loss depends on it, so backward sums too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total
