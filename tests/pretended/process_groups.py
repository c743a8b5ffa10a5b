"""What stands for NCCL: gloo on the host.

Gloo crashes where it is to reduce and scatter device tensors, and gathers them beside what a stream
still computes: here the host waits for the stream, and gathers what it then has.
"""

from __future__ import annotations

from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d

STAGED = (  # torch's old names and its new
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

    names = [name for name in STAGED if hasattr(torch.distributed, name)]
    of_hosts = {name: getattr(torch.distributed, name) for name in names}

    gather = of_hosts[next(name for name in STAGED if "gather" in name and name in of_hosts)]

    def staged(name: str) -> Any:
        def run(*given: Any, **options: Any) -> Any:
            output, input = [*given, *options.values()][:2]  # by any names, in this order
            if input.device.type == "cpu":
                return of_hosts[name](*given, **options)
            group = options.get("group")
            num_ranks = torch.distributed.get_world_size(group)
            found = torch.empty(num_ranks, input.numel(), dtype=input.dtype)
            gather(found.view(-1), input.cpu().view(-1), group=group)
            if "reduce" in name:
                own = found.view(num_ranks, num_ranks, -1)[:, torch.distributed.get_rank(group)]
                found = own.float().sum(0) / num_ranks  # AVG, the only one that is asked for
            output.copy_(found.view(output.shape))
            return Done() if options.get("async_op") else None

        return run

    # Of a torch without NCCL, where no group is of this class.
    distributed_c10d.ProcessGroupNCCL = type("ProcessGroupNCCL", (), {})  # type: ignore[misc]
    for module in (torch.distributed, distributed_c10d):
        for name in names:
            setattr(module, name, staged(name))
        module.init_process_group = init  # type: ignore[attr-defined]
        module.new_group = new  # type: ignore[attr-defined]
        module.is_nccl_available = lambda: True  # type: ignore[attr-defined]
