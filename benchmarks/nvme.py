"""How near the I/O queue is to the disk: against fio, and against DeepSpeed's async_io.

    python benchmarks/nvme.py [--gib 1] [--rounds 7] [--depth 8] [--folder DIR] [--deepspeed]
                              [--rest 1.0] [--save]

Sequential reads and overwrites of one file, past the page cache, in blocks of 1 and 8 MiB. All
contenders share the file, its blocks on the disk, the block size and the depth. They take turns, in
another order in every round, because the disks of shared machines change speed from second to
second; a ratio is the median of the rounds' ratios. Before each turn the disk rests: many clouds
ration it with a bucket that fills in idle time, and fio, which idles while it starts, would find it
fuller than the others. fio (`apt-get install fio`, `dnf install fio`) reports its own running time,
without its start.

Against fio, which has one buffer per block in flight, ours reads and writes block by block in as
much memory: caches count. Against DeepSpeed's async_io both move the whole file in one call, to and
from memory of its size.

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
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("MAX_JOBS", "1")

import torch
from harness import describe, host_array, provenance, save
from tqdm import tqdm

from stronghold.native_io import IoFile, IoQueue

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
    ("stronghold io_uring, whole file", "DeepSpeed async_io", 1.0),
]


def timed(run: Callable[[], object]) -> Spent:
    cpu, begun = time.process_time(), time.perf_counter()
    run()
    return Spent(time.perf_counter() - begun, time.process_time() - cpu)


def whole(queue: IoQueue, file: IoFile, memory: torch.Tensor, kind: str) -> Spent:
    """The file as one operation."""
    submit = queue.read if kind == READ else queue.write
    return timed(lambda: queue.wait(submit(file, 0, memory.data_ptr(), memory.nbytes)))


def by_block(
    queue: IoQueue, file: IoFile, memory: torch.Tensor, kind: str, block: int, depth: int
) -> Spent:
    """The file as one operation per block, in `depth` blocks of memory that take turns."""
    submit = queue.read if kind == READ else queue.write
    base = memory.data_ptr()

    def run() -> None:
        # Reads that share memory leave a mixture there: nobody looks at it.
        tickets = [
            submit(file, index * block, base + index % depth * block, block, commit=False)
            for index in range(file.size // block)
        ]
        queue.commit()
        for ticket in tickets:
            queue.wait(ticket)

    return timed(run)


def fio(path: Path, nbytes: int, kind: str, block: int, depth: int, engine: str) -> Spent:
    """One run of fio; `engine` is the part of its contender's name after "fio "."""
    options: dict[str, object] = {
        "name": "stronghold",
        "filename": path,
        "rw": kind,
        "bs": block,
        "direct": 1,
        "output-format": "json",
        "group_reporting": 1,
    }
    if engine.startswith("psync"):
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


def deepspeed(path: Path, nbytes: int, block: int, depth: int) -> dict[str, Callable[[], Spent]]:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    handle = AsyncIOBuilder().load(verbose=False).aio_handle(block, depth, False, True, 1)
    memory = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
    memory.random_(0, 256)
    return {
        READ: lambda: timed(lambda: handle.sync_pread(memory, str(path), 0)),
        WRITE: lambda: timed(lambda: handle.sync_pwrite(memory, str(path), 0)),
    }


def contenders(
    files: dict[str, tuple[IoQueue, IoFile]],
    memory: torch.Tensor,
    kind: str,
    block: int,
    arguments: argparse.Namespace,
) -> Contenders:
    path, depth = Path(files["threads"][1].path), arguments.depth
    runs: Contenders = {}
    for name, (queue, file) in files.items():
        rival = "psync, threads" if name == "threads" else name
        runs[f"stronghold {name}"] = partial(by_block, queue, file, memory, kind, block, depth)
        runs[f"fio {rival}"] = partial(fio, path, memory.nbytes, kind, block, depth, rival)
    if arguments.deepspeed:
        best = files.get("io_uring", files["threads"])
        runs["stronghold io_uring, whole file"] = partial(whole, *best, memory, kind)
        runs["DeepSpeed async_io"] = deepspeed(path, memory.nbytes, block, depth)[kind]
    return runs


def take_turns(runs: Contenders, rounds: int, rest_s: float, label: str) -> dict[str, list[Spent]]:
    """Every contender in every round, in an order that is shuffled for each, after a rest."""
    names, shuffle = list(runs), random.Random(0).shuffle
    spent: dict[str, list[Spent]] = {name: [] for name in names}
    for name in names:
        runs[name]()  # once untimed: page tables, mappings, the program's own pages
    for _ in tqdm(range(rounds), desc=label, disable=None, leave=False):
        shuffle(names)
        for name in names:
            time.sleep(rest_s)
            spent[name].append(runs[name]())
    return spent


def measure(path: Path, block: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    nbytes = arguments.gib * GIB
    memory = host_array(nbytes, torch.uint8)
    memory.view(torch.int64).random_()  # a disk may hold zeros without writing them
    lent = [(memory.data_ptr(), nbytes)]
    results = []
    with ExitStack() as stack:
        queues = {"threads": IoQueue(arguments.depth, block, "threads")}
        try:
            queues["io_uring"] = IoQueue(arguments.depth, block, "io_uring", lent)
        except OSError as error:
            print(f"io_uring is refused here, threads alone are measured: {error}", file=sys.stderr)
        files = {}
        for name, queue in queues.items():
            stack.enter_context(queue)
            files[name] = (queue, queue.open(path, nbytes))
            if not files[name][1].direct:
                print(f"no O_DIRECT in {path.parent}: this is memory's speed", file=sys.stderr)
        whole(*files["threads"], memory, WRITE)  # the blocks of a preallocated file, written once
        for kind in (READ, WRITE):
            runs = contenders(files, memory, kind, block, arguments)
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
    results = []
    with tempfile.TemporaryDirectory(prefix="stronghold-nvme-", dir=arguments.folder) as folder:
        free = shutil.disk_usage(folder).free
        if free < 2 * arguments.gib * GIB:
            raise SystemExit(f"{folder} has {free / GIB:.1f} GiB free, too little: see --folder")
        for block in BLOCKS:
            results += measure(Path(folder) / "file", block, arguments)
    markdown = table(results, arguments, record)
    print(markdown)
    if arguments.save:
        sizes = {"gib": arguments.gib, "depth": arguments.depth, "rounds": arguments.rounds}
        for path in save("nvme", markdown, {**record, **sizes, "results": results}):
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
