"""The methods that `compare.py` runs: name, where the class is, and one line about it.

Nothing is imported before a method's own process asks for it. `MODULE:CLASS` names any other.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a method is, and what it is."""

    place: str
    about: str


METHODS = {
    "plain": Entry("methods.plain:Plain", "the whole model on the device, fused AdamW"),
    "l2l": Entry("methods.l2l:L2L", "one layer at a time on the device, optimizer there too"),
    "zero-offload": Entry("methods.zero:ZeroOffload", "DeepSpeed ZeRO-2, optimizer on the CPU"),
    "zero-infinity": Entry("methods.zero:ZeroInfinity", "DeepSpeed ZeRO-3, all states in RAM"),
    "zero-infinity-nvme": Entry("methods.zero:ZeroInfinityNvme", "DeepSpeed ZeRO-3, NVMe"),
    "superoffload": Entry("methods.zero:SuperOffload", "DeepSpeed SuperOffload as its scripts do"),
    "superoffload-param": Entry(
        "methods.zero:SuperOffloadParam", "DeepSpeed SuperOffload, weights in RAM too"
    ),
    "fsdp2-offload": Entry("methods.fsdp2:Fsdp2Offload", "torch fully_shard, CPUOffloadPolicy"),
    "stronghold": Entry("methods.ours:Stronghold", "this package"),
}


def resolve(name: str) -> Any:
    """The class of a method; KeyError for an unknown name."""
    place = name if ":" in name else METHODS[name].place
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)
