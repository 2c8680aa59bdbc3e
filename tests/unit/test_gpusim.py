"""The rules of the simulated GPU (`tests/gpusim`), on which other tests rely."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, log_softmax, scaled_dot_product_attention

from distcse.devices.device import default_device, gpu_count, gpu_module, has_gpu, is_gpu, speed_of, to_device
from tests.gpusim import Simulation, simulated
from tests.workers import run_workers

GPU = "gpu"


def numbers(*shape: int) -> Tensor:
    """Return different numbers on the device, without a wait."""
    return torch.arange(torch.Size(shape).numel(), device=GPU).view(shape) / 2


def test_it_is_there_only_while_a_test_wants_it() -> None:
    pin_memory, empty = torch.Tensor.pin_memory, torch.empty
    assert not torch.accelerator.is_available() and default_device() == "cpu"
    with simulated():
        assert torch.accelerator.is_available() and default_device() == "gpu" and gpu_count() == 1
        assert torch.accelerator.current_accelerator(check_available=True) == torch.device(GPU) and is_gpu(GPU)
        assert speed_of("gpu").name == "Simulated GPU" and speed_of("gpu").is_fast_at("bf16")
        left = numbers(2)
    assert not has_gpu() and torch.Tensor.pin_memory is pin_memory and torch.empty is empty
    with pytest.raises(RuntimeError, match="outside of"):
        torch.zeros(2, device=GPU)
    with pytest.raises(RuntimeError, match="outside of"):
        left + 1


def test_numbers_and_gradients_are_those_of_the_cpu(simulated_gpu: Simulation) -> None:
    model, rows = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2)), torch.randn(5, 3)
    model(rows).square().sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    parameters = list(model.parameters())
    model.zero_grad()
    assert [id(each) for each in model.to(GPU).parameters()] == [id(each) for each in parameters]
    model(to_device(rows, GPU)).square().sum().backward()
    for parameter, gradient in zip(parameters, expected, strict=True):
        assert parameter.device.type == "gpu" and parameter.grad is not None and gradient is not None
        assert torch.equal(parameter.grad.cpu(), gradient)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, cpu: x + cpu,
        lambda x, cpu: x @ cpu,
        lambda x, cpu: torch.cat([x, cpu]),
        lambda x, cpu: torch.stack([x.sum(), cpu.sum()]),
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


def test_a_scalar_on_the_cpu_is_no_mismatch(simulated_gpu: Simulation) -> None:
    assert (numbers(2) * torch.tensor(3.0)).tolist() == [0.0, 1.5]


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "item ": lambda x: bool((x > 0).any()),
    "item  ": lambda x: int(x.max()),
    "item   ": lambda x: x.split(int(x[0, 1] * 2)),
    "blocking copy to the host": lambda x: x.cpu(),
    "blocking copy to the host ": lambda x: x.tolist(),
    "blocking copy to the host  ": lambda x: torch.zeros(2, 2).copy_(x),
    "blocking copy to the host   ": lambda x: torch.zeros(2, 2).copy_(x, non_blocking=True),
    "blocking copy from pageable memory": lambda x: torch.ones(2).to(GPU),
    "blocking copy from pageable memory ": lambda x: torch.ones(2).to(GPU, non_blocking=True),
    "blocking copy from pageable memory  ": lambda x: torch.tensor([1, 2], device=GPU),
    "blocking copy from pageable memory   ": lambda x: x.new_tensor(3.0),
    "blocking copy from pinned memory": lambda x: torch.ones(2).pin_memory().to(GPU),
    "index by a mask": lambda x: x[x > 1],
    "index_put_ by a mask": lambda x: x.clone().__setitem__(x > 1, x[0, :1]),
    "index by a CPU tensor": lambda x: x[torch.tensor([1])],
    "masked_select": lambda x: x.masked_select(x > 1),
    "nonzero": lambda x: torch.where(x > 1),
    "equal": lambda x: torch.equal(x, x),
    "_unique2": lambda x: x.unique(),
    "bincount": lambda x: x.flatten().long().bincount(),
    "repeat_interleave": lambda x: x[0].repeat_interleave(x[1].long()),
    "histc": lambda x: x.histc(4),
    "isin": lambda x: torch.isin(x, torch.arange(100, device=GPU)),
    "_linalg_check_errors": lambda x: torch.linalg.inv(x),
    "synchronize": lambda x: gpu_module(GPU).synchronize(),
    "stream.synchronize": lambda x: gpu_module(GPU).current_stream().synchronize(),
    "event.synchronize": lambda x: gpu_module(GPU).Event().synchronize(),
}


@pytest.mark.parametrize("kind", WAITS)
def test_waits_are_counted(kind: str, simulated_gpu: Simulation) -> None:
    x = numbers(2, 2)
    WAITS[kind](x)
    assert not simulated_gpu.waits
    with simulated_gpu.counting():
        WAITS[kind](x)
    (place,) = (place for place in simulated_gpu.waits if place.startswith(f"{kind.strip()} @ "))
    assert place.partition(" @ ")[2].startswith(f"tests/unit/{Path(__file__).name}:")
    simulated_gpu.reset()
    assert not simulated_gpu.waits and not simulated_gpu.operations


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.ones(2).pin_memory().to(GPU, non_blocking=True),
        lambda x: torch.empty(2, 2, pin_memory=True).copy_(x, non_blocking=True),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: x.masked_fill(x > 1, 0.0),
        lambda x: torch.where(x > 1, x, 0.0),
        lambda x: x.new_zeros(3),
        lambda x: torch.full((2,), 3.0, device=GPU),
        lambda x: torch.randint(5, (3,), device=GPU),
        lambda x: torch.isin(x, torch.arange(3, device=GPU)),
        lambda x: x.flatten().repeat_interleave(torch.arange(4, device=GPU), output_size=6),
        lambda x: x.histc(4, min=0, max=2),
        lambda x: torch.searchsorted(x[0], x[1]),
        lambda x: x.sort(dim=1),
        lambda x: x[:, 1].fill_(2.0),
        lambda x: torch.zeros(0).to(GPU),
    ],
)
def test_other_operations_wait_for_nothing(call: Callable[[Tensor], object], simulated_gpu: Simulation) -> None:
    x = numbers(2, 2)
    with simulated_gpu.counting():
        call(x)
    assert not simulated_gpu.waits and simulated_gpu.operations


def test_a_wait_is_attributed_to_the_product(simulated_gpu: Simulation) -> None:
    with simulated_gpu.counting():
        to_device(numbers(2), torch.device("cpu"))
    (place,) = simulated_gpu.waits
    assert place.startswith("blocking copy to the host @ distcse/devices/device.py:")


def test_a_wait_of_another_thread_names_it(simulated_gpu: Simulation) -> None:
    thread = threading.Thread(target=lambda: numbers(2).tolist(), name="writer")
    with simulated_gpu.counting():
        thread.start()
        thread.join()
    (place,) = simulated_gpu.waits
    assert place.endswith(" in writer")


def test_operations_and_launches_are_counted(simulated_gpu: Simulation) -> None:
    x = numbers(2, 2)
    with simulated_gpu.counting():
        (x.t() @ x).view(4).add_(1)
    assert simulated_gpu.operations == {"t": 1, "mm": 1, "view": 1, "add_": 1}
    assert simulated_gpu.launches == 2


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


def test_a_copy_on_a_side_stream_reads_late(simulated_gpu: Simulation) -> None:
    """What is written before another stream waits for the copy is a race, and the copy sees it."""
    module = gpu_module(GPU)
    for waits, expected in ((False, [1.0, 1.5]), (True, [0.0, 0.5])):
        source, stream = numbers(2), module.Stream()
        stream.wait_stream(module.current_stream())
        with module.stream(stream):
            copy = source.to("cpu", non_blocking=True)
        if waits:
            module.current_stream().wait_stream(stream)
        source += 1
        stream.synchronize()
        assert copy.tolist() == expected


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


def test_the_device_has_its_own_random_numbers(simulated_gpu: Simulation) -> None:
    torch.manual_seed(3)
    drawn = torch.rand(2, device=GPU)
    on_host = torch.rand(2)
    assert torch.equal(drawn.cpu(), on_host)  # both seeded by 3, and neither moved by the other
    with torch.random.fork_rng([torch.device(GPU)], device_type="gpu"):
        torch.manual_seed(4)
        torch.rand(2, device=GPU)
    after = torch.rand(2, device=GPU)
    torch.manual_seed(3)
    torch.rand(2, device=GPU)
    assert torch.equal(after.cpu(), torch.rand(2, device=GPU).cpu())


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


@pytest.mark.parametrize("kind", WAITS)
def test_a_recording_refuses_waits(kind: str, simulated_gpu: Simulation) -> None:
    x, module = numbers(2, 2), gpu_module(GPU)
    with (
        pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"),
        module.graph(module.CUDAGraph()),
    ):
        WAITS[kind](x)


@pytest.mark.parametrize("call", [lambda: torch.manual_seed(1), lambda: torch.ones(2).pin_memory()])
def test_a_recording_refuses_seeds_and_pinned_memory(call: Callable[[], object], simulated_gpu: Simulation) -> None:
    module = gpu_module(GPU)
    with pytest.raises(RuntimeError, match="not permitted"), module.graph(module.CUDAGraph()):
        call()


def test_another_thread_may_wait_during_a_recording(simulated_gpu: Simulation) -> None:
    module, found = gpu_module(GPU), list[list[float]]()
    x = numbers(2)
    graph = module.CUDAGraph()
    with module.graph(graph):
        thread = threading.Thread(target=lambda: found.append((x + 1).tolist()))
        thread.start()
        thread.join()
    assert found == [[1.0, 1.5]]


def test_a_recording_is_ended_by_the_thread_that_began_it(simulated_gpu: Simulation) -> None:
    module, problems = gpu_module(GPU), list[str]()
    recording = module.graph(module.CUDAGraph())

    def end() -> None:
        try:
            recording.__exit__(None, None, None)
        except RuntimeError as error:
            problems.append(str(error))

    recording.__enter__()
    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert problems == ["attempt to terminate a thread-local capture sequence from another thread"]


def test_collectives_send_the_devices_numbers_and_cannot_be_recorded() -> None:
    assert run_workers(sum_and_record, 2) == [[0.0, 3.0], [0.0, 3.0]]


def sum_and_record() -> list[float]:
    """Return the sum of both workers' numbers."""
    with simulated():
        total, module = numbers(2) * (2 * dist.get_rank() + 2), gpu_module(GPU)
        dist.all_reduce(total)
        with pytest.raises(RuntimeError, match="a collective cannot be recorded"), module.graph(module.CUDAGraph()):
            dist.all_reduce(total)
        return [float(each) for each in total.tolist()]


