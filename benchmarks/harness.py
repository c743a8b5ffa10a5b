"""What every benchmark shares: fair timing, and a record of where a figure comes from.

Contenders alternate in one process, because the memory of shared machines changes speed from minute
to minute; figures are medians. Results carry commit, command, machine and versions.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def alternate(
    contenders: Mapping[str, Callable[[], object]], rounds: int = 15, warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds of every contender in every round; in a round each of them runs once, in order."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for index in tqdm(range(-warmup, rounds), desc="rounds", disable=None, leave=False):
        for name, run in contenders.items():
            begun = time.perf_counter()
            run()
            if index >= 0:
                seconds[name].append(time.perf_counter() - begun)
    return seconds


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in seconds.items()}


def host_array(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros in fresh anonymous memory that asks for huge pages, present before anyone is timed."""
    size = max(numel * dtype.itemsize, 1)
    # Private, as the engine's own: the default is shared memory, which gets no huge pages. And a
    # page more: on a Zen 4 streams exactly 2**28 bytes apart are three times slower.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size + mmap.PAGESIZE, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensor's storage holds the buffer, and that the mapping.
    return torch.frombuffer(memory, dtype=dtype, count=numel).zero_()


def provenance() -> dict[str, Any]:
    """Commit, command, machine, its load, versions and time of this run."""
    return {
        "commit": _commit(),
        "command": " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        "machine": {**_machine(), **_gpu()},
        # Near the number of cores: others were running, and figures with all threads show it.
        "load_average": round(os.getloadavg()[0], 1),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "deepspeed", "stronghold")},
        },
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def write(to: Path, data: Mapping[str, Any]) -> None:
    """The data as JSON; whoever is stopped meanwhile leaves the file as it was before."""
    aside = to.with_name(f"{to.name}.part")
    aside.write_text(json.dumps(data, indent=1) + "\n")
    aside.replace(to)


def leave(name: str, markdown: str, data: Mapping[str, Any], *, keep: bool) -> None:
    """Prints the page; with `keep` it and the data go to benchmarks/results, by name, hardware and
    date."""
    print(markdown)
    if keep:
        RESULTS.mkdir(exist_ok=True)
        machine = data["machine"]
        used = machine.get("gpu", machine["cpu"]).partition(",")[0]
        hardware = re.sub(r"[^a-z0-9]+", "-", used.lower()).strip("-")
        page = RESULTS / f"{name}_{hardware}_{data['time'][:10]}.md"
        page.write_text(markdown)
        write(page.with_suffix(".json"), data)
        print(f"wrote {page} and its numbers")


def describe(record: Mapping[str, Any]) -> str:
    """`provenance()` as Markdown lines."""
    machine, versions = record["machine"], record["versions"]
    return "\n".join(
        [
            f"- commit: {record['commit']}, {record['time']}",
            f"- command: `{record['command']}`",
            f"- machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
            f"{machine['system']}; load average {record['load_average']} at the start",
            *([f"- GPU: {machine['gpu']}"] if machine.get("gpu") else []),
            "- versions: " + ", ".join(f"{name} {value}" for name, value in versions.items()),
        ]
    )


def _machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _gpu() -> dict[str, str]:
    if not torch.cuda.is_available():
        return {}
    found = torch.cuda.get_device_properties(0)
    return {"gpu": f"{found.name}, {found.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"}


def _commit() -> str:
    """Of the tree; where it came without its history, what the environment says."""
    said = os.environ.get("STRONGHOLD_COMMIT")
    commit = said or _git("rev-parse", "--short=12", "HEAD") or "unknown"
    changed = not said and _git("status", "--porcelain", "--untracked-files=no")
    return commit + (" with changes" if changed else "")


def _git(*arguments: str) -> str:
    try:
        result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError:  # not installed
        return ""
    return result.stdout.strip()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # used from its folder
        return "not installed"
