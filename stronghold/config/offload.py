"""One reading of all that the config says about NVMe: our section and DeepSpeed's offload and aio
keys.

Owns the merge; what comes out is `StrongholdConfig.nvme`, and nobody else reads those keys. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stronghold.config.section import NvmeConfig, StrongholdConfig, parse_nvme_value
from stronghold.config.source import SECTION
from stronghold.errors import ConfigError

if TYPE_CHECKING:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

# Our key of each of aio's that means the same.
AIO_KEYS = {"depth": "queue_depth", "block": "block_size"}


def resolve_nvme(
    section: StrongholdConfig, zero: DeepSpeedZeroConfig, aio: Mapping[str, Any] | None
) -> StrongholdConfig:
    """The section with the effective `nvme`: None where nothing asks for it, else with a path.

    `zero` and `aio` are DeepSpeed's reading of zero_optimization and the user's aio. A device
    "nvme" of offload_optimizer lets moments and masters spill, one of offload_param everything;
    their two paths are striped over. Raises ConfigError for a contradiction, and for no path.
    """
    offloads = {
        key: part
        for key, part in (
            ("zero_optimization.offload_optimizer", zero.offload_optimizer),
            ("zero_optimization.offload_param", zero.offload_param),
        )
        if part is not None and part.device == "nvme"
    }
    if section.nvme is None and not offloads:
        return section
    ours = section.nvme or NvmeConfig()
    problems, update = [], {}
    for name, key, value in (*_of_offloads(offloads), *_of_aio(aio)):
        given = getattr(ours, name)
        if given is None:
            update[name] = value
        elif not _same(name, given, value):
            problems.append(
                f"{SECTION}.nvme.{name}: got {given!r}, and {key} asks for {value!r}. "
                "Remove one of the two, or make them equal."
            )
    if problems:
        raise ConfigError("\n".join(problems))
    nvme = ours.model_copy(update=update)
    if not nvme.paths:
        raise ConfigError(_no_path(offloads))
    return section.model_copy(update={"nvme": nvme})


def _of_offloads(offloads: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(our key, DeepSpeed's key, value in our terms) of what the offload sections say."""
    paths = {
        f"{key}.nvme_path": str(part.nvme_path)
        for key, part in offloads.items()
        if part.nvme_path is not None
    }
    if paths:
        distinct = list(dict.fromkeys(paths.values()))
        yield "path", " and ".join(paths), distinct if len(distinct) > 1 else distinct[0]
    if offloads:
        deepest = list(offloads)[-1]
        yield "spill", f"{deepest}.device", "weights" if "param" in deepest else "masters"


def _of_aio(aio: Mapping[str, Any] | None) -> Iterator[tuple[str, str, Any]]:
    for name, key in AIO_KEYS.items():
        value = (aio or {}).get(key)
        if value is not None:
            yield name, f"aio.{key}", parse_nvme_value(name, value, f"aio.{key}")


def _same(name: str, ours: Any, theirs: Any) -> bool:
    if name != "path":
        return bool(ours == theirs)
    sets = [
        {Path(path) for path in ([value] if isinstance(value, str) else value)}
        for value in (ours, theirs)
    ]
    return sets[0] == sets[1]


def _no_path(offloads: Mapping[str, Any]) -> str:
    key = f"{next(iter(offloads))}.nvme_path" if offloads else f"{SECTION}.nvme.path"
    return f'{key}: missing, expected a directory on an NVMe disk, such as "/mnt/nvme0".'
