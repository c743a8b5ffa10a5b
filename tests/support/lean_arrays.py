"""Segments with lean states for the laws of the native kernels, at any byte."""

from __future__ import annotations

import torch

from stronghold import native
from stronghold.optim import states
from tests.support.kernel_arrays import BF16, F32, misaligned
from tests.support.optimizers import OPTIMIZERS, hyper_fields


class LeanArrays:
    """The arrays of one segment with lean states, as bytes at a chosen misalignment: `parts`, by
    the segment's fields."""

    def __init__(
        self, master: torch.Tensor, grad: torch.Tensor, skip: int = 0, optimizer: str = "adam"
    ) -> None:
        self.optimizer, self.moments = optimizer, OPTIMIZERS[optimizer].moments
        self.numel, self.grad_dtype = master.numel(), grad.dtype
        self.parts: dict[str, torch.Tensor] = {}
        self.skip = skip
        self.put("grad", grad)
        self.write(master, *(torch.zeros_like(master) for _ in self.moments))
        for k in range(len(self.moments)):
            self.parts[f"moment{k}"].zero_()
            self.parts[f"scale{k}"].zero_()

    def put(self, name: str, value: torch.Tensor) -> None:
        self.parts[name] = misaligned(value.contiguous(), self.skip)

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.parts[name].clone().view(dtype)

    def write(self, master: torch.Tensor, *moments: torch.Tensor) -> None:
        """Encodes the master and the moments as the reference does."""
        weight, low = states.split_lean_master(master)
        self.put("weight", weight)
        self.put("low", low)
        for k, (name, moment) in enumerate(zip(self.moments, moments, strict=True)):
            is_root = name == "exp_avg_sq"
            encode = states.encode_root if is_root else states.encode_signed
            codes, scales = encode(moment)
            self.put(f"moment{k}", codes)
            self.put(f"scale{k}", scales)

    def read(self) -> list[torch.Tensor]:
        """The master and the moments, decoded as the reference does."""
        out = [states.join_master(self.get("weight", BF16), self.get("low", torch.int8))]
        for k, name in enumerate(self.moments):
            scales = self.get(f"scale{k}", F32)
            if name == "exp_avg_sq":
                codes = self.get(f"moment{k}", torch.uint8)
                out.append(states.decode_root(codes, scales))
            else:
                out.append(states.decode_signed(self.get(f"moment{k}", torch.int8), scales))
        return out

    def segment(self, step: int = 1, **changes: float) -> native.UpdateSegment:
        addresses = {name: part.data_ptr() for name, part in self.parts.items()}
        fields = hyper_fields(self.optimizer, **changes)
        return native.UpdateSegment(**{**addresses, "numel": self.numel, "step": step, **fields})

    def run(self, pool: native.Pool, step: int = 1, **changes: float) -> None:
        segments = [self.segment(step, **changes)]
        pool.update(self.optimizer, BF16, self.grad_dtype, segments, lean=True)

    def run_reference(self, pool: native.Pool, step: int = 1, **changes: float) -> None:
        """Decode, the exact kernel's fp32 step, encode."""
        master, *moments = self.read()
        grad = self.get("grad", self.grad_dtype)
        # The group's missing elements are zeros, and reach no other: nothing is padded here.
        segment = native.UpdateSegment(
            weight=master.data_ptr(),
            low=0,
            grad=grad.data_ptr(),
            numel=self.numel,
            step=step,
            **{f"moment{k}": moment.data_ptr() for k, moment in enumerate(moments)},
            **hyper_fields(self.optimizer, **changes),
        )
        pool.update(self.optimizer, F32, self.grad_dtype, [segment])
        self.write(master, *moments)


def differing(left: LeanArrays, right: LeanArrays) -> list[str]:
    return [name for name in left.parts if not torch.equal(left.parts[name], right.parts[name])]
