"""How near the I/O queue is to the disk: against fio, and against DeepSpeed's async_io.

    python benchmarks/nvme.py [--gib 1] [--rounds 11] [--depth 8] [--folder DIR] [--deepspeed]
                              [--rest 0.2] [--save]

Sequential reads and overwrites of one file, past the page cache, in blocks of 1 and 8 MiB. Ours and
a rival move the same blocks of the disk, as many at a time, to and from the same pages of memory,
one after the other in an order that changes from round to round. Every round has other pages: in a
virtual machine some are twice as fast as others, whoever uses them. A ratio is the median of the
rounds' ratios. fio (`apt-get install fio`, `dnf install fio`) reports its own running
time, without its start.

  io_uring  ours and fio's, in one registered block of memory per block in flight
  threads   our fallback, and fio's psync with as many threads; a sequence in every thread's part
  async_io  DeepSpeed's, with --deepspeed: the whole file in one call, to and from its own locked
            memory. It needs libaio's headers (`apt-get install libaio-dev`) and compiles for three
            minutes at first use
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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("MAX_JOBS", "1")

import torch
from harness import describe, provenance, save
from tqdm import tqdm

from stronghold.native import IoQueue

MIB, GIB = 2**20, 2**30
BLOCKS = (1 * MIB, 8 * MIB)
READ, WRITE = "read", "write"


class Spent(NamedTuple):
    seconds: float
    cpu_s: float


class Task(NamedTuple):
    """What both of a duel do: move the bytes of a file from its begin to its end."""

    path: Path
    nbytes: int
    kind: str
    block: int  # bytes
    depth: int  # blocks in flight


Contender = Callable[[], Spent]


class Duel(NamedTuple):
    """Ours, whom it is held against, and the least share of that one's rate that is asked."""

    own: str
    rival: str
    asked: float
    # Both of them, on memory that lives as long as this context.
    enter: Callable[[Task, ExitStack], tuple[Contender, Contender]]


def timed(run: Callable[[], object]) -> Spent:
    cpu, begun = time.process_time(), time.perf_counter()
    run()
    return Spent(time.perf_counter() - begun, time.process_time() - cpu)


