"""Runs a method's process: its environment, its memory as seen from outside, its result.

Owns the cap on host memory: the process is watched and killed when it passes the cap, or when the
machine has next to nothing left, and that is a result. Never imports torch. The calling thread
alone enters.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

BENCHMARKS = Path(__file__).resolve().parent.parent
SHARED_MEMORY = Path("/dev/shm")
POLL_S = 0.05
# Below this the kernel would choose whom to kill, and it might not be the method. Without a cap
# alone: the memory of some virtual machines grows as it is used.
LEAST_AVAILABLE_BYTES = 512 << 20
STACKS = "STRONGHOLD_STACKS"  # the number of a descriptor, and after how many seconds
STUCK_S = 120.0  # for a step, which may compile, or for making the model
GIB = float(1 << 30)


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def environment(machine: str, port: int) -> dict[str, str]:
    """One rank on a port of its own; OpenMP's threads sleep while they wait."""
    made = {
        **os.environ,
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TOKENIZERS_PARALLELISM": "false",
    }
    paths = [str(BENCHMARKS), str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]
    made["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    if machine == "emulated":
        made |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        made.setdefault("MAX_JOBS", "1")
    return made


def run(
    method: str, task_json: str, *, machine: str, host_cap_bytes: int | None, timeout_s: float
) -> dict[str, Any]:
    """The result of `method` on a task; every way to end is a result with a `status`."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        result_file, log_file = Path(folder, "result.json"), Path(folder, "log")
        command = [sys.executable, "-m", "methods.child", method, task_json, str(result_file)]
        # a method that is stuck shows its stacks here, not in its log
        stacks = os.dup(2)
        stuck_s = min(STUCK_S, 0.8 * timeout_s)  # before it is killed
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                command,
                env={**environment(machine, port), STACKS: f"{stacks} {stuck_s}"},
                cwd=folder,
                stdout=log,
                stderr=log,
                pass_fds=(stacks,),
                start_new_session=True,
            )
            os.close(stacks)
            try:
                with terminating_as_exit():
                    seen = watch(process, host_cap_bytes, time.monotonic() + timeout_s)
            finally:
                end(process)
                remove_shared_memory(port)
        tail = log_file.read_bytes()[-4000:].decode(errors="replace")
        result: dict[str, Any] = {}
        if result_file.exists() and result_file.stat().st_size:
            result = json.loads(result_file.read_text())
        elif seen["killed"] is None:
            result = exit_result(process.returncode)
        if seen["killed"] is not None:
            result |= seen["killed"]
        if result["status"] in ("failed", "out of memory"):
            result["log"] = tail
        return {"method": method, **seen["memory"], **result}


@contextlib.contextmanager
def terminating_as_exit() -> Iterator[None]:
    """SIGTERM unwinds the stack, so that the method's processes end too."""

    def leave(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def watch(
    process: subprocess.Popen[bytes], cap_bytes: int | None, deadline_s: float
) -> dict[str, Any]:
    """Peak anonymous and shared bytes of the process and its children; kills it at the cap."""
    start_available = psutil.virtual_memory().available
    peak = least_available = 0
    least_available = start_available
    killed: dict[str, str] | None = None
    while process.poll() is None:
        used = resident_bytes(process.pid)
        peak = max(peak, used)
        available = psutil.virtual_memory().available
        least_available = min(least_available, available)
        if cap_bytes is not None and used > cap_bytes:
            text = f"{used / GIB:.2f} GiB of host memory, the cap is {cap_bytes / GIB:.2f}: killed"
            killed = {"status": "out of memory", "reason": text}
        elif (
            cap_bytes is None and available < LEAST_AVAILABLE_BYTES and used > LEAST_AVAILABLE_BYTES
        ):
            text = f"the machine's memory ran out at {used / GIB:.2f} GiB: killed"
            killed = {"status": "out of memory", "reason": text}
        elif time.monotonic() > deadline_s:
            killed = {"status": "failed", "reason": "did not end in time: killed"}
        if killed is not None:
            break
        time.sleep(POLL_S)
    memory = {
        "host_anonymous_peak_bytes": peak,
        "host_taken_peak_bytes": start_available - least_available,
    }
    return {"memory": memory, "killed": killed}


def resident_bytes(pid: int) -> int:
    """Anonymous and shared resident bytes of a process and its children, from /proc/PID/status."""
    total = 0
    with contextlib.suppress(psutil.Error):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                    if line.startswith(("RssAnon:", "RssShmem:")):
                        total += int(line.split()[1]) * 1024
    return total


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the process's own session, and nothing else."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def exit_result(code: int) -> dict[str, str]:
    """Of a process that wrote no result."""
    if code == -signal.SIGKILL:
        return {"status": "out of memory", "reason": "killed by the kernel (SIGKILL)"}
    return {"status": "failed", "reason": f"ended with status {code} and no result"}


def remove_shared_memory(port: int) -> None:
    """DeepSpeed leaves a buffer per rank in /dev/shm, named by the port."""
    for path in SHARED_MEMORY.glob(f"deepspeed_*_{port}_*"):
        with contextlib.suppress(OSError):
            path.unlink()
