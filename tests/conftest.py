"""The environment of every test: one rank, one torch thread, no lane thread left behind.

The environment is set before torch and deepspeed are imported, because both read it then.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def free_port() -> int:
    """A TCP port that nothing listens on: tests that run side by side must not meet on 29500.

    Linux gives ports from 32768 on to connections, such as those of other tests' ranks. One of them
    may have such a port by the time that it is used.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


# Without these DeepSpeed looks for MPI; a rank of a launcher keeps its own.
os.environ.setdefault("RANK", "0")
os.environ.setdefault("LOCAL_RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", str(free_port()))
# libgomp's threads spin while they wait and starve the lanes of a machine with few cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# Without a profile every process of an engine would measure the machine for some seconds.
MACHINE = Path(__file__).parent / "support" / "machine.json"
os.environ.setdefault("STRONGHOLD_PROFILE", str(MACHINE))
# On a GPU cuBLAS may otherwise add in another order on every run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest  # noqa: E402
import torch  # noqa: E402

from stronghold.devices.emulated import EmulatedDevice  # noqa: E402
from stronghold.private import pop_saved_tensor_hooks_above, saved_tensor_hooks  # noqa: E402
from tests.support.sampling import mark_sampled  # noqa: E402
from tests.support.turns import turn  # noqa: E402

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: E402

# Else DeepSpeed compiles a kernel for a minute at the first process group. Gloo does without it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

LANE_PREFIX = "stronghold:"
# a lane that was closed but not joined has ended by then; a leaked one never ends
GRACE_S = 2.0


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU; skipped where there is none")


# where the processes of one session of pytest-xdist take turns
TURNS = pytest.StashKey[Path]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    stash = node.config.stash
    if TURNS not in stash:
        stash[TURNS] = Path(tempfile.mkdtemp(prefix="turns-"))
    node.workerinput["turns"] = str(stash[TURNS])


def pytest_unconfigure(config: pytest.Config) -> None:
    if TURNS in config.stash:
        shutil.rmtree(config.stash[TURNS])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    folder = getattr(item.config, "workerinput", {}).get("turns")
    if folder is None:
        return (yield)
    with turn(Path(folder), alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A port that is free now, before any fixture: the one chosen when the session began may be
    taken by the time that a process group is made, and by this process's own when a program that it
    starts makes one."""
    os.environ["MASTER_PORT"] = str(free_port())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_sampled(items)
    if HAS_CUDA:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))


def pytest_collection_finish() -> None:
    """Collections of garbage, which many tests ask for, no longer walk through all that torch and
    transformers brought: that was a quarter of the processor time of a run."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    device = EmulatedDevice()
    yield device
    device.close()


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Three empty ones, as of three disks."""
    made = [tmp_path / name for name in ("a", "b", "c")]
    for folder in made:
        folder.mkdir()
    return made


def lane_threads() -> list[str]:
    """Names of the lane threads that are alive."""
    return sorted(t.name for t in threading.enumerate() if t.name.startswith(LANE_PREFIX))


def choose_kernels() -> None:
    """Those of one thread, or what the environment says (tests/laws/test_kernel_choices.py), in
    every process whose bits are compared."""
    torch.set_num_threads(int(os.environ.get("STRONGHOLD_TEST_THREADS", "1")))
    torch.backends.mkldnn.enabled = os.environ.get("STRONGHOLD_TEST_ONEDNN") != "0"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Also after a test that used more."""
    choose_kernels()


@pytest.fixture(autouse=True)
def torchs_linear() -> Iterator[None]:
    """DeepSpeed's stage 3 puts its own in the place of torch's, which rounds differently."""
    linear = torch.nn.functional.linear
    yield
    torch.nn.functional.linear = linear


@pytest.fixture(autouse=True)
def no_stale_group() -> None:
    """DeepSpeed keeps the first process group that it saw, also after a test destroyed it."""
    groups: Any = sys.modules.get("deepspeed.utils.groups")
    kept = groups and groups._WORLD_GROUP
    if kept is None:
        return
    try:
        torch.distributed.get_process_group_ranks(kept)
    except KeyError:
        groups._WORLD_GROUP = None


@pytest.fixture(autouse=True)
def no_lane_thread_is_left() -> Iterator[None]:
    """Fail the test that leaves a lane's thread alive, rather than a later one that it starves."""
    before = lane_threads()
    yield
    deadline = time.monotonic() + GRACE_S
    while len(lane_threads()) > len(before) and time.monotonic() < deadline:
        time.sleep(0.01)
    left = lane_threads()
    if len(left) > len(before):
        pytest.fail(f"the test left lane threads alive: {', '.join(left)}; close its engine")


@pytest.fixture(autouse=True)
def no_saved_tensor_hooks_are_left() -> Iterator[None]:
    """Fail the test that leaves a pair of saved-tensor hooks behind: blocks of later tests would
    keep what they should recompute or offload."""
    yield
    left = saved_tensor_hooks()
    pop_saved_tensor_hooks_above(None)
    if left is not None:
        pytest.fail(f"the test left saved-tensor hooks: {left}")