class Window:
    """Memory that a process started from here can map, too: at `path`, `nbytes` and a page."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._fd = os.memfd_create("stronghold")
        os.ftruncate(self._fd, nbytes + mmap.PAGESIZE)
        # The tensor's storage holds the buffer, and that the mapping.
        self.memory = torch.frombuffer(mmap.mmap(self._fd, nbytes), dtype=torch.uint8)
        fill(self.memory)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        os.close(self._fd)


def windows(stack: ExitStack, count: int, nbytes: int) -> list[Window]:
    made = [Window(nbytes) for _ in range(count)]
    for window in made:
        stack.callback(window.close)
    return made


def fill(memory: torch.Tensor) -> None:
    """With random bytes: a disk may hold zeros without writing them."""
    memory.view(torch.int64).random_()


def stronghold(
    task: Task, engine: str | None, memories: Sequence[torch.Tensor], parts: int = 1
) -> Spent:
    """The file in operations of a memory's size, on each of the memories in turn; as one sequence,
    or as one in each of equal parts."""
    regions = [(memory.data_ptr(), memory.nbytes) for memory in memories]
    with IoQueue(task.depth, task.block, engine, regions) as queue:
        file = queue.open(task.path, task.nbytes)
        submit = queue.read if task.kind == READ else queue.write
        size, part = memories[0].nbytes, task.nbytes // parts
        offsets = [
            begin + offset
            for offset in range(0, part, size)
            for begin in range(0, task.nbytes, part)
        ]

        def run() -> None:
            # Reads that share memory leave a mixture there: nobody looks at it.
            tickets = [
                submit(file, offset, regions[index % len(regions)][0], size, commit=False)
                for index, offset in enumerate(offsets)
            ]
            queue.commit()
            for ticket in tickets:
                queue.wait(ticket)

        return timed(run)


def fio(task: Task, own: Sequence[dict[str, object]]) -> Spent:
    """`own`: the options of each job, beyond what all have."""
    shared = {"filename": task.path, "rw": task.kind, "bs": task.block, "direct": 1}
    command = ["fio", "--thread", "--output-format=json", "--group_reporting"]
    for number, options in enumerate(own):
        named = {"name": f"job{number}", **shared, **options}
        command += [f"--{name}={value}" for name, value in named.items()]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"fio failed: {' '.join(command)}\n{result.stdout}{result.stderr}")
    job = json.loads(result.stdout[result.stdout.index("{") :])["jobs"][0]
    if job[task.kind]["io_bytes"] != task.nbytes:
        raise SystemExit(f"fio moved {job[task.kind]['io_bytes']} bytes, not {task.nbytes}")
    # Bytes over the rate of the group: `runtime` has milliseconds only, and sums up threads.
    seconds = task.nbytes / job[task.kind]["bw_bytes"]
    return Spent(seconds, (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000)


def on_io_uring(task: Task, stack: ExitStack) -> tuple[Contender, Contender]:
    (window,) = windows(stack, 1, task.depth * task.block)
    options: dict[str, object] = {
        "ioengine": "io_uring",
        "iodepth": task.depth,
        "size": task.nbytes,
        "fixedbufs": 1,
        "mem": f"mmapshared:{window.path}",
    }
    blocks = window.memory.split(task.block)
    return partial(stronghold, task, "io_uring", blocks), partial(fio, task, [options])


def on_threads(task: Task, stack: ExitStack) -> tuple[Contender, Contender]:
    made, part = windows(stack, task.depth, task.block), task.nbytes // task.depth
    options: list[dict[str, object]] = [
        {
            "ioengine": "psync",
            "offset": index * part,
            "size": part,
            "mem": f"mmapshared:{window.path}",
        }
        for index, window in enumerate(made)
    ]
    memories = [window.memory for window in made]
    own = partial(stronghold, task, "threads", memories, parts=task.depth)
    return own, partial(fio, task, options)


def on_async_io(task: Task, stack: ExitStack) -> tuple[Contender, Contender]:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    library = AsyncIOBuilder().load(verbose=False)
    handle = library.aio_handle(task.block, task.depth, False, True, 1)
    memory = handle.new_cpu_locked_tensor(task.nbytes, torch.empty(0, dtype=torch.uint8))
    stack.callback(handle.free_cpu_locked_tensor, memory)
    fill(memory)
    move = handle.sync_pread if task.kind == READ else handle.sync_pwrite
    return (
        partial(stronghold, task, None, [memory]),
        lambda: timed(lambda: move(memory, str(task.path), 0)),
    )


IO_URING = Duel("stronghold io_uring", "fio io_uring", 0.95, on_io_uring)
THREADS = Duel("stronghold threads", "fio psync, threads", 0.95, on_threads)
ASYNC_IO = Duel("stronghold, whole file", "DeepSpeed async_io", 1.0, on_async_io)


def duels(with_deepspeed: bool) -> list[Duel]:
    found = [IO_URING] if io_uring_is_permitted() else []
    return [*found, THREADS, *([ASYNC_IO] if with_deepspeed else [])]


def io_uring_is_permitted() -> bool:
    with IoQueue(1, MIB) as queue:
        if queue.engine != "io_uring":
            print(f"threads alone are measured: {queue.note}", file=sys.stderr)
        return queue.engine == "io_uring"


def fight(duel: Duel, task: Task, rounds: int, rest_s: float) -> dict[str, list[Spent]]:
    """Both, in every round on other memory, after a rest each; who begins changes."""
    spent: dict[str, list[Spent]] = {duel.own: [], duel.rival: []}
    # once untimed: page tables, the program's own pages
    for number in range(-1, rounds):
        with ExitStack() as stack:
            turns = list(zip(spent, duel.enter(task, stack), strict=True))
            for name, run in turns if number % 2 else reversed(turns):
                time.sleep(rest_s)
                found = run()
                if number >= 0:
                    spent[name].append(found)
    return spent


def measure(path: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    with IoQueue(1, MIB) as queue, queue.open(path, arguments.gib * GIB) as file:
        if not file.direct:
            print(f"no O_DIRECT in {path.parent}: this is memory's speed", file=sys.stderr)
    results = []
    # Writes first: the untimed round writes the blocks of the new file.
    tasks = [
        Task(path, arguments.gib * GIB, kind, block, arguments.depth)
        for block in BLOCKS
        for kind in (WRITE, READ)
    ]
    chosen = duels(arguments.deepspeed)
    with tqdm(total=len(tasks) * len(chosen), disable=None) as progress:
        for task in tasks:
            spent: dict[str, list[Spent]] = {}
            for duel in chosen:
                progress.set_description(f"{task.kind} {task.block // MIB} MiB, {duel.rival}")
                spent |= fight(duel, task, arguments.rounds, arguments.rest)
                progress.update()
            results.append({"kind": task.kind, "block_bytes": task.block, "spent": spent})
    return results


def ratios(spent: dict[str, list[Spent]], duel: Duel) -> list[float]:
    """The rival's time over ours, of each round."""
    pairs = zip(spent[duel.own], spent[duel.rival], strict=True)
    return [theirs.seconds / own.seconds for own, theirs in pairs]


