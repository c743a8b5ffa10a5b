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
import time
from pathlib import Path
from typing import Any

import psutil

BENCHMARKS = Path(__file__).resolve().parent.parent
POLL_S = 0.05
# Below this the kernel would choose whom to kill, and it might not be the method. Without a cap
# alone: the memory of some virtual machines grows as it is used.
LEAST_AVAILABLE_BYTES = 512 << 20
STACKS_S = 5.0  # to write them
GIB = float(1 << 30)


def environment(machine: str) -> dict[str, str]:
    """One rank on a free port; OpenMP's threads sleep while they wait."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    paths = [str(BENCHMARKS), str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]
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
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    if machine == "emulated":
        made |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        made.setdefault("MAX_JOBS", "1")
    return made


def run(
    method: str, task_json: str, *, machine: str, host_cap_bytes: int | None, timeout_s: float
) -> dict[str, Any]:
    """The result of `method` on a task; every way to end is a result with a `status`."""
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        result_file, log_file = Path(folder, "result.json"), Path(folder, "log")
        command = [sys.executable, "-m", "methods.child", method, task_json, str(result_file)]
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                command,
                env=environment(machine),
                cwd=folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                peak, killed = watch(process, host_cap_bytes, time.monotonic() + timeout_s)
            finally:
                end(process)
        result: dict[str, Any] = {}
        if result_file.exists() and result_file.stat().st_size:
            result = json.loads(result_file.read_text())
        elif not killed:
            result = exit_result(process.returncode)
        result |= killed
        result["log"] = log_file.read_bytes()[-8000:].decode(errors="replace")
        return {"method": method, "host_anonymous_peak_bytes": peak, **result}


def watch(
    process: subprocess.Popen[bytes], cap_bytes: int | None, deadline_s: float
) -> tuple[int, dict[str, str]]:
    """Peak anonymous and shared bytes of the process and its children, until it ends or has to be
    killed; the result that this is, empty where it ended."""
    peak = 0
    while process.poll() is None:
        used, available = resident_bytes(process.pid), psutil.virtual_memory().available
        peak = max(peak, used)
        if cap_bytes is not None and used > cap_bytes:
            text = f"{used / GIB:.2f} GiB of host memory, the cap is {cap_bytes / GIB:.2f}: killed"
            return peak, {"status": "out of memory", "reason": text}
        if cap_bytes is None and available < LEAST_AVAILABLE_BYTES < used:
            text = f"the machine's memory ran out at {used / GIB:.2f} GiB: killed"
            return peak, {"status": "out of memory", "reason": text}
        if time.monotonic() > deadline_s:
            show_stacks(process)
            return peak, {"status": "failed", "reason": "did not end in time: killed"}
        time.sleep(POLL_S)
    return peak, {}


def show_stacks(process: subprocess.Popen[bytes]) -> None:
    """The stacks of all threads go to the log, by Python's faulthandler, and the process ends."""
    process.send_signal(signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STACKS_S)


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
