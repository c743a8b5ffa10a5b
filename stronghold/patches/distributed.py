"""The store of torch's default process group. `table` has the reasons, versions and tests."""

from __future__ import annotations

from typing import Any

from torch.distributed import distributed_c10d


def shared_store(prefix: str) -> Any:
    """Return the keys with a prefix of the store that all ranks share (`torch.distributed.Store`).

    The default process group exists. Any thread may use the store.
    """
    store = distributed_c10d._get_default_store()
    return distributed_c10d.PrefixStore(prefix, store)
