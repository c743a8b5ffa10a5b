"""Laws of what `stronghold doctor` says: each problem is found where it is, with its remedy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stronghold.limits import HostLimits
from stronghold.model.costs import DTYPES
from stronghold.plan.machine import MachineProfile
from stronghold.tools.doctor.examine import DiskRates, Findings, PcieLink, read_link
from stronghold.tools.doctor.page import page, problems_of

MIB, GIB = 1 << 20, 1 << 30


# -- what is wrong --------------------------------------------------------------------------------

Change = Callable[[Findings], Findings]
HEALTHY = Findings(
    profile=dataclasses.replace(MachineProfile.load("a100-80gb"), measured="2026-01-31"),
    limits=HostLimits(
        memory_bytes=512 * GIB, available_bytes=500 * GIB, num_cores=32, huge_pages="madvise"
    ),
    isa="avx512",
    link=PcieLink(speed=16.0, width=16, max_speed=16.0, max_width=16),
    disk=DiskRates(path="/disk", direct=True, read_gbps=6.0, write_gbps=3.0, mixed_gbps=5.0),
)


def rates(**changes: Any) -> Change:
    return lambda f: dataclasses.replace(f, profile=dataclasses.replace(f.profile, **changes))


def limited(**changes: Any) -> Change:
    return lambda f: dataclasses.replace(f, limits=dataclasses.replace(f.limits, **changes))


def on_disk(**changes: Any) -> Change:
    def change(findings: Findings) -> Findings:
        assert findings.disk is not None
        return dataclasses.replace(findings, disk=dataclasses.replace(findings.disk, **changes))

    return change


def found(**changes: Any) -> Change:
    return lambda f: dataclasses.replace(f, **changes)


def both(*changes: Change) -> Change:
    def change(findings: Findings) -> Findings:
        for each in changes:
            findings = each(findings)
        return findings

    return change


NARROW = PcieLink(speed=16.0, width=8, max_speed=16.0, max_width=16)
EMULATED = both(rates(emulated=True), found(link=None))

# What is wrong, what is just not wrong, words of the problem, words of the remedy.
CASES: dict[str, tuple[Change, Change, str, str]] = {
    "pinning": (
        found(pin_error="refused"),
        found(pin_error=""),
        "cannot be pinned: got refused",
        "ulimit -l unlimited",
    ),
    "one memory": (
        found(one_memory=True),
        found(one_memory=False),
        "CPU and GPU share one memory",
        "train without a stronghold section",
    ),
    "slow link": (
        rates(fetch_gbps=21.0, duplex_gbps=40.0),
        rates(fetch_gbps=22.5, duplex_gbps=40.0),
        "slow link between host and GPU: got 21.0 GB/s on 16 GT/s x16, expected 22 GB/s or more of",
        "slot that the processor drives",
    ),
    "few lanes": (
        both(rates(offload_gbps=13.0, duplex_gbps=35.0), found(link=NARROW)),
        both(rates(offload_gbps=25.0), found(link=NARROW)),
        "13.0 GB/s on 16 GT/s x8",
        "8 of 16 lanes",
    ),
    "link that nobody describes": (
        both(rates(offload_gbps=10.0), found(link=None)),
        both(rates(offload_gbps=12.0), found(link=None)),
        "got 10.0 GB/s, expected 11 GB/s or more",
        "slot",
    ),
    "no vectors": (
        found(isa="scalar"),
        found(isa="avx2"),
        "without vector instructions: got scalar code, expected AVX2",
        "host-passthrough",
    ),
    "quota": (
        limited(cpu_quota=7.5),
        limited(cpu_quota=32.0),
        "got 7.5 cores' time for 32 cores",
        "stronghold.cpu_threads to 7",
    ),
    "locked memory": (
        limited(locked_bytes=8 * MIB),
        limited(locked_bytes=256 * GIB),
        "the limit of locked memory is small: got ulimit -l of 0.01 GiB",
        "--ulimit memlock=-1",
    ),
    "huge pages": (
        limited(huge_pages="never"),
        limited(huge_pages="always"),
        "huge pages are off",
        "echo madvise",
    ),
    "page cache": (
        on_disk(direct=False),
        on_disk(direct=True),
        "got no O_DIRECT in /disk",
        "local disk",
    ),
    "slow reads": (
        on_disk(read_gbps=1.4),
        on_disk(read_gbps=1.6),
        "slow disk: got 1.40 GB/s read, 3.00 GB/s written in /disk",
        "NVMe",
    ),
    "slow writes": (on_disk(write_gbps=0.7), on_disk(write_gbps=0.8), "0.70 GB/s written", "NVMe"),
}


def test_a_healthy_machine_has_no_problem() -> None:
    assert problems_of(HEALTHY) == ()
    assert "No problem found." in page(HEALTHY)


@pytest.mark.parametrize("case", CASES)
def test_a_problem_is_found_where_it_is_and_not_where_it_is_not(case: str) -> None:
    wrong, right, words, remedy = CASES[case]
    (problem,) = problems_of(wrong(HEALTHY))
    assert words in str(problem)
    assert remedy in problem.remedy
    assert problems_of(right(HEALTHY)) == ()


def test_memory_that_was_refused_hides_the_limit_with_the_same_remedy() -> None:
    change = both(CASES["pinning"][0], CASES["locked memory"][0])
    assert [problem.what for problem in problems_of(change(HEALTHY))] == [
        "host memory cannot be pinned"
    ]


def test_a_disk_that_could_not_be_measured_has_a_row_with_the_reason() -> None:
    change = on_disk(error="Permission denied")
    assert problems_of(change(HEALTHY)) == ()
    flat = " ".join(page(change(HEALTHY)).split())
    assert "files not measured: /disk: Permission denied; name another with --path" in flat


@pytest.mark.parametrize("case", ["slow link", "locked memory"])
def test_an_emulated_link_is_not_held_against_a_real_one(case: str) -> None:
    assert problems_of(both(CASES[case][0], EMULATED)(HEALTHY)) == ()


def test_the_gravest_problem_comes_first() -> None:
    change = both(CASES["slow reads"][0], CASES["quota"][0], CASES["pinning"][0])
    assert [problem.what for problem in problems_of(change(HEALTHY))] == [
        "host memory cannot be pinned",
        "the control group stops threads that compute too long",
        "slow disk",
    ]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (("16.0 GT/s PCIe", "8", "32.0 GT/s PCIe", "16"), "16 GT/s x8"),
        (("2.5 GT/s", "16", "8 GT/s", "16"), "2.5 GT/s x16"),
        (("Unknown", "0", "Unknown", "255"), None),
        (("16.0 GT/s PCIe", "0", "16.0 GT/s PCIe", "0"), None),
        (None, None),
    ],
)
def test_the_link_is_read_as_sysfs_writes_it(
    tmp_path: Path, files: tuple[str, ...] | None, expected: str | None
) -> None:
    names = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
    for name, text in zip(names, files or (), strict=files is not None):
        (tmp_path / name).write_text(f"{text}\n")
    link = read_link(tmp_path)
    assert (None if link is None else str(link)) == expected


# -- what is said ---------------------------------------------------------------------------------


def test_the_page_has_the_figures() -> None:
    changed = rates(
        fetch_gbps=20.0,
        adam_thread_gbps=20.0,
        adam_gbps=130.0,
        adam_lean_gbps=110.0,
        attention_flops=dict.fromkeys(DTYPES, 3e14),
        attention_backward_flops=dict.fromkeys(DTYPES, 2e14),
    )
    flat = " ".join(page(changed(HEALTHY)).split())
    for words in (
        "host to device (16 GT/s x16) 20.0 GB/s device to host",
        "matrix products, bf16 256 TFLOP/s",
        "attention, bf16 300 TFLOP/s, backward 200 TFLOP/s",
        "Adam (avx512), threads: 1 20.0 GB/s Adam (avx512), threads: 32 130.0 GB/s, "
        "with lean states 110.0 GB/s",
        "files /disk (O_DIRECT) files, read 6.00 GB/s files, written 3.00 GB/s "
        "files, both at once 5.00 GB/s",
        "512.0 GiB, 500.0 GiB free",
        "locked memory unlimited",
        "cores 32",
    ):
        assert words in flat, words


def test_every_problem_is_printed_with_its_remedy() -> None:
    worst = HEALTHY
    for wrong, *_ in CASES.values():
        worst = wrong(worst)
    text = page(worst)
    flat = " ".join(text.replace("->", "").split())
    assert len(problems_of(worst)) >= 7
    assert f"problems: {len(problems_of(worst))}" in text
    for problem in problems_of(worst):
        assert " ".join(problem.got.split()) in flat
        assert " ".join(problem.remedy.split()) in flat
    assert max(len(line) for line in text.splitlines()) <= 100
