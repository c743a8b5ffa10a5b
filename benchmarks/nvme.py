"""How near the I/O queue is to the disk: beside fio.

    python benchmarks/nvme.py [--gib 1] [--rounds 11] [--depth 8] [--folder DIR] [--save]

Sequential reads and overwrites of one file, past the page cache, in blocks of 1 and 8 MiB. Ours and
fio move the same blocks of the disk, as many at a time, to and from the same pages of memory, one
after the other in an order that changes from round to round. Every round has other pages: in a
virtual machine some are twice as fast as others, whoever uses them. A ratio is the median of the
rounds' ratios. fio (`apt-get install fio`, `dnf install fio`) reports its own running time, without
its start.

  io_uring  ours and fio's, in one registered block of memory per block in flight
  threads   our fallback, and fio's psync with as many threads; a sequence in every thread's part
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import describe, leave, provenance
from tqdm import tqdm

from stronghold.native import IoQueue

MIB, GIB = 2**20, 2**30
BLOCKS = (1 * MIB, 8 * MIB)
READ, WRITE = "read", "write"
REST_S = 0.2  # before each turn
RIVALS = {"io_uring": "io_uring", "threads": "psync"}  # our engine, and fio's
ASKED = 0.95  # of fio's rate


class Task(NamedTuple):
    """Move the bytes of a file from its begin to its end."""

    path: Path
    nbytes: int
    kind: str
    block: int  # bytes
    depth: int  # blocks in flight


@contextmanager
def windows(count: int, nbytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Memory that a process started from here can map, too, by the path to map."""
    descriptors = [os.memfd_create("stronghold") for _ in range(count)]
    made = {}
    for fd in descriptors:
        os.ftruncate(fd, nbytes + mmap.PAGESIZE)
        # The tensor's storage holds the buffer, and that the mapping.
        memory = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
        # with random bytes: a disk may hold zeros without writing them
        memory.view(torch.int64).random_()
        made[f"/proc/{os.getpid()}/fd/{fd}"] = memory
    yield made
    for fd in descriptors:
        os.close(fd)


def stronghold(task: Task, engine: str, memories: Sequence[torch.Tensor], parts: int) -> float:
    """Seconds of the file in blocks, on each of the memories in turn; as one sequence in each of
    equal parts."""
    regions = [(memory.data_ptr(), memory.nbytes) for memory in memories]
    with IoQueue(task.depth, task.block, engine, regions) as queue:
        file = queue.open(task.path, task.nbytes)
        submit = queue.read if task.kind == READ else queue.write
        part = task.nbytes // parts
        offsets = [
            begin + offset
            for offset in range(0, part, task.block)
            for begin in range(0, task.nbytes, part)
        ]
        begun = time.perf_counter()
        # Reads that share memory leave a mixture there: nobody looks at it.
        tickets = [
            submit(file, offset, regions[index % len(regions)][0], task.block, commit=False)
            for index, offset in enumerate(offsets)
        ]
        queue.commit()
        for ticket in tickets:
            queue.wait(ticket)
        return time.perf_counter() - begun


def fio(task: Task, jobs: Sequence[dict[str, object]]) -> float:
    """Seconds of the same by fio. `jobs`: the options of each, beyond what all have."""
    shared = {"filename": task.path, "rw": task.kind, "bs": task.block, "direct": 1}
    command = ["fio", "--thread", "--output-format=json", "--group_reporting"]
    for number, options in enumerate(jobs):
        named = {"name": f"job{number}", **shared, **options}
        command += [f"--{name}={value}" for name, value in named.items()]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"fio failed: {' '.join(command)}\n{result.stdout}{result.stderr}")
    moved = json.loads(result.stdout[result.stdout.index("{") :])["jobs"][0][task.kind]
    if moved["io_bytes"] != task.nbytes:
        raise SystemExit(f"fio moved {moved['io_bytes']} bytes, not {task.nbytes}")
    # Bytes over the rate of the group: `runtime` has milliseconds only, and sums up threads.
    seconds: float = task.nbytes / moved["bw_bytes"]
    return seconds


