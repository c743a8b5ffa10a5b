"""`torch.autocast` for tensors on the meta device, while costs are counted.

Owns one replacement, for the length of a `with` block. The training thread alone enters.

[Note: no autocast on the meta device]
1. PEFT's adapters of fused experts compute the whole weight in each forward. They leave autocast
   meanwhile, by `torch.autocast(weight.device.type, enabled=False)`.
2. torch refuses the meta device there, though no autocast is ever active on it.
3. So a context of the meta device does nothing. All other calls reach torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from stronghold.patches.replacements import Replacements


@contextmanager
def autocast_on_meta() -> Iterator[None]:
    """Context manager in which `torch.autocast("meta")` does nothing."""
    replacements = Replacements()
    replacements.put(torch, "autocast", _with_meta)
    try:
        yield
    finally:
        replacements.undo()


def _with_meta(original: Any) -> type:
    """Return a class that stands for `torch.autocast`."""

    class Autocast(original):  # type: ignore[misc]
        def __new__(cls, device_type: str, *args: Any, **kwargs: Any) -> Any:
            if device_type == "meta":
                return nullcontext()
            return original(device_type, *args, **kwargs)

    return Autocast
