"""Limits: the time below which no schedule can bring a step, and what sets it.

Pure: arithmetic on sizes and rates, no plan is simulated. A limit is the time of the busiest
resource if it never waited: compute, each direction of the link, host memory, the disk. Any thread.

[Note: formula] For P streamed parameters of e bytes, T tokens in n micro-batches, k = 2 loads of
the weights and r further forward passes per micro-batch:

    step >= max((6 + 2 r) P T / F + attention, (k e P n + A) / B, (e P n + A) / B, q P / M, D / S)

less what is still in the window when the direction turns, and with F the FLOP/s, B the link's
bytes/s per direction, M the host memory's, S the disk's, A the bytes of activations that are
offloaded in a step, D the disk's bytes and q the bytes of host memory that a parameter costs.
Beside it stand the fetch and the drain of one layer, which nothing hides but what stays on the
device.
"""

from __future__ import annotations

from dataclasses import dataclass

from stronghold.plan.profile import (
    ADAM_BF16_BYTES,
    ADAM_FP16_BYTES,
    ADAM_FP32_BYTES,
    MachineProfile,
)

ADAM_BYTES = {"bf16": ADAM_BF16_BYTES, "fp16": ADAM_FP16_BYTES, "fp32": ADAM_FP32_BYTES}
WEIGHT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
LOADS = 2  # k: forward and backward
SUM_BYTES = 4  # of an accumulated gradient

COMPUTE = "compute"
MEMORY = "host memory bandwidth"
FETCH = "link host to device"
DRAIN = "link device to host"
DUPLEX = "link, both directions together"
DISK = "nvme"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """What one optimizer step moves and computes, whatever the schedule.

    `forward_flops` and `recomputed_flops` are of one micro-batch, the latter the part that backward
    computes again. `streamed_parameters` cross the link, but for `window_parameters` of them that
    are still there when the direction turns; `trained_parameters` of them have gradients and are
    updated on the host. `refreshed_parameters` stay on the device but are updated on the host.
    `layer_parameters` is the largest streamed layer, `staying_flops` the forward FLOPs of those
    that never leave the device and may compute while it is on its way.
    `offloaded_bytes` of activations leave and return in every micro-batch. `nvme_*_bytes` are of a
    step.
    """

    dtype: str
    forward_flops: float
    recomputed_flops: float = 0.0
    micro_batches: int = 1
    streamed_parameters: int = 0
    window_parameters: int = 0
    trained_parameters: int = 0
    refreshed_parameters: int = 0
    layer_parameters: int = 0
    staying_flops: float = 0.0
    offloaded_bytes: int = 0
    nvme_read_bytes: int = 0
    nvme_write_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`seconds` no step can beat; `bound` is the part that sets them, `parts` the seconds of every
    resource, `fill_s` what one layer's way in and out adds."""

    seconds: float
    bound: str
    parts: dict[str, float]
    fill_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Tokens from which compute takes longer than the optimizer (`cpu`, per step) and than the
    weights' way to the GPU (`link`, per micro-batch), whatever the size of the model."""

    cpu: float
    link: float


def physical_limit(load: StepLoad, machine: MachineProfile) -> Limits:
    """The lower bound of a step's time ([Note: formula])."""
    parts = {
        COMPUTE: compute_s(load, machine),
        FETCH: fetch_bytes(load) / (machine.fetch_gbps * 1e9),
        DRAIN: drain_bytes(load) / (machine.drain_gbps * 1e9),
        DUPLEX: (fetch_bytes(load) + drain_bytes(load)) / (machine.duplex_gbps * 1e9),
        MEMORY: memory_bytes(load) / (memory_gbps(machine) * 1e9),
        DISK: disk_s(load, machine),
    }
    bound = max(parts, key=lambda name: parts[name])
    fill_s = _fill_s(load, machine)
    return Limits(seconds=parts[bound] + fill_s, bound=bound, parts=parts, fill_s=fill_s)


def break_even(machine: MachineProfile, dtype: str, *, recompute: bool) -> BreakEven:
    """Tokens at which the terms of [Note: formula] are equal, without attention:
    q F / ((6 + 2 r) M) and k e F / ((6 + 2 r) B)."""
    flops_per_parameter = 8.0 if recompute else 6.0
    rate = machine.flops[dtype] / flops_per_parameter
    moved = LOADS * WEIGHT_BYTES[dtype]
    return BreakEven(
        cpu=bytes_per_parameter(dtype) * rate / (memory_gbps(machine) * 1e9),
        link=moved * rate / (machine.fetch_gbps * 1e9),
    )


