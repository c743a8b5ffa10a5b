"""Packed weights for the laws of kernels, on any device, and their comparison bit for bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import torch

from stronghold.model.packed_formats import FORMATS, PackedFormat, PackedTensors, decode_weights
from stronghold.native import Kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Odd sizes, one element, less than a block, whole blocks, an edge of a block, and fused experts.
SHAPES = ((1, 1), (3, 5), (1, 63), (1, 4097), (2, 128), (130, 257), (257, 64), (3, 65, 200))
GUARD = 64  # bytes around a decoded weight
# Scales of a bad file are among them: a kernel must not make other bits of them.
SCALES = (
    *(0.0, -0.0, 1.0, -1.0, 0.02, 1 / 3, 3.4e38, -3.4e38, 1e30, 65504.0, 1e-3, 1e-38, 1e-40),
    *(-1e-45, 6e-8, 3e-8, math.inf, -math.inf, math.nan),
)
INTEGERS = {2: torch.int16, 4: torch.int32}

Inner = dict[str, torch.Tensor]


def empty_inner(format: PackedFormat, shape: tuple[int, ...]) -> Inner:
    return {
        inner.name: torch.empty(inner.shape, dtype=inner.dtype) for inner in format.inner(shape)
    }


def weight_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 0.02).to(dtype)


def hazardous(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Rows and blocks of zeros, of tiny and of large magnitudes, and of one magnitude."""
    weight = weight_of(shape, torch.float32, 1).view(-1, shape[-1])
    largest = 6e4 if dtype == torch.float16 else 1e36
    for row, factor in zip(weight, itertools.cycle((0.0, 1e-37, 1e-43, 1.0, 1e-20)), strict=False):
        row *= factor
    weight[-1] = torch.linspace(-largest, largest, shape[-1])
    if len(weight) > 2:
        weight[-2] = 0.5
    return weight.view(shape).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(INTEGERS[tensor.element_size()])


def inner_bytes(inner: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.view(torch.uint8) for name, tensor in inner.items()}


def assert_same_inner(left: Inner, right: Inner, where: object) -> None:
    for name, tensor in inner_bytes(left).items():
        differ = int((tensor != inner_bytes(right)[name]).sum())
        assert differ == 0, f"{where}: {name}: {differ} bytes of {tensor.numel()} differ"


def exhaustive_cases() -> list[tuple[str, tuple[int, ...], Inner]]:
    """Shapes and inner tensors in which every code, and every code of the absmax, meets every scale
    of SCALES as nested absmax, and some as offset."""
    # 256 blocks share a nested absmax: block k has the k-th code of the absmax.
    shape = (len(SCALES) * 256, 64)
    nibbles = torch.arange(16, dtype=torch.uint8)
    pairs = torch.stack([nibbles, nibbles.flip(0)], dim=1).view(-1)
    codes = (pairs[::2] << 4) | pairs[1::2]
    cases = []
    for offset in (0.0, 0.01, 1e-45, 3.4e38, math.inf, math.nan):
        inner = empty_inner(FORMATS["nf4"], shape)
        inner["codes"].copy_(codes.repeat(shape[0] * 2))
        inner["absmax"].copy_(torch.arange(256, dtype=torch.uint8).repeat(len(SCALES)))
        inner["nested_absmax"].copy_(torch.tensor(SCALES))
        inner["nested_offset"].fill_(offset)
        cases.append(("nf4", shape, inner))
    return cases


def assert_decodes_like_torch(
    kernels: Kernels,
    cases: list[tuple[str, tuple[int, ...], Inner]],
    dtype: torch.dtype,
    skip: int = 0,
) -> None:
    """All cases in one call of `decode_weights`, `skip` elements past an aligned address.

    The bits are those of the reference, and bytes around the weights stay.
    """
    packed, expected, rooms = [], [], []
    for name, shape, inner in cases:
        numel = math.prod(shape)
        reference = torch.empty(shape, dtype=dtype)
        FORMATS[name].decode(inner, reference)
        # An aligned address, whatever torch's allocator gives.
        room = torch.full((numel + skip + 2 * GUARD,), 7.0, dtype=dtype)
        first = -(room.data_ptr() // dtype.itemsize) % GUARD + skip
        out = room[first : first + numel].view(shape)
        packed.append(PackedTensors(FORMATS[name], inner, out))
        expected.append(reference)
        rooms.append((room, first, numel))
    decode_weights(kernels, packed)
    for (name, shape, _), tensors, reference in zip(cases, packed, expected, strict=True):
        differ = bits(tensors.weight) != bits(reference)
        values = tensors.weight[differ][:3].tolist(), reference[differ][:3].tolist()
        assert not differ.any(), f"{name} {shape} {dtype}: {int(differ.sum())} differ: {values}"
    for room, first, numel in rooms:
        outside = torch.cat([room[:first], room[first + numel :]])
        assert (outside == 7.0).all()


def encoded_cases() -> list[tuple[str, tuple[int, ...], Inner]]:
    """A packed weight of every format and shape."""
    cases = []
    for (name, format), shape in itertools.product(FORMATS.items(), SHAPES):
        inner = empty_inner(format, shape)
        format.encode(weight_of(shape, torch.float32), inner)
        cases.append((name, shape, inner))
    return cases