def test_memory_is_counted_and_limited(simulated_gpu: Simulation) -> None:
    module = gpu_module(GPU)
    x = torch.zeros(1000, device=GPU)
    assert module.memory_allocated() == 4000 and x.view(10, 100)[2:].sum().shape == ()
    with simulated_gpu.memory_limit(10_000):
        assert module.mem_get_info() == (6000, 10_000)
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 7.81 KiB.* capacity of 9.77 KiB"):
            torch.zeros(2000, device=GPU)
        y = torch.zeros(1500, device=GPU)
        assert module.max_memory_allocated() == 10_000
        del y
    del x
    assert module.memory_allocated() == 0
    module.reset_peak_memory_stats()
    assert module.max_memory_allocated() == 0


def test_a_recorded_backward_pass_refuses_waits(simulated_gpu: Simulation) -> None:
    module, weight = gpu_module(GPU), nn.Parameter(numbers(3))
    weight.register_hook(lambda gradient: gradient * gradient.sum().item())
    with pytest.raises(RuntimeError, match="capturing: item"), module.graph(module.CUDAGraph()):
        (weight * 2).sum().backward()


def test_a_backward_pass_can_run_out_of_memory(simulated_gpu: Simulation) -> None:
    weight = nn.Parameter(torch.ones(100, 100, device=GPU))
    loss = (torch.ones(2, 100, device=GPU) @ weight).sum()
    with simulated_gpu.memory_limit(simulated_gpu.allocated_bytes + 10_000), pytest.raises(torch.OutOfMemoryError):
        loss.backward()


def test_out_of_memory_can_be_caused_at_a_place(simulated_gpu: Simulation) -> None:
    host = torch.ones(4).pin_memory()
    with simulated_gpu.out_of_memory(at="distcse/devices/device.py", after=1, times=2):
        numbers(4)
        to_device(host, GPU)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                to_device(host, GPU)
        to_device(host, GPU)
    to_device(host, GPU)
