"""The rules of the simulated GPU (`tests/gpusim`), on which other tests rely."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, log_softmax, scaled_dot_product_attention

from distcse.devices.device import default_device, gpu_count, gpu_module, has_gpu, is_gpu
from tests.gpusim import Simulation, simulated

GPU = "gpu"


def numbers(*shape: int) -> Tensor:
    """Return different numbers on the device, without a wait."""
    return torch.arange(torch.Size(shape).numel(), device=GPU).view(shape) / 2


def test_it_is_there_only_while_a_test_wants_it() -> None:
    pin_memory, empty = torch.Tensor.pin_memory, torch.empty
    assert not torch.accelerator.is_available() and default_device() == "cpu"
    with simulated():
        assert torch.accelerator.current_accelerator(check_available=True) == torch.device(GPU) and is_gpu(GPU)
        assert default_device() == "gpu" and gpu_count() == 1
        left = numbers(2)
    assert not has_gpu() and torch.Tensor.pin_memory is pin_memory and torch.empty is empty
    with pytest.raises(RuntimeError, match="outside of"):
        left + 1


@pytest.mark.parametrize(
    "call",
    [
        lambda x, cpu: x + cpu,
        lambda x, cpu: x @ cpu,
        lambda x, cpu: torch.cat([x, cpu]),
        lambda x, cpu: x.gather(1, cpu.long()),
    ],
)
def test_tensors_of_two_devices_are_refused(
    call: Callable[[Tensor, Tensor], Tensor], simulated_gpu: Simulation
) -> None:
    x = numbers(2, 2)
    call(x, torch.ones(2, 2).to(GPU))
    with pytest.raises(RuntimeError, match="to be on the same device"):
        call(x, torch.ones(2, 2))
    assert (numbers(2) * torch.tensor(3.0)).tolist() == [0.0, 1.5]  # a scalar may be on the CPU


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "item   ": lambda x: x.split(int(x[0, 1] * 2)),
    "blocking copy to the host": lambda x: x.cpu(),
    "blocking copy to the host  ": lambda x: torch.zeros(2, 2).copy_(x),
    "blocking copy to the host   ": lambda x: torch.zeros(2, 2).copy_(x, non_blocking=True),
    "blocking copy from pageable memory": lambda x: torch.ones(2).to(GPU),
    "blocking copy from pageable memory ": lambda x: torch.ones(2).to(GPU, non_blocking=True),
    "blocking copy from pageable memory  ": lambda x: torch.tensor([1, 2], device=GPU),
    "blocking copy from pinned memory": lambda x: torch.ones(2).pin_memory().to(GPU),
    "index by a mask": lambda x: x[x > 1],
    "index_put_ by a mask": lambda x: x.clone().__setitem__(x > 1, x[0, :1]),
    "index by a CPU tensor": lambda x: x[torch.tensor([1])],
    "masked_select": lambda x: x.masked_select(x > 1),
    "nonzero": lambda x: torch.where(x > 1),
    "equal": lambda x: torch.equal(x, x),
    "_unique2": lambda x: x.unique(),
    "bincount": lambda x: x.flatten().long().bincount(),
    "_linalg_check_errors": lambda x: torch.linalg.inv(x),
    "synchronize": lambda x: gpu_module(GPU).synchronize(),
    "stream.synchronize": lambda x: gpu_module(GPU).current_stream().synchronize(),
    "event.synchronize": lambda x: gpu_module(GPU).Event().synchronize(),
}


@pytest.mark.parametrize("kind", WAITS)
def test_waits_are_counted_and_refused_in_a_recording(kind: str, simulated_gpu: Simulation) -> None:
    x, module = numbers(2, 2), gpu_module(GPU)
    WAITS[kind](x)
    assert not simulated_gpu.waits
    with simulated_gpu.counting():
        WAITS[kind](x)
    (place,) = (place for place in simulated_gpu.waits if place.startswith(f"{kind.strip()} @ "))
    assert place.partition(" @ ")[2].startswith(f"tests/unit/{Path(__file__).name}:")
    simulated_gpu.reset()
    assert not simulated_gpu.waits and not simulated_gpu.operations
    with (
        pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"),
        module.graph(module.CUDAGraph()),
    ):
        WAITS[kind](x)


def test_memory_that_is_read_before_its_copy_has_arrived_holds_no_numbers(simulated_gpu: Simulation) -> None:
    module = gpu_module(GPU)
    host, ids = numbers(2).to("cpu", non_blocking=True), torch.arange(2, device=GPU).to("cpu", non_blocking=True)
    assert host.isnan().all() and ids.tolist() == [torch.iinfo(torch.int64).min] * 2
    event = module.Event()
    event.record()
    later = numbers(2).to("cpu", non_blocking=True)
    event.synchronize()
    assert host.tolist() == [0.0, 0.5] and ids.tolist() == [0, 1] and later.isnan().all()
    module.current_stream().synchronize()
    assert later.tolist() == [0.0, 0.5]


def test_pinned_memory_must_not_be_overwritten_before_its_copy_is_done(simulated_gpu: Simulation) -> None:
    module, buffer, event = gpu_module(GPU), torch.zeros(4, pin_memory=True), gpu_module(GPU).Event()
    assert buffer.is_pinned() and buffer[1:].is_pinned() and not torch.zeros(4).is_pinned()
    sent = buffer[:2].to(GPU, non_blocking=True)
    event.record()
    event.synchronize()
    buffer += 1
    sent_later = buffer.to(GPU, non_blocking=True)
    assert sent.tolist() == [0.0, 0.0] and sent_later.tolist() == [1.0] * 4
    buffer.to(GPU, non_blocking=True)
    buffer += 1
    with pytest.raises(RuntimeError, match="overwritten before their copy"):
        module.synchronize()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_has_the_policy_of_cuda(dtype: torch.dtype, simulated_gpu: Simulation) -> None:
    x, weight = numbers(4, 4), nn.Parameter(numbers(4, 4))
    with torch.autocast("gpu", dtype=dtype):
        half = linear(x, weight)
        found = [half, x @ weight, torch.bmm(x[None], x[None]), scaled_dot_product_attention(x[None], x[None], x[None])]
        full = [log_softmax(half, dim=1), layer_norm(half, (4,)), half.exp(), half.sum(), half.norm(), half.cumsum(0)]
        kept = [half + half, torch.nn.functional.gelu(half), x * 2, x.double() @ x.double()]
    assert {each.dtype for each in found} == {dtype}
    assert {each.dtype for each in full} == {torch.float32}
    assert [each.dtype for each in kept] == [dtype, dtype, torch.float32, torch.float64]
    half.float().sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32 and linear(x, weight).dtype == torch.float32


def test_a_recording_computes_nothing_and_its_replay_does(simulated_gpu: Simulation) -> None:
    module = gpu_module(GPU)
    inputs, total, graph = numbers(2, 3), torch.zeros(3, device=GPU), module.CUDAGraph()

    def step() -> Tensor:
        noise = torch.rand(3, device=GPU)
        total.add_(inputs.t().sum(dim=1))
        return (total * 2 + noise).view(3, 1)

    with module.graph(graph, module.graph_pool_handle()):
        result = step()
    assert total.tolist() == [0.0] * 3
    for number in range(3):
        inputs.fill_(float(number))
        torch.manual_seed(number)
        graph.replay()
        replayed, replayed_total = result.clone(), total.clone()
        total.copy_(replayed_total - 2 * number)
        torch.manual_seed(number)
        assert torch.equal(step(), replayed) and torch.equal(total, replayed_total)


def test_memory_is_counted_and_limited_also_in_a_backward_pass(simulated_gpu: Simulation) -> None:
    module = gpu_module(GPU)
    weight = nn.Parameter(numbers(100, 100))
    allocated = module.memory_allocated()
    loss = (numbers(2, 100) @ weight).sum()
    assert module.memory_allocated() - allocated == 804  # the rows, which the backward pass needs, and the loss
    with (
        simulated_gpu.memory_limit(simulated_gpu.allocated_bytes + 10_000),
        pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 39.06 KiB"),
    ):
        loss.backward()
