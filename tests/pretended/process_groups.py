"""What stands for NCCL: gloo on the host.

Gloo crashes where it is to reduce and scatter device tensors, and gathers them beside what a stream
still computes: here the host waits for the stream, and gathers what it then has.

[Note: first collectives] NCCL makes a group's communicator in the group's first collective. That
takes device memory, and may wait for all that the device does, so for kernels that wait for other
ranks. Here the first one waits for the device and takes `COMMUNICATOR_BYTES`, and is refused on
any thread but the main one: a lane's may come while another communicator's kernels wait.
"""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d

COMMUNICATOR_BYTES = 96 << 20
STAGED = (  # torch's old names and its new
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_gather_into_tensor",
    "all_gather_single",
)
IN_PLACE = ("all_reduce", "broadcast", "reduce")  # of one tensor, their first argument


class Done:
    """A work that is in its stream."""

    def wait(self) -> bool:
        return True


class Communicators:
    """Those that this process has, by the names of their groups ([Note: first collectives])."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def use(self, group: Any) -> None:
        """A collective of the group begins."""
        name = group.group_name
        if name in self._names:
            return
        thread = threading.current_thread()
        if thread is not threading.main_thread():
            raise RuntimeError(
                f"pretended NCCL: group {name} makes its communicator on the thread {thread.name}, "
                "where kernels of another communicator may be in flight: a deadlock"
            )
        torch.cuda.synchronize()
        self._names.add(name)

    def forget(self, group: Any) -> None:
        self._names.discard(group.group_name)

    @property
    def nbytes(self) -> int:
        return COMMUNICATOR_BYTES * len(self._names)


def install() -> None:
    communicators = Communicators()
    memory_of_device = torch.cuda.mem_get_info
    destroy_process_group = torch.distributed.destroy_process_group

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        free, total = memory_of_device(device)
        return free - communicators.nbytes, total

    def destroy(group: Any = None) -> None:
        if group is not None:
            communicators.forget(group)
        destroy_process_group(group)

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
            # by any names, in this order
            output, input = [*given, *options.values()][:2]
            if input.device.type == "cpu":
                return of_hosts[name](*given, **options)
            group = options.get("group")
            communicators.use(group or torch.distributed.group.WORLD)
            num_ranks = torch.distributed.get_world_size(group)
            found = torch.empty(num_ranks, input.numel(), dtype=input.dtype)
            gather(found.view(-1), input.cpu().view(-1), group=group)
            if "reduce" in name:
                own = found.view(num_ranks, num_ranks, -1)[:, torch.distributed.get_rank(group)]
                # AVG, the only one that is asked for
                found = own.float().sum(0) / num_ranks
            output.copy_(found.view(output.shape))
            return Done() if options.get("async_op") else None

        return run

    def in_place(name: str) -> Any:
        of_hosts = getattr(torch.distributed, name)

        def run(tensor: torch.Tensor, *given: Any, **options: Any) -> Any:
            if tensor.device.type == "cpu":
                return of_hosts(tensor, *given, **options)
            communicators.use(options.get("group") or torch.distributed.group.WORLD)
            copied = tensor.cpu()
            work = of_hosts(copied, *given, **options)
            if work is not None:
                work.wait()
            tensor.copy_(copied)
            return None if work is None else Done()

        return run

    replaced = {name: staged(name) for name in names} | {name: in_place(name) for name in IN_PLACE}
    # Of a torch without NCCL, where no group is of this class.
    distributed_c10d.ProcessGroupNCCL = type("ProcessGroupNCCL", (), {})  # type: ignore[misc]
    for module in (torch.distributed, distributed_c10d):
        for name, collective in replaced.items():
            setattr(module, name, collective)
        module.init_process_group = init  # type: ignore[attr-defined]
        module.new_group = new  # type: ignore[attr-defined]
        module.destroy_process_group = destroy  # type: ignore[attr-defined]
        module.is_nccl_available = lambda: True  # type: ignore[attr-defined]
    torch.cuda.mem_get_info = torch.accelerator.get_memory_info = mem_get_info