# -- the terms ------------------------------------------------------------------------------------


def compute_s(load: StepLoad, machine: MachineProfile) -> float:
    """Forward, a backward of twice its FLOPs (one product for the input's gradient, one for the
    weight's), and what is computed again, at the rate of a large matrix multiplication. For
    matrices alone forward is 2 P T; attention is in the counted FLOPs."""
    flops = 3.0 * load.forward_flops + load.recomputed_flops
    return load.micro_batches * flops / machine.flops[load.dtype]


def loaded_parameters(load: StepLoad) -> int:
    """Parameters that go to the device in a step: k P per micro-batch, without those in the window
    at each turn between forward and backward, but with them after an update, which changed them;
    and once what was updated away from where it stays."""
    turns = LOADS * load.micro_batches - 1
    streamed = LOADS * load.micro_batches * load.streamed_parameters
    return streamed - turns * load.window_parameters + load.refreshed_parameters


def drained_parameters(load: StepLoad) -> int:
    """Gradients that leave in a step: of streamed layers in every micro-batch (their slots are
    needed for the next layer), of those that stay at least once."""
    return load.micro_batches * load.trained_parameters + load.refreshed_parameters


def fetch_bytes(load: StepLoad) -> float:
    """Host to device: weights, and activations that come back."""
    weights = WEIGHT_BYTES[load.dtype] * loaded_parameters(load)
    return float(weights + load.micro_batches * load.offloaded_bytes)


def drain_bytes(load: StepLoad) -> float:
    """Device to host: gradients in the weights' type, and activations that leave."""
    gradients = WEIGHT_BYTES[load.dtype] * drained_parameters(load)
    return float(gradients + load.micro_batches * load.offloaded_bytes)


def memory_bytes(load: StepLoad) -> float:
    """Host memory, read and written: the optimizer and the sums of gradients for what is updated on
    the host, and every transfer's end in host memory, the disk's too."""
    updated = _kernel_bytes(load.dtype, load.micro_batches) * load.trained_parameters
    updated += _kernel_bytes(load.dtype, 1) * load.refreshed_parameters
    disk = load.nvme_read_bytes + load.nvme_write_bytes
    return updated + fetch_bytes(load) + drain_bytes(load) + disk


def disk_s(load: StepLoad, machine: MachineProfile) -> float:
    """The disk: reads and writes at their own rates, and both together at the mixed one. Infinite
    where bytes are asked of a disk that the profile does not have."""
    reads, writes = load.nvme_read_bytes, load.nvme_write_bytes
    if not reads + writes:
        return 0.0
    if machine.nvme_read_gbps is None or machine.nvme_write_gbps is None:
        return float("inf")
    alone = max(reads / machine.nvme_read_gbps, writes / machine.nvme_write_gbps)
    mixed = machine.nvme_mixed_gbps
    return max(alone, (reads + writes) / mixed if mixed else 0.0) / 1e9


def bytes_per_parameter(dtype: str, micro_batches: int = 1) -> int:
    """q: bytes of host memory that a step of a trained, streamed parameter reads and writes.

    32 in bf16: 26 in the kernel of `stronghold.plan.profile`, k e + e = 6 of transfers. 36 in fp16,
    where weight and whole fp32 master are both read and written.
    """
    size = WEIGHT_BYTES[dtype]
    return _kernel_bytes(dtype, micro_batches) + micro_batches * (LOADS + 1) * size


def memory_gbps(machine: MachineProfile) -> float:
    """The host memory's bandwidth with as many threads as it takes."""
    return max(machine.memory_gbps.values())


def _kernel_bytes(dtype: str, micro_batches: int) -> int:
    """Adam, and before it sums: the first gradient starts a sum (read e, write 4), each further one
    is added (read e and 4, write 4), and the last is read by Adam beside the sum."""
    adam = ADAM_BYTES[dtype]
    if micro_batches == 1:
        return adam
    size = WEIGHT_BYTES[dtype]
    added = (micro_batches - 2) * (size + 2 * SUM_BYTES)
    return adam + size + SUM_BYTES + added + SUM_BYTES


def _fill_s(load: StepLoad, machine: MachineProfile) -> float:
    """A layer's fetch before the first compute and its drain after the last, but for the time that
    what stays computes."""
    nbytes = WEIGHT_BYTES[load.dtype] * load.layer_parameters
    drained = nbytes if load.trained_parameters else 0
    way_s = (nbytes / machine.fetch_gbps + drained / machine.drain_gbps) / 1e9
    return max(0.0, way_s - 3.0 * load.staying_flops / machine.flops[load.dtype])
