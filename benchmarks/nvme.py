"""How near the I/O queue is to the disk: against fio, and against DeepSpeed's async_io.

    python benchmarks/nvme.py [--gib 1] [--rounds 7] [--depth 8] [--folder DIR] [--deepspeed]
                              [--rest 1.0] [--save]

Sequential reads and overwrites of one file, past the page cache, in blocks of 1 and 8 MiB. All
contenders share the file, its blocks on the disk, the block size and the depth. They take turns, in
another order in every round, because the disks of shared machines change speed from second to
second; a ratio is the median of the rounds' ratios. Before each turn the disk rests: many clouds
ration it with a bucket that fills in idle time. So each turn begins after the same idle time: some
fill their memory first, and fio starts a process. fio (`apt-get install fio`, `dnf install fio`)
reports its own running time, without its start.

Against fio, which has one buffer per block in flight, ours reads and writes block by block in as
much memory: caches count. Against DeepSpeed's async_io both move the whole file in one call, to and
from memory of its size. In a virtual machine the rate also depends on which pages one happens to
get, so everybody takes fresh memory for every turn, before the clock runs.

  io_uring  ours and fio's, memory registered with the kernel
  threads   our fallback, and fio's psync with as many threads, each in its part of the file
  async_io  DeepSpeed's, with --deepspeed: needs libaio's headers (`apt-get install libaio-dev`)
            and compiles for three minutes at first use
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("MAX_JOBS", "1")

import torch
from harness import describe, host_array, provenance, save
from tqdm import tqdm

from stronghold.native_io import IoQueue

MIB, GIB = 2**20, 2**30
BLOCKS = (1 * MIB, 8 * MIB)
READ, WRITE = "read", "write"


class Spent(NamedTuple):
    seconds: float
    cpu_s: float


Contenders = dict[str, Callable[[], Spent]]

# Ours, whom it is held against, and the least share of that one's rate that is asked.
RIVALS = [
    ("stronghold io_uring", "fio io_uring", 0.95),
    ("stronghold threads", "fio psync, threads", 0.95),
    ("stronghold, whole file", "DeepSpeed async_io", 1.0),
]


def timed(run: Callable[[], object]) -> Spent:
    cpu, begun = time.process_time(), time.perf_counter()
    run()
    return Spent(time.perf_counter() - begun, time.process_time() - cpu)


def filled(nbytes: int) -> torch.Tensor:
    """Fresh memory of random bytes: a disk may hold zeros without writing them."""
    memory = host_array(nbytes, torch.uint8)
    memory.view(torch.int64).random_()
    return memory


def stronghold(
    path: Path, nbytes: int, kind: str, block: int, depth: int, engine: str, whole: bool
) -> Spent:
    """The file as one operation, or as one per block in `depth` blocks that take turns."""
    memory = filled(nbytes if whole else depth * block)
    base, size = memory.data_ptr(), nbytes if whole else block
    with IoQueue(depth, block, engine, [(base, memory.nbytes)]) as queue:
        file = queue.open(path, nbytes)
        submit = queue.read if kind == READ else queue.write

        def run() -> None:
            # Reads that share memory leave a mixture there: nobody looks at it.
            tickets = [
                submit(file, offset, base + offset % memory.nbytes, size, commit=False)
                for offset in range(0, nbytes, size)
            ]
            queue.commit()
            for ticket in tickets:
                queue.wait(ticket)

        return timed(run)


def fio(path: Path, nbytes: int, kind: str, block: int, depth: int, engine: str) -> Spent:
    options: dict[str, object] = {
        "name": "stronghold",
        "filename": path,
        "rw": kind,
        "bs": block,
        "direct": 1,
        "output-format": "json",
        "group_reporting": 1,
    }
    if engine == "psync":
        part = nbytes // depth
        options |= {"ioengine": "psync", "numjobs": depth, "size": part, "offset_increment": part}
    else:
        options |= {"ioengine": "io_uring", "iodepth": depth, "size": nbytes, "fixedbufs": 1}
    command = ["fio", "--thread", *(f"--{name}={value}" for name, value in options.items())]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"fio failed: {' '.join(command)}\n{result.stdout}{result.stderr}")
    job = json.loads(result.stdout[result.stdout.index("{") :])["jobs"][0]
    if job[kind]["io_bytes"] != nbytes:
        raise SystemExit(f"fio moved {job[kind]['io_bytes']} bytes, not {nbytes}")
    # Bytes over the rate of the group: `runtime` has milliseconds only, and sums up threads.
    seconds = nbytes / job[kind]["bw_bytes"]
    return Spent(seconds, (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000)


def deepspeed(path: Path, nbytes: int, kind: str, block: int, depth: int) -> Spent:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    handle = AsyncIOBuilder().load(verbose=False).aio_handle(block, depth, False, True, 1)
    memory = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
    memory.view(torch.int64).random_()
    move = handle.sync_pread if kind == READ else handle.sync_pwrite
    spent = timed(lambda: move(memory, str(path), 0))
    handle.free_cpu_locked_tensor(memory)
    return spent


def contenders(path: Path, kind: str, block: int, arguments: argparse.Namespace) -> Contenders:
    task = (path, arguments.gib * GIB, kind, block, arguments.depth)
    runs: Contenders = {
        "stronghold threads": partial(stronghold, *task, "threads", False),
        "fio psync, threads": partial(fio, *task, "psync"),
    }
    if io_uring_is_permitted():
        runs["stronghold io_uring"] = partial(stronghold, *task, "io_uring", False)
        runs["fio io_uring"] = partial(fio, *task, "io_uring")
    if arguments.deepspeed:
        runs["stronghold, whole file"] = partial(stronghold, *task, None, True)
        runs["DeepSpeed async_io"] = partial(deepspeed, *task)
    return runs


def io_uring_is_permitted() -> bool:
    with IoQueue(1, MIB) as queue:
        if queue.engine != "io_uring":
            print(f"threads alone are measured: {queue.note}", file=sys.stderr)
        return queue.engine == "io_uring"


def take_turns(runs: Contenders, rounds: int, rest_s: float, label: str) -> dict[str, list[Spent]]:
    """Every contender in every round, in an order that is shuffled for each, after a rest."""
    names, shuffle = list(runs), random.Random(0).shuffle
    spent: dict[str, list[Spent]] = {name: [] for name in names}
    # Once untimed: page tables, mappings, the program's own pages; and how long each prepares.
    idle_s = {name: preparation_s(runs[name]) for name in names}
    rest_s += max(idle_s.values())
    for _ in tqdm(range(rounds), desc=label, disable=None, leave=False):
        shuffle(names)
        for name in names:
            time.sleep(rest_s - idle_s[name])
            spent[name].append(runs[name]())
    return spent


def preparation_s(run: Callable[[], Spent]) -> float:
    """Seconds of a turn in which the disk has nothing to do."""
    begun = time.perf_counter()
    moving_s = run().seconds
    return time.perf_counter() - begun - moving_s


def measure(path: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    with IoQueue(1, MIB) as queue, queue.open(path, arguments.gib * GIB) as file:
        if not file.direct:
            print(f"no O_DIRECT in {path.parent}: this is memory's speed", file=sys.stderr)
    results = []
    for block in BLOCKS:
        for kind in (WRITE, READ):  # the untimed round writes the blocks of the new file
            runs = contenders(path, kind, block, arguments)
            label = f"{kind} {block // MIB} MiB"
            spent = take_turns(runs, arguments.rounds, arguments.rest, label)
            results.append({"kind": kind, "block_bytes": block, "spent": spent})
    return results


def ratio(spent: dict[str, list[Spent]], name: str, rival: str) -> float:
    pairs = zip(spent[name], spent[rival], strict=True)
    return statistics.median(theirs.seconds / own.seconds for own, theirs in pairs)


def ratios(spent: dict[str, list[Spent]]) -> list[tuple[str, float, float]]:
    """(what, the rival's time over ours, asked)."""
    return [
        (f"{name} / {rival}", ratio(spent, name, rival), asked)
        for name, rival, asked in RIVALS
        if name in spent and rival in spent
    ]


def table(results: list[dict[str, Any]], arguments: argparse.Namespace, record: Any) -> str:
    heads = [f"{r['kind']}, {r['block_bytes'] // MIB} MiB" for r in results]
    row = "|---|" + "---|" * len(heads)
    lines = [
        "# The I/O queue and the disk",
        "",
        f"One file of {arguments.gib} GiB, {arguments.depth} blocks in flight, O_DIRECT; "
        f"{arguments.rounds} rounds, everybody in each of them, in a shuffled order, "
        f"after {arguments.rest:g} s of rest each.",
        "",
        "| rate of ours / of the rival, median of the rounds | " + " | ".join(heads) + " | asked |",
        row + "---|",
    ]
    figures = [ratios(result["spent"]) for result in results]
    for index, (name, _, asked) in enumerate(figures[0]):
        cells = " | ".join(f"{figure[index][1]:.2f}" for figure in figures)
        lines.append(f"| {name} | {cells} | {asked:.2f} |")
    lines += ["", "| median rate, and CPU time per GiB | " + " | ".join(heads) + " |", row]
    for name in results[0]["spent"]:
        cells = []
        for result in results:
            seconds = statistics.median(spent.seconds for spent in result["spent"][name])
            cpu = statistics.median(spent.cpu_s for spent in result["spent"][name])
            rate = arguments.gib * GIB / seconds / 1e9
            cells.append(f"{rate:.2f} GB/s, {cpu / arguments.gib * 1e3:.0f} ms")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"- fio: {record['fio']}", describe(record), ""])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", type=int, default=1, help="size of the file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--depth", type=int, default=8, help="blocks in flight")
    parser.add_argument("--rest", type=float, default=1.0, help="seconds of rest before each run")
    parser.add_argument("--folder", type=Path, help="a folder on the disk to be measured")
    parser.add_argument("--deepspeed", action="store_true", help="measure async_io, too")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/nvme.*")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if shutil.which("fio") is None:
        raise SystemExit(
            "fio is missing: `apt-get install fio` on Debian and Ubuntu, `dnf install fio` on "
            "Fedora and RHEL, `brew install fio` on macOS"
        )
    version = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True)
    record = {**provenance(), "fio": version.stdout.strip()}
    with tempfile.TemporaryDirectory(prefix="stronghold-nvme-", dir=arguments.folder) as folder:
        free = shutil.disk_usage(folder).free
        if free < 2 * arguments.gib * GIB:
            raise SystemExit(f"{folder} has {free / GIB:.1f} GiB free, too little: see --folder")
        results = measure(Path(folder) / "file", arguments)
    markdown = table(results, arguments, record)
    print(markdown)
    if arguments.save:
        sizes = {"gib": arguments.gib, "depth": arguments.depth, "rounds": arguments.rounds}
        for path in save("nvme", markdown, {**record, **sizes, "results": results}):
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
