"""The formats in which the host keeps packed frozen weights: one row of a table for each.

Owns, for each format, its inner tensors, its rule of encoding and the torch reference of its
decoding. It has no state. Any thread may enter.

A packed weight consists of *inner tensors*. They lie on the host, in a file or in a slot, and move
as bytes. `PackedFormat.encode` writes them from a weight. `decode_weights` makes weights of them in
the compute dtype, with the kernels of the device on which they lie.

[Note: rounding]

1. Encoding compares magnitudes, multiplies, adds and divides in fp32. Each of these operations is
   rounded correctly, so every CPU writes the same bits. The one long sum, of nf4's offset, has a
   fixed order.
2. Decoding multiplies in fp32, and rounds once to the compute dtype, to nearest even. Every NaN
   becomes the one quiet NaN. `stronghold.h`, [Note: packed formats], has the same formulas.

[Note: published formats]

1. nf4 is that of bitsandbytes: NF4 codes in blocks of 64 elements, two in a byte, the first in the
   upper half. A block's absmax is an 8-bit dynamic code, in blocks of 256, after the mean of all
   was taken off. Codes equal those of `quantize_4bit` on a CPU to the bit.
2. Its absmax codes follow the rule of bitsandbytes' torch kernel: the nearest value. The compiled
   CPU kernel chooses the other neighbour for some 0.2 % of them, near the middle between two
   values. The mean there depends on torch's order of addition; here it does not.
3. `torch.linspace` gives bitsandbytes' dynamic map, and its last bits depend on the CPU. Here each
   value is the exact one, rounded to fp32. A quarter of the values differ in the last bit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from stronghold import native
from stronghold.errors import ConfigError
from stronghold.native.code_books import NF4_VALUES, dynamic_map, nf4_map

NF4_BLOCK = 64  # elements that share an absmax
NF4_NESTED_BLOCK = 256  # absmax codes that share a scale
# bitsandbytes divides by this at least.
_SMALLEST_ABSMAX = 1e-38
# Elements that are encoded at once: the temporaries then take some 60 MiB.
_PIECE = 1 << 22

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of weights that can be packed, and of decoded weights."""