def one_round(task: Task, engine: str, ours_first: bool) -> tuple[float, float]:
    """Seconds of ours and of fio's, on the same new memory, after a rest each."""
    uring = engine == "io_uring"
    count, parts = (1, 1) if uring else (task.depth, task.depth)
    with windows(count, task.depth * task.block // count) as made:
        memories = [block for memory in made.values() for block in memory.split(task.block)]
        part = task.nbytes // parts
        more: dict[str, object] = {"iodepth": task.depth, "fixedbufs": 1} if uring else {}
        common: dict[str, object] = {"ioengine": RIVALS[engine], "size": part, **more}
        jobs = [
            {**common, "offset": index * part, "mem": f"mmapshared:{path}"}
            for index, path in enumerate(made)
        ]
        seconds = {}
        for ours in (ours_first, not ours_first):
            time.sleep(REST_S)
            seconds[ours] = stronghold(task, engine, memories, parts) if ours else fio(task, jobs)
    return seconds[True], seconds[False]


def engines() -> list[str]:
    with IoQueue(1, MIB) as queue:
        if queue.engine == "io_uring":
            return list(RIVALS)
        print(f"threads alone are measured: {queue.note}", file=sys.stderr)
    return ["threads"]


def measure(path: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    nbytes = arguments.gib * GIB
    with IoQueue(1, MIB) as queue, queue.open(path, nbytes) as file:
        if not file.direct:
            print(f"no O_DIRECT in {path.parent}: this is memory's speed", file=sys.stderr)
    results = []
    # Writes first: the untimed round writes the blocks of the new file.
    kinds = [(block, kind) for block in BLOCKS for kind in (WRITE, READ)]
    for block, kind in tqdm(kinds, disable=None):
        task, seconds = Task(path, nbytes, kind, block, arguments.depth), {}
        for engine in engines():
            # once untimed: page tables, the program's own pages
            rounds = [one_round(task, engine, bool(n % 2)) for n in range(arguments.rounds + 1)]
            seconds[engine] = rounds[1:]
        results.append({"kind": kind, "block_bytes": block, "seconds": seconds})
    return results


def middle(values: Sequence[float]) -> str:
    """The median, and where the middle half of the values lies."""
    if len(values) < 2:
        return f"{values[0]:.2f}"
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def table(results: list[dict[str, Any]], arguments: argparse.Namespace, record: Any) -> str:
    heads = [f"{r['kind']}, {r['block_bytes'] // MIB} MiB" for r in results]
    ratios, rates = [], []
    for engine in results[0]["seconds"]:
        pairs = [result["seconds"][engine] for result in results]
        cells = " | ".join(middle([theirs / own for own, theirs in rounds]) for rounds in pairs)
        ratios.append(f"| rate of stronghold's {engine} / fio's {RIVALS[engine]} | {cells} |")
        for who, name in enumerate((f"stronghold {engine}", f"fio {RIVALS[engine]}")):
            medians = [statistics.median(times[who] for times in rounds) for rounds in pairs]
            cells = " | ".join(f"{arguments.gib * GIB / s / 1e9:.2f} GB/s" for s in medians)
            rates.append(f"| {name} | {cells} |")
    lines = [
        "# The I/O queue and the disk",
        "",
        f"One file of {arguments.gib} GiB, {arguments.depth} blocks in flight, O_DIRECT; "
        f"{arguments.rounds} rounds. In each of them ours and fio use the same pages of memory, in "
        f"the next round others. Ratios are medians, with the middle half; asked: {ASKED:.2f}.",
        "",
        "| | " + " | ".join(heads) + " |",
        "|---|" + "---|" * len(heads),
        *ratios,
        *rates,
    ]
    return "\n".join([*lines, "", f"- fio: {record['fio']}", describe(record), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", type=int, default=1, help="size of the file")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--depth", type=int, default=8, help="blocks in flight")
    parser.add_argument("--folder", type=Path, help="a folder on the disk to be measured")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    arguments = parser.parse_args()
    if shutil.which("fio") is None:
        raise SystemExit(
            "fio is missing: `apt-get install fio` on Debian and Ubuntu, `dnf install fio` on "
            "Fedora and RHEL"
        )
    version = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True)
    record = {**provenance(), "fio": version.stdout.strip()}
    with tempfile.TemporaryDirectory(prefix="stronghold-nvme-", dir=arguments.folder) as folder:
        free = shutil.disk_usage(folder).free
        if free < 2 * arguments.gib * GIB:
            raise SystemExit(f"{folder} has {free / GIB:.1f} GiB free, too little: see --folder")
        results = measure(Path(folder) / "file", arguments)
    sizes = {"gib": arguments.gib, "depth": arguments.depth, "rounds": arguments.rounds}
    data = {**record, **sizes, "results": results}
    leave("nvme", table(results, arguments, record), data, keep=arguments.save)


if __name__ == "__main__":
    main()