def middle(values: Sequence[float]) -> str:
    """The median, and where the middle half of the values lies."""
    if len(values) < 2:
        return f"{values[0]:.2f}"
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def table(results: list[dict[str, Any]], arguments: argparse.Namespace, record: Any) -> str:
    heads = [f"{r['kind']}, {r['block_bytes'] // MIB} MiB" for r in results]
    row = "|---|" + "---|" * len(heads)
    lines = [
        "# The I/O queue and the disk",
        "",
        f"One file of {arguments.gib} GiB, {arguments.depth} blocks in flight, O_DIRECT; "
        f"{arguments.rounds} rounds. In each of them ours and the rival use the same pages of "
        "memory, in the next round others.",
        "",
        "| rate of ours / of the rival: median (middle half) | " + " | ".join(heads) + " | asked |",
        row + "---|",
    ]
    for duel in (IO_URING, THREADS, ASYNC_IO):
        if duel.own in results[0]["spent"]:
            cells = " | ".join(middle(ratios(result["spent"], duel)) for result in results)
            lines.append(f"| {duel.own} / {duel.rival} | {cells} | {duel.asked:.2f} |")
    lines += ["", "| median rate, and CPU time per GiB | " + " | ".join(heads) + " |", row]
    for name in results[0]["spent"]:
        rates = []
        for result in results:
            seconds = statistics.median(spent.seconds for spent in result["spent"][name])
            cpu = statistics.median(spent.cpu_s for spent in result["spent"][name])
            rate = arguments.gib * GIB / seconds / 1e9
            rates.append(f"{rate:.2f} GB/s, {cpu / arguments.gib * 1e3:.0f} ms")
        lines.append(f"| {name} | " + " | ".join(rates) + " |")
    return "\n".join([*lines, "", f"- fio: {record['fio']}", describe(record), ""])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", type=int, default=1, help="size of the file")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--depth", type=int, default=8, help="blocks in flight")
    parser.add_argument("--rest", type=float, default=0.2, help="seconds of rest before each turn")
    parser.add_argument("--folder", type=Path, help="a folder on the disk to be measured")
    parser.add_argument("--deepspeed", action="store_true", help="measure async_io, too")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/nvme.*")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
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
    markdown = table(results, arguments, record)
    print(markdown)
    if arguments.save:
        sizes = {"gib": arguments.gib, "depth": arguments.depth, "rounds": arguments.rounds}
        for path in save("nvme", markdown, {**record, **sizes, "results": results}):
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
