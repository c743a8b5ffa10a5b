"""States: of which arrays a layer's training state is made, by the weights' dtype and the kind.

Owns the table that memory, files, plan and checkpoints are made from: another kind of state is
another row of it, and another kernel. Also what a master is split into, and what moments are kept
as. Pure; any thread.

    array              exact                        lean (bf16 weights alone: `stronghold.lean`)
    weights            the compute dtype            bf16
    low                int16; fp16: the fp32        int8
                       master; fp32: absent
    exp_avg            fp32                         int8
    exp_avg_sq         fp32                         uint8
    exp_avg_scale      absent                       fp32, one per group of 64
    exp_avg_sq_scale   absent                       fp32, one per group of 64

[Note: items] An array that has one item for a group of elements is as long as the elements by that:
element i of a layer is item i // group. Parameters begin at multiples of a group, and so do the
ranges into which a layer is cut, for pieces or ranks: no group crosses any of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from stronghold import lean

Kind = Literal["exact", "lean"]
EXACT: Kind = "exact"
LEAN: Kind = "lean"
MOMENTS = ("exp_avg", "exp_avg_sq")
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
STATES = ("weights", "low", *MOMENTS, *SCALES)  # all that Adam may change

# Of the exact states of weights of each dtype that can be trained.
LOW_DTYPE: dict[torch.dtype, torch.dtype | None] = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.float32,
    torch.float32: None,
}
# Of all arrays that hold moments.
MOMENT_DTYPES: dict[Kind, dict[str, torch.dtype]] = {
    EXACT: dict.fromkeys(MOMENTS, torch.float32),
    LEAN: {
        "exp_avg": torch.int8,
        "exp_avg_sq": torch.uint8,
        **dict.fromkeys(SCALES, torch.float32),
    },
}
GROUPS = dict.fromkeys(SCALES, lean.GROUP)  # elements for which there is one item, where not one
PAGE_BYTES = 4096  # what files are read and written in


def group_size(array: str) -> int:
    """Elements for which the array has one item."""
    return GROUPS.get(array, 1)


def items(array: str, begin: int, end: int) -> slice:
    """The array's items for elements [begin, end), of which begin is a multiple of its group."""
    size = group_size(array)
    return slice(begin // size, -(-end // size))


def num_items(array: str, numel: int) -> int:
    return -(-numel // group_size(array))


def page_numel(kind: Kind, *, in_files: bool = True) -> int:
    """Elements of which every array has whole pages: what padding and pieces are multiples of. The
    weights' two bytes or, where arrays may lie `in_files`, what takes most elements to a page."""
    if not in_files:
        return PAGE_BYTES // 2
    sizes = (dtype.itemsize / group_size(array) for array, dtype in MOMENT_DTYPES[kind].items())
    return int(PAGE_BYTES / min(2, *sizes))


def moment_bytes(kind: Kind) -> float:
    """Of one parameter, of both moments."""
    return sum(dtype.itemsize / group_size(array) for array, dtype in MOMENT_DTYPES[kind].items())


@dataclass(frozen=True, slots=True)
class States:
    """The arrays of weights of `dtype` that have states of `kind`."""

    dtype: torch.dtype
    kind: Kind = EXACT

    @property
    def is_lean(self) -> bool:
        return self.kind == LEAN

    @property
    def low(self) -> torch.dtype | None:
        """The dtype of what makes weights masters."""
        return torch.int8 if self.is_lean else LOW_DTYPE[self.dtype]

    @property
    def low_bytes(self) -> int:
        return 0 if self.low is None else self.low.itemsize

    @property
    def moments(self) -> dict[str, torch.dtype]:
        """The arrays of both moments."""
        return MOMENT_DTYPES[self.kind]

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The arrays that Adam changes, the weights first."""
        low = {} if self.low is None else {"low": self.low}
        return {"weights": self.dtype, **low, **self.moments}

    def adam_bytes(self, grad_dtype: torch.dtype) -> float:
        """Bytes of memory that Adam reads and writes for one parameter: all arrays both ways, the
        gradient one way."""
        kept = self.dtype.itemsize + self.low_bytes + moment_bytes(self.kind)
        return 2 * kept + grad_dtype.itemsize

    def split(self, master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A flat fp32 master as weights and `low`; lean states round it to 24 bits."""
        if self.is_lean:
            return lean.split_master(master)
        if self.dtype is torch.float32:
            return master, None
        if self.dtype is torch.float16:
            return master.to(self.dtype), master
        bits = torch.where(master.isnan(), torch.nan, master).contiguous().view(torch.int32)
        upper = (bits + 0x8000) >> 16  # the carry past the sign is undone by the remainder
        low = (bits - (upper << 16)).to(torch.int16)
        return upper.to(torch.int16).view(torch.bfloat16), low

    def arrays_of(self, moment: str) -> tuple[str, ...]:
        """The arrays that hold one of the moments."""
        return (moment, f"{moment}_scale") if self.is_lean else (moment,)

    def encode(self, moment: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """A moment in fp32, flat, which begins with a group, as the arrays that hold it."""
        if not self.is_lean:
            return {moment: values}
        coded = lean.encode_exp_avg if moment == "exp_avg" else lean.encode_exp_avg_sq
        return dict(zip(self.arrays_of(moment), coded(values), strict=True))

    def decode(self, moment: str, arrays: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The inverse of `encode`: the moment as Adam would read it."""
        codes, *scales = (arrays[array] for array in self.arrays_of(moment))
        if not self.is_lean:
            return codes
        decoded = lean.decode_exp_avg if moment == "exp_avg" else lean.decode_exp_avg_sq
        return decoded(codes, *scales)


@functools.cache
def states_of(dtype: torch.dtype, kind: Kind = EXACT) -> States:
    return States(dtype, kind)


def join_master(weights: torch.Tensor, low: torch.Tensor | None) -> torch.Tensor:
    """The fp32 master, by the dtype of `low`: the inverse of `States.split`; without `low` the
    weights themselves, in fp32. A weight that somebody wrote counts, as it does in Adam."""
    if low is None:
        return weights.float()
    if low.dtype is torch.float32:
        return torch.where(low.to(weights.dtype) == weights, low, weights.float())
    if low.dtype is torch.int8:
        return lean.join_master(weights, low)
    return lean.joined(weights, low.to(torch.int32))