class InnerShape(NamedTuple):
    """One inner tensor of a packed weight: its name in the format, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class PackingError(NamedTuple):
    """The difference between a weight and its decoded packed form, in the weight's dtype.

    square_sum  of the differences
    numel       elements of the weight
    largest     magnitude of a difference
    """

    square_sum: float
    numel: int
    largest: float

    @property
    def rms(self) -> float:
        return math.sqrt(self.square_sum / self.numel) if self.numel else 0.0


class PackedFormat(ABC):
    """One format: a row of `FORMATS`."""

    name: str

    @abstractmethod
    def inner(self, shape: Sequence[int]) -> tuple[InnerShape, ...]:
        """The inner tensors of a weight of this shape.

        `shape` is (rows, columns), or (experts, rows, columns) of fused experts.
        """

    def packed_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of all inner tensors of a weight of this shape."""
        return sum(inner.nbytes for inner in self.inner(shape))

    def can_pack(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """True for a matrix, or fused experts, whose packed form is smaller than the weight."""
        if len(shape) not in (2, 3) or dtype not in DTYPES:
            return False
        return self.packed_bytes(shape) < math.prod(shape) * dtype.itemsize

    @torch.no_grad()
    def encode(
        self,
        weight: torch.Tensor,
        inner: Mapping[str, torch.Tensor],
        pool: native.Pool | None = None,
    ) -> PackingError:
        """Write the inner tensors of a weight. Returns the error of its decoded form.

        weight  on the CPU, any strides, bf16, fp16 or fp32; it is only read
        inner   a contiguous CPU tensor for each name of `self.inner(weight.shape)`
        pool    threads of the kernel; None: the torch reference, with the same bits in `inner`

        Raises ConfigError for NaN or infinity in the weight, for magnitudes whose decoded form
        would be infinite, and for tensors of other dtypes or shapes. After an error the contents of
        `inner` are undefined.
        """
        if weight.dtype not in DTYPES or weight.dim() not in (2, 3):
            raise ConfigError(
                f"{self.name}: got a weight of shape {list(weight.shape)} in {weight.dtype}, "
                "expected 2 or 3 dimensions in bfloat16, float16 or float32"
            )
        self.check_inner(weight.shape, inner)
        source = weight.detach().contiguous()
        if pool is None:
            self._encode(source, inner)
            error = _packing_error(self._decoded_pieces(inner, source))
        else:
            self._encode_with(pool, source, inner)
            row = packed_row(PackedTensors(self, inner, source))
            [sums] = pool.packing_error(self.name, source.dtype, [row])
            error = PackingError(sums[0], source.numel(), sums[1])
        if not math.isfinite(error.largest):
            raise ConfigError(
                f"{self.name}: decoded, the weight's largest magnitudes would be infinite in "
                f"{weight.dtype}. Keep this weight as it came"
            )
        return error

    @torch.no_grad()
    def decode(self, inner: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        """Decode into `out`: the torch reference of the kernels, on any device.

        `out` is contiguous, in bf16, fp16 or fp32, in the weight's shape. Raises ConfigError for
        tensors of other dtypes or shapes.
        """
        if out.dtype not in DTYPES or not out.is_contiguous():
            raise ConfigError(
                f"{self.name}: got decoded weights in {out.dtype} with strides "
                f"{list(out.stride())}, expected contiguous bfloat16, float16 or float32"
            )
        self.check_inner(out.shape, inner)
        for piece, values in self._decoded_pieces(inner, out):
            _round_into(values, piece)

    @abstractmethod
    def _encode(self, weight: torch.Tensor, inner: Mapping[str, torch.Tensor]) -> None:
        """`encode` of a contiguous weight into checked tensors: the torch reference."""

    @abstractmethod
    def _encode_with(
        self, pool: native.Pool, weight: torch.Tensor, inner: Mapping[str, torch.Tensor]
    ) -> None:
        """`_encode` by the kernel."""

    @abstractmethod
    def _decoded_pieces(
        self, inner: Mapping[str, torch.Tensor], weight: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pieces of `weight` as views, each with its decoded values in fp32, before rounding."""

    def check_inner(self, shape: Sequence[int], inner: Mapping[str, torch.Tensor]) -> None:
        """ConfigError unless `inner` has the tensors of this shape."""
        for expected in self.inner(shape):
            tensor = inner.get(expected.name)
            if tensor is None:
                raise ConfigError(f"{self.name}: the inner tensor {expected.name!r} is missing")
            is_right = tensor.dtype == expected.dtype and tuple(tensor.shape) == expected.shape
            if not is_right or not tensor.is_contiguous():
                raise ConfigError(
                    f"{self.name}: {expected.name}: got {tensor.dtype} of shape "
                    f"{list(tensor.shape)}, expected contiguous {expected.dtype} of shape "
                    f"{list(expected.shape)}"
                )


class Nf4(PackedFormat):
    """bitsandbytes' NF4 with double quantisation: some 0.516 bytes per element.

    codes          uint8 [ceil(numel / 2)]
    absmax         uint8 [ceil(numel / 64)], codes of the dynamic map
    nested_absmax  fp32, one for 256 of them
    nested_offset  fp32 [1], the mean of the absmax

    Blocks run over the flat weight, across the ends of rows and experts.
    """

    name = "nf4"

    def inner(self, shape: Sequence[int]) -> tuple[InnerShape, ...]:
        numel = math.prod(shape)
        num_blocks = _ceil_div(numel, NF4_BLOCK)
        num_nested = _ceil_div(num_blocks, NF4_NESTED_BLOCK)
        return (
            InnerShape("codes", torch.uint8, (_ceil_div(numel, 2),)),
            InnerShape("absmax", torch.uint8, (num_blocks,)),
            InnerShape("nested_absmax", torch.float32, (num_nested,)),
            InnerShape("nested_offset", torch.float32, (1,)),
        )

    def _encode(self, weight: torch.Tensor, inner: Mapping[str, torch.Tensor]) -> None:
        flat = weight.view(-1)
        absmax = torch.empty(len(inner["absmax"]))
        bounds = _middles(nf4_map(weight.device))
        for first in range(0, len(flat), _PIECE):
            piece = flat[first : first + _PIECE].float()
            blocks = slice(first // NF4_BLOCK, _ceil_div(first + len(piece), NF4_BLOCK))
            scaled, absmax[blocks] = _scaled_blocks(piece, NF4_BLOCK)
            _check_finite(self.name, absmax[blocks])
            codes = torch.bucketize(scaled, bounds, out_int32=True).to(torch.uint8)
            if len(codes) % 2:
                codes = torch.cat([codes, codes.new_full((1,), NF4_VALUES.index(0.0))])
            packed = (codes[::2] << 4) | codes[1::2]
            inner["codes"][first // 2 : first // 2 + len(packed)] = packed
        self._encode_absmax(absmax, inner)

    def _encode_with(
        self, pool: native.Pool, weight: torch.Tensor, inner: Mapping[str, torch.Tensor]
    ) -> None:
        # The kernel writes the codes and the exact absmax.
        absmax = torch.empty(len(inner["absmax"]))
        row = packed_row(PackedTensors(self, inner, weight))._replace(inner2=absmax.data_ptr())
        pool.encode(self.name, weight.dtype, [row])
        _check_finite(self.name, absmax)
        self._encode_absmax(absmax, inner)

    def _encode_absmax(self, absmax: torch.Tensor, inner: Mapping[str, torch.Tensor]) -> None:
        """Write the inner tensors of the absmax, fp32 [blocks]: the double quantisation."""
        offset = _mean(absmax)
        scaled, nested_absmax = _scaled_blocks(absmax - offset, NF4_NESTED_BLOCK)
        bounds = _middles(dynamic_map(absmax.device))
        inner["absmax"].copy_(torch.bucketize(scaled, bounds, out_int32=True))
        inner["nested_absmax"].copy_(nested_absmax)
        inner["nested_offset"].fill_(offset)

    def _decoded_pieces(
        self, inner: Mapping[str, torch.Tensor], weight: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        flat = weight.view(-1)
        nested = inner["nested_absmax"].repeat_interleave(NF4_NESTED_BLOCK)
        products = (
            dynamic_map(weight.device)[inner["absmax"].int()] * nested[: len(inner["absmax"])]
        )
        absmax = products + inner["nested_offset"]
        values = nf4_map(weight.device)
        for first in range(0, len(flat), _PIECE):
            piece = flat[first : first + _PIECE]
            packed = inner["codes"][first // 2 : _ceil_div(first + len(piece), 2)]
            codes = torch.stack([packed >> 4, packed & 15], dim=1).view(-1)[: len(piece)]
            blocks = absmax[first // NF4_BLOCK : _ceil_div(first + len(piece), NF4_BLOCK)]
            scales = blocks.repeat_interleave(NF4_BLOCK)[: len(piece)]
            yield piece, values[codes.int()] * scales


FORMATS: Mapping[str, PackedFormat] = {row.name: row for row in (Nf4(),)}
"""Every format by its name, which is also the value of the config's key."""


class PackedTensors(NamedTuple):
    """The tensors of one packed weight, on one device.

    format
    inner   the inner tensors by their names
    weight  contiguous, bf16, fp16 or fp32: what is decoded, or encoded
    """

    format: PackedFormat
    inner: Mapping[str, torch.Tensor]
    weight: torch.Tensor


Rows = Mapping[tuple[str, torch.dtype], Sequence[native.PackedWeight]]
"""Packed weights by addresses, by the name of their format and the dtype of the decoded weight."""


def packed_rows(packed: Iterable[PackedTensors]) -> Rows:
    """Packed weights by addresses, for `decode_rows`. They serve as long as the tensors stay where
    they are. Raises ConfigError for tensors of other dtypes or shapes."""
    rows_of: dict[tuple[str, torch.dtype], list[native.PackedWeight]] = {}
    for weight in packed:
        key = weight.format.name, weight.weight.dtype
        rows_of.setdefault(key, []).append(packed_row(weight))
    return rows_of


def decode_rows(kernels: native.Kernels, rows_of: Rows) -> None:
    """Decode the packed weights of one layer with the kernels of their device.

    The compute lane calls it with `Device.kernels`. On a GPU the launches go to the calling
    thread's stream. The bits are those of `PackedFormat.decode`. The caller keeps the tensors alive
    until the work is done.
    """
    for (name, dtype), rows in rows_of.items():
        kernels.decode(name, dtype, rows)


def decode_weights(kernels: native.Kernels, packed: Sequence[PackedTensors]) -> None:
    """Decode packed weights once: `packed_rows`, then `decode_rows`."""
    decode_rows(kernels, packed_rows(packed))


def packed_row(packed: PackedTensors) -> native.PackedWeight:
    """A packed weight by addresses, for the kernels. ConfigError for other dtypes or shapes."""
    format, inner, weight = packed
    if weight.dtype not in DTYPES or not weight.is_contiguous() or weight.dim() not in (2, 3):
        raise ConfigError(
            f"{format.name}: got a weight in {weight.dtype} of shape {list(weight.shape)} with "
            f"strides {list(weight.stride())}, expected 2 or 3 contiguous dimensions in bfloat16, "
            "float16 or float32"
        )
    format.check_inner(weight.shape, inner)
    names = [expected.name for expected in format.inner(weight.shape)]
    addresses = {f"inner{k}": inner[name].data_ptr() for k, name in enumerate(names)}
    return native.PackedWeight(
        weight=weight.data_ptr(),
        rows=math.prod(weight.shape[:-1]),
        columns=weight.shape[-1],
        **addresses,
    )


# -- encoding --------------------------------------------------------------------------------------
def _middles(values: torch.Tensor) -> torch.Tensor:
    """The bounds between neighbouring values. A bound belongs to the lower one."""
    return (values[:-1] + values[1:]) / 2


def _check_finite(name: str, absmax: torch.Tensor) -> None:
    """ConfigError if a magnitude is NaN or infinite."""
    if not bool(torch.isfinite(absmax).all()):
        raise ConfigError(f"{name}: the weight has NaN or infinity")


def _scaled_blocks(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of flat fp32 numbers, divided by their absmax, and the absmax.

    bitsandbytes' rule: whole blocks are multiplied by the reciprocal, a shorter last block is
    divided. An absmax counts as 1e-38 at least, and that of a shorter last block is stored so.
    """
    whole = x[: len(x) // block * block].view(-1, block)
    absmax = whole.abs().amax(1)
    reciprocals = torch.reciprocal(absmax.clamp(min=_SMALLEST_ABSMAX))
    scaled = (whole * reciprocals.unsqueeze(1)).view(-1)
    remainder = x[len(scaled) :]
    if len(remainder):
        last = remainder.abs().max().clamp(min=_SMALLEST_ABSMAX)
        absmax = torch.cat([absmax, last.unsqueeze(0)])
        scaled = torch.cat([scaled, remainder / last])
    return scaled.clamp_(-1, 1), absmax


def _mean(x: torch.Tensor) -> float:
    """The mean of fp32 numbers, rounded to fp32 once.

    The sum is in fp64 and has one order: the halves of the list, filled up with zeros to a power of
    two, are added until one number is left.
    """
    width = 1 << (len(x) - 1).bit_length()
    sums = torch.zeros(width, dtype=torch.float64)
    sums[: len(x)] = x
    while width > 1:
        width //= 2
        sums = sums[:width] + sums[width:]
    return (sums / len(x)).float().item()


def _packing_error(pieces: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> PackingError:
    """The error of decoded values, rounded to the dtype of the weight whose pieces these are."""
    square_sum, numel, largest = 0.0, 0, 0.0
    for piece, values in pieces:
        decoded = torch.empty_like(piece)
        _round_into(values, decoded)
        differences = decoded.double() - piece
        numel += differences.numel()
        square_sum += float(differences.square().sum())
        if differences.numel():
            largest = max(largest, float(differences.abs().max()))
    return PackingError(square_sum, numel, largest)


# -- decoding --------------------------------------------------------------------------------------
def _round_into(values: torch.Tensor, out: torch.Tensor) -> None:
    """Round fp32 values to the dtype of `out`. Every NaN becomes the quiet NaN of that dtype."""
    out.copy_(values)
    out.masked_fill_(values.isnan(), math.nan)


# -- shapes -----------------------------------------------------------------------------
def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
