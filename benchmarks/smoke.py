"""Every feature once, each in a process of its own: what works here, in a minute.

    python benchmarks/smoke.py [FEATURE...] [--machine cuda|emulated] [--jobs N] [--logs FOLDER]

Prints a line per feature: ok or FAIL, seconds, and what it saw or the error's last line. Whole
output is in the logs. What the features ask is asked again, in all of its forms, by `tests/gpu`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import faulthandler
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import gpu
from smoke_features import FEATURES, ROOT

NOTE = "smoke: "  # begins the line that a feature prints of itself
ERROR = re.compile(
    r"^(?:\[rank\d+\]: )?[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Unavailable)\b.*"
)
STUCK_S = 45.0  # a feature that runs so long prints where it is
STACKS = re.compile(r"^(?:Timeout \(|Thread 0x|Current thread 0x)")


def child(name: str, machine: str) -> NoReturn:
    """One feature in this process."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(STUCK_S)
    sys.path.insert(0, str(ROOT))
    import tests.conftest  # noqa: F401 - the environment of the tests, before torch

    note = FEATURES[name].run(machine)
    print(NOTE + note, flush=True)
    os._exit(0)  # what ends a process badly after its work is not the feature's


def run(name: str, machine: str, logs: Path) -> tuple[bool, str]:
    """Whether the feature works, and its line."""
    chosen, log = FEATURES[name], logs / f"{name}.log"
    begun = time.monotonic()
    words = [__file__, "--child", name, "--machine", machine]
    code = gpu.run(words, log, chosen.limit_s, {**os.environ, **chosen.environment})
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines()]
    notes = [line.removeprefix(NOTE) for line in lines if line.startswith(NOTE)]
    if code == 0 and notes:
        text = notes[-1]
    else:
        errors = [line for line in lines if ERROR.match(line)]
        last = (errors or [line for line in lines if line] or ["no output"])[-1]
        ended = f"still running after {chosen.limit_s:.0f} s" if code is None else f"status {code}"
        text = f"{ended}: {last[:200]}"
        begins = next((at for at, line in enumerate(lines) if STACKS.match(line)), None)
        if code is None and begins is not None:
            text = "\n".join([text, *(f"    {line}" for line in lines[begins : begins + 60])])
    ok = code == 0
    return (ok, f"{'ok  ' if ok else 'FAIL'} {name:14} {time.monotonic() - begun:5.1f} s  {text}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("features", nargs="*", help=f"of {', '.join(FEATURES)}; default: all")
    parser.add_argument("--machine", choices=["cuda", "emulated"], help="default: what is here")
    parser.add_argument("--jobs", type=int, help="at a time (default: a third of the cores)")
    parser.add_argument("--logs", type=Path, help="a folder for what each printed")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.machine)
    if unknown := set(arguments.features) - FEATURES.keys():
        parser.error(f"no feature {', '.join(sorted(unknown))}; expected {', '.join(FEATURES)}")
    if (machine := arguments.machine) is None:
        import torch

        machine = "cuda" if torch.cuda.is_available() else "emulated"
    names = arguments.features or list(FEATURES)
    left_out = [name for name in names if FEATURES[name].only_cuda and machine != "cuda"]
    names = [name for name in names if name not in left_out]
    jobs = arguments.jobs or max(1, len(os.sched_getaffinity(0)) // 3)
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="smoke-"))
    logs.mkdir(parents=True, exist_ok=True)
    begun, failed = time.monotonic(), 0
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(run, name, machine, logs) for name in names]
        for future in concurrent.futures.as_completed(running):
            ok, line = future.result()
            failed += not ok
            print(line, flush=True)
    if left_out:
        print(f"left out, since they need a GPU: {', '.join(left_out)}")
    print(
        f"smoke on {machine}: {len(names) - failed} of {len(names)} work, "
        f"{time.monotonic() - begun:.0f} s; logs in {logs}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
