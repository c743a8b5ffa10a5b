"""On a GPU, operators that add in any order would hide which side of a comparison is wrong; and a
kernel that fails takes the device from its process, whose further tests would all fail by it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.training import operators_in_one_order


@pytest.fixture(autouse=True)
def same_order_in_every_run() -> Iterator[None]:
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"a test before has lost the GPU to this process: {error}", file=sys.__stderr__)
        if "PYTEST_XDIST_WORKER" in os.environ:  # another process goes on
            os._exit(1)
        pytest.exit("a test before has lost the GPU", returncode=1)
    with operators_in_one_order():
        yield


@pytest.fixture
def warm_products() -> None:
    """cuBLAS and cublasLt have their workspaces, of this thread and of autograd's.

    The first product of each thread and stream takes them from torch's allocator, 32 MiB and more,
    and keeps them: a test that counts memory would count them as the engine's.
    """
    linear = nn.Linear(32, 32, device="cuda")
    x = torch.ones(32, 32, device="cuda", requires_grad=True)
    # Autograd's thread runs the forward again: a product with a bias is cublasLt's.
    checkpoint(linear, x, use_reentrant=False).sum().backward()
    torch.cuda.synchronize()
