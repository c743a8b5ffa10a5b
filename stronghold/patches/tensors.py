"""Facts about tensors and operators that torch keeps under private names.

Owns nothing: each function reads one private name of torch. `table` has the reasons, versions and
tests. Any thread may enter.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import torch
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

# Returns the number of writes in place to a tensor or an alias of it (version counter).
# RuntimeError for a tensor of torch.inference_mode.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")


def storage_address(storage: torch.UntypedStorage) -> int:
    """Return the address of torch's object of a storage, for `num_references`. The address keeps
    nothing alive."""
    return int(storage._cdata)


def num_references(address: int) -> int:
    """Return the number of tensors and storages that refer to the storage at `address`. Each alias
    adds one."""
    return int(torch._C._storage_Use_Count(address))


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory, in a new storage of exactly its bytes.

    `tensor` is contiguous and needs no gradient. Its storage lives as long as the result's.
    """
    view: torch.Tensor = from_dlpack(to_dlpack(tensor))
    return view


def sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the indices and values of a COO tensor that may hold an index twice."""
    return [tensor._indices(), tensor._values()]
