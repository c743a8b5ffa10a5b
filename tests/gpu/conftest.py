"""On a GPU, operators that add in any order would hide which side of a comparison is wrong; and a
kernel that fails takes the device from its process, whose further tests would all fail by it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch

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
