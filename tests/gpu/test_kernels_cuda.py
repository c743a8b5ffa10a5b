"""The kernels on a real GPU: the host's bits, in stream order, without waiting."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from stronghold import native
from stronghold.devices.cuda import CudaDevice
from stronghold.devices.triton_kernels import TritonKernels
from stronghold.native import Pool
from tests.support.device_kernels import (
    BF16,
    DTYPES,
    F16,
    F32,
    UPDATES,
    accumulated,
    assert_same,
    bits,
    meetings,
    run_adam,
    run_steps,
    some_arrays,
    sums,
    values,
)
from tests.support.optimizers import OPTIMIZERS

pytestmark = pytest.mark.gpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SIZES = (1, 0, 15, 17, 4097, 1023, 1 << 20)
NUM_STEPS = 50
SLEEP_CYCLES = 1_000_000_000  # half a second at 2 GHz


@pytest.fixture(scope="module")
def host() -> Iterator[Pool]:
    with native.Pool(native.available_cores()) as pool:
        yield pool


@pytest.fixture
def kernels() -> Iterator[TritonKernels]:
    device = CudaDevice()
    yield TritonKernels(device)
    device.close()


# -- same bits ------------------------------------------------------------------------------------
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("special", [False, True], ids=["ordinary", "special"])
def test_updates_on_the_gpu_have_the_hosts_bits(
    host: Pool,
    kernels: TritonKernels,
    weight_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    update: str,
    special: bool,
) -> None:
    optimizer, flags = UPDATES[update]
    ours, theirs = (
        some_arrays(SIZES, weight_dtype, grad_dtype, device, special=special, optimizer=optimizer)
        for device in (CUDA, CPU)
    )
    for first in (1, 2, 10):  # the first steps show where it begins to differ
        steps = {1: (1,), 2: range(2, 10), 10: range(10, NUM_STEPS + 1)}[first]
        run_steps(kernels, ours, steps, **flags)
        run_steps(host, theirs, steps, **flags)
        assert_same(ours, theirs, f"by step {steps[-1]}:")


@pytest.mark.parametrize("update", UPDATES)
def test_updates_on_the_gpu_have_the_hosts_bits_where_hazards_meet(
    host: Pool, kernels: TritonKernels, update: str
) -> None:
    optimizer, flags = UPDATES[update]
    for changes in ({"grad_scale": 1.0}, {"lr": -1e-3}, {"lr": 0.0}):
        ours, theirs = ([meetings(device, optimizer)] for device in (CUDA, CPU))
        run_steps(kernels, ours, (1, 2), **changes, **flags)
        run_steps(host, theirs, (1, 2), **changes, **flags)
        assert_same(ours, theirs, str(changes))


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("skip", [1, 8])
@pytest.mark.parametrize("update", UPDATES)
def test_updates_on_the_gpu_take_arrays_at_any_element(
    host: Pool, kernels: TritonKernels, weight_dtype: torch.dtype, skip: int, update: str
) -> None:
    optimizer, flags = UPDATES[update]
    ours, theirs = (
        some_arrays(
            (1, 17, 4097, 70_000), weight_dtype, F16, device, skip=skip, optimizer=optimizer
        )
        for device in (CUDA, CPU)
    )
    for kernel, arrays in ((kernels, ours), (host, theirs)):
        run_steps(kernel, arrays, (1, 2, 3), **flags)
    assert_same(ours, theirs)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("exponent", [-149, -130, -126, -60, 0, 60, 120])
def test_numbers_at_every_end_of_the_range_have_the_hosts_bits(
    host: Pool, kernels: TritonKernels, exponent: int, update: str
) -> None:
    """Weights, moments and gradients of one size: whole vectors underflow, or overflow, together,
    where division and square root take their slow paths."""
    optimizer, flags = UPDATES[update]
    theirs = some_arrays((100_003,), F32, F32, CPU, optimizer=optimizer)
    ours = some_arrays((100_003,), F32, F32, CUDA, optimizer=optimizer)
    for a, b in zip(ours, theirs, strict=True):
        for part in (b.weight, b.moment0, b.moment1, *b.grads):
            part.div_(part.abs().max())
        for name in ("weight", "moment0", "moment1"):
            part = getattr(b, name)
            part.copy_(torch.ldexp(part.double(), torch.tensor(exponent)))
            getattr(a, name).copy_(part)
        for mine, part in zip(a.grads, b.grads, strict=True):
            part.copy_(torch.ldexp(part.double(), torch.tensor(exponent)))
            mine.copy_(part)
    for kernel, arrays in ((kernels, ours), (host, theirs)):
        numbers = {"eps": 1e-30} if "eps" in OPTIMIZERS[optimizer].numbers else {}
        run_steps(kernel, arrays, (1, 2, 3), grad_scale=1.0, **numbers, **flags)
    assert_same(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("skip", [0, 1])
def test_accumulation_on_the_gpu_has_the_hosts_bits(
    host: Pool, kernels: TritonKernels, dtype: torch.dtype, skip: int
) -> None:
    ours = accumulated(kernels, SIZES, dtype, CUDA, skip)
    theirs = accumulated(host, SIZES, dtype, CPU, skip)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("special", [False, True])
def test_sums_on_the_gpu_have_the_hosts_bits(
    host: Pool, kernels: TritonKernels, dtype: torch.dtype, special: bool
) -> None:
    sizes = (*SIZES, 65_535, 65_536, 65_537, 0, (1 << 22) + 33)
    assert torch.equal(
        sums(kernels, sizes, dtype, CUDA, special), sums(host, sizes, dtype, CPU, special)
    )
    many = [k % 40 for k in range(150)]
    assert torch.equal(sums(kernels, many, dtype, CUDA), sums(host, many, dtype, CPU))


# -- order ----------------------------------------------------------------------------------------
@pytest.mark.alone
def test_launches_wait_for_nothing_and_keep_the_streams_order(
    host: Pool, kernels: TritonKernels
) -> None:
    """Also with segments that were never seen: sending their table does not wait for the stream."""
    warm = some_arrays((33, 34), BF16, BF16, CUDA)
    run_adam(kernels, warm, (1, 2, 3))  # compiles, and pins room for tables
    gradient = warm[0].grads[0]
    kernels.sum_squares(BF16, [(gradient.data_ptr(), 33)])
    gradient.mul_(2.0).zero_()  # loads these kernels, which may wait for the device
    room = [torch.empty(nbytes, dtype=torch.uint8).pin_memory() for nbytes in (2048, 4096) * 8]
    del room  # as many tables as are on their way at once
    ours, theirs = (some_arrays((4097, 1 << 20), BF16, BF16, d) for d in (CUDA, CPU))
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    for part in ours:
        part.grads[1].mul_(2.0)
    run_adam(kernels, ours, (1,))
    gradient = ours[1].grads[1]
    norms = kernels.sum_squares_async(BF16, [(gradient.data_ptr(), gradient.numel())])
    gradient.zero_()
    busy = torch.cuda.Event()
    busy.record()
    assert not busy.query(), "a launch waited for the stream"
    for part in theirs:
        part.grads[1].mul_(2.0)
    run_adam(host, theirs, (1,))
    assert_same(ours, theirs)
    gradient = theirs[1].grads[1]
    assert norms.tolist() == host.sum_squares(BF16, [(gradient.data_ptr(), gradient.numel())])


def test_the_callers_stream_is_the_one_that_computes(host: Pool, kernels: TritonKernels) -> None:
    """A table that another stream sent serves too, and dropping it harms nobody."""
    ours, theirs = (some_arrays((70_000,), F32, BF16, d) for d in (CUDA, CPU))
    run_adam(kernels, ours, (1, 2, 3))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        for part in ours:
            part.grads[1].mul_(0.5)
        run_adam(kernels, ours, (4,))
    kernels._tables.clear()
    torch.full((64, 7), -1, dtype=torch.int64, device=CUDA)  # where a freed table was
    stream.synchronize()
    run_adam(host, theirs, (1, 2, 3))
    for part in theirs:
        part.grads[1].mul_(0.5)
    run_adam(host, theirs, (4,))
    assert_same(ours, theirs)


def test_a_finished_sum_does_not_change_when_its_input_does(kernels: TritonKernels) -> None:
    x = values(100_000, 1).to(CUDA)
    found = kernels.sum_squares_async(F32, [(x.data_ptr(), x.numel())])
    before = bits(found).clone()
    x.zero_()
    assert torch.equal(bits(found), before)
    assert kernels.sum_squares(F32, [(x.data_ptr(), x.numel())]) == [0.0]
