"""What stands for NCCL: gloo, which stages device tensors on the host. Groups of one rank alone."""

from __future__ import annotations

from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d


def install() -> None:
    init_process_group = torch.distributed.init_process_group
    new_group = torch.distributed.new_group

    def init(backend: str | None = None, *arguments: Any, **options: Any) -> Any:
        options.pop("device_id", None)
        backend = "gloo" if backend is None else backend.replace("nccl", "gloo")
        return init_process_group(backend, *arguments, **options)

    def new(*arguments: Any, **options: Any) -> Any:
        if options.get("backend") == "nccl":
            options["backend"] = "gloo"
        return new_group(*arguments, **options)

    for module in (torch.distributed, distributed_c10d):
        module.init_process_group = init  # type: ignore[attr-defined]
        module.new_group = new  # type: ignore[attr-defined]
        module.is_nccl_available = lambda: True  # type: ignore[attr-defined]
