"""What stands for NCCL: gloo, which stages device tensors on the host. Groups of one rank alone.

Gloo crashes where it is to reduce and scatter device tensors, and gathers them beside what a stream
still computes: of one rank's, both are a copy.
"""

from __future__ import annotations

from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d

COPIES = (  # torch's old names and its new
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_gather_into_tensor",
    "all_gather_single",
)


class Done:
    """A work that is in its stream."""

    def wait(self) -> bool:
        return True


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

    names = [name for name in COPIES if hasattr(torch.distributed, name)]
    of_hosts = {name: getattr(torch.distributed, name) for name in names}

    def one_ranks(name: str) -> Any:
        def copied(*given: Any, **options: Any) -> Any:
            output, input = [*given, *options.values()][:2]  # by any names, in this order
            if input.device.type == "cpu":
                return of_hosts[name](*given, **options)
            assert torch.distributed.get_world_size(options.get("group")) == 1
            if output.data_ptr() != input.data_ptr():
                output.copy_(input)
            return Done() if options.get("async_op") else None

        return copied

    for module in (torch.distributed, distributed_c10d):
        for name in names:
            setattr(module, name, one_ranks(name))
        module.init_process_group = init  # type: ignore[attr-defined]
        module.new_group = new  # type: ignore[attr-defined]
        module.is_nccl_available = lambda: True  # type: ignore[attr-defined]
