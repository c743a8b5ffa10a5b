"""A pytest plugin under which other projects' optimizer tests meet stronghold's CPU optimizers.

Three projects' files, each in a process of its own; the file's path says which. In each the
optimizer under test is replaced, and nothing else:

* PyTorch: the database of `TestOptimRenewed` holds our optimizers instead of torch's.
* bitsandbytes: its optimizers of 32-bit states become ours.
* ColossalAI: its `CPUAdam` and its CPU kernel become ours. ColossalAI itself is not imported.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from conformance_suite.optimizers import bitsandbytes_tests, colossalai_tests, pytorch_tests


def project_of(path: Path) -> str:
    """The project whose folder holds `path`: "pytorch", "bitsandbytes", "ColossalAI"."""
    return path.resolve().relative_to(Path.cwd()).parts[0]


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before the project's own conftest.py is imported."""
    torch.set_num_threads(1)
    (project,) = {project_of(Path(file)) for file in early_config.known_args_namespace.file_or_dir}
    if project == "pytorch":
        pytorch_tests.fill_database()
    elif project == "bitsandbytes":
        os.environ["BNB_TEST_DEVICE"] = "cpu"
    elif project == "ColossalAI":
        colossalai_tests.replace_package(Path.cwd() / project)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out tests of other optimizers, and give the others ours."""
    project = project_of(items[0].path) if items else ""
    if project == "bitsandbytes":
        bitsandbytes_tests.replace_optimizers(items[0].module)
        items[:] = [item for item in items if bitsandbytes_tests.is_ours(item.name)]
    elif project == "ColossalAI":
        items[:] = [item for item in items if colossalai_tests.is_ours(item.name)]
    elif project == "pytorch":
        items[:] = [item for item in items if item.cls.__name__.startswith("TestOptimRenewed")]
