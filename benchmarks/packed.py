"""How near decoding of packed weights is to memory's limit, and how long encoding takes.

    python benchmarks/packed.py [--rows 8192] [--columns 8192] [--rounds 15] [--isa avx512 avx2]
                                [--save]

For each format, instruction set and number of threads, all contenders alternate in one process:

  decode     the kernel, from packed weights into bf16
  limit      the same bytes: it reads the codes and writes zeros past the caches
  copy       torch's copy of a bf16 array; its read and written bytes are those of the decoding
  encode     the kernel, of a bf16 weight of 4096 x 4096, with the error
  reference  the same in plain torch

All large arrays are fresh private mappings that ask for huge pages, as the engine's do.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from harness import alternate, describe, host_array, medians, provenance, save, slug

from stronghold import native
from stronghold.model.packed_formats import FORMATS, PackedTensors, decode_weights, packed_row

BF16 = torch.bfloat16
ASKED = 0.7  # of the limit's rate
ENCODED = (4096, 4096)
ENCODE_ROUNDS = 3


def inner_arrays(name: str, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """The inner tensors of a weight of this shape, in fresh memory."""
    arrays = {}
    for row in FORMATS[name].inner(shape):
        numel = torch.Size(row.shape).numel()
        array = host_array(numel * row.dtype.itemsize, torch.uint8)
        arrays[row.name] = array.view(row.dtype).view(row.shape)
    return arrays


Contenders = dict[str, Callable[[], object]]


def decoders(name: str, shape: tuple[int, int], pool: native.Pool) -> Contenders:
    format = FORMATS[name]
    weight = host_array(shape[0] * shape[1], BF16).view(shape)
    weight.normal_(0.0, 0.02)
    inner = inner_arrays(name, shape)
    format.encode(weight, inner, pool)
    packed = PackedTensors(format, inner, weight)
    row = packed_row(packed)
    copied = moved_bytes(name, shape) // 4
    source, target = host_array(copied, BF16), host_array(copied, BF16)
    return {
        "limit": lambda: pool.decode_traffic(name, BF16, [row]),
        "decode": lambda: decode_weights(pool, [packed]),
        "copy": lambda: target.copy_(source),
    }


def encoders(name: str, pool: native.Pool) -> Contenders:
    format, inner = FORMATS[name], inner_arrays(name, ENCODED)
    weight = host_array(ENCODED[0] * ENCODED[1], BF16).view(ENCODED)
    weight.normal_(0.0, 0.02)
    return {
        "encode": lambda: format.encode(weight, inner, pool),
        "reference": lambda: format.encode(weight, inner),
    }


def moved_bytes(name: str, shape: tuple[int, int]) -> int:
    """Bytes that decoding must read and write."""
    return FORMATS[name].packed_bytes(shape) + shape[0] * shape[1] * BF16.itemsize


def measure(shape: tuple[int, int], isa: str, threads: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    formats: dict[str, Any] = {}
    with native.Pool(threads, isa=isa) as pool:
        for name in FORMATS:
            seconds = alternate(decoders(name, shape, pool), rounds)
            seconds |= alternate(encoders(name, pool), ENCODE_ROUNDS, warmup=1)
            formats[name] = {"median_s": medians(seconds), "seconds": seconds}
        return {"threads": threads, "isa": pool.isa, "formats": formats}


def table(results: list[dict[str, Any]], shape: tuple[int, int], record: dict[str, Any]) -> str:
    heads = [f"{r['isa']}, {r['threads']} thread{'s'[: r['threads'] > 1]}" for r in results]
    rounds = len(results[0]["formats"]["nf4"]["seconds"]["decode"])
    lines = [
        "# Packed weights on the CPU",
        "",
        f"Decoding of a {shape[0]:,} x {shape[1]:,} weight into bf16, encoding of one of "
        f"{ENCODED[0]:,} x {ENCODED[1]:,}; medians of {rounds} alternating "
        f"rounds, of {ENCODE_ROUNDS} for encoding.",
        "",
        "| | " + " | ".join(heads) + " | asked |",
        "|---|" + "---|" * (len(heads) + 1),
    ]
    for name in FORMATS:
        times = [result["formats"][name]["median_s"] for result in results]
        ratios = " | ".join(f"{time['limit'] / time['decode']:.2f}" for time in times)
        lines.append(f"| {name}: decode, of memory's limit | {ratios} | {ASKED:.2f} |")
        for contender in ("decode", "limit", "copy"):
            moved = moved_bytes(name, shape)
            cells = " | ".join(
                f"{time[contender] * 1e3:.1f} ms, {moved / time[contender] / 1e9:.1f} GB/s"
                for time in times
            )
            lines.append(f"| {name}: {contender} | {cells} | |")
        for contender in ("encode", "reference"):
            cells = " | ".join(f"{time[contender] * 1e3:.0f} ms" for time in times)
            lines.append(f"| {name}: {contender} | {cells} | |")
    note = (
        "GB/s count the bytes that decoding must read and write. The limit reads the codes and "
        "writes zeros past the caches; it does not read the scales. `encode` includes the error "
        "of the decoded weight."
    )
    return "\n".join([*lines, "", note, "", describe(record), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--columns", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=15)
    every = native.available_cores()
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, every}))
    parser.add_argument("--isa", nargs="+", default=[native.isa()], choices=native.isas())
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/packed_CPU.*")
    arguments = parser.parse_args()
    shape = arguments.rows, arguments.columns
    record = provenance()
    results = [
        measure(shape, isa, threads, arguments.rounds)
        for isa in arguments.isa
        for threads in arguments.threads
    ]
    markdown = table(results, shape, record)
    print(markdown)
    if arguments.save:
        name = f"packed_{slug(record['machine']['cpu'])}"
        for path in save(name, markdown, {**record, "shape": shape, "results": results}):
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
