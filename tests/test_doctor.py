"""Laws of `stronghold doctor`: what it measures is there, what it says follows from the figures."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stronghold import cli, doctor, limits
from stronghold.device.emulated import EmulatedDevice
from stronghold.doctor import disk, measure, report
from stronghold.doctor.disk import DiskRates
from stronghold.doctor.findings import RULES, Findings, PcieLink, Problem
from stronghold.doctor.measure import Effort
from stronghold.errors import ConfigError
from stronghold.limits import HostLimits
from stronghold.plan import profile
from stronghold.plan.profile import ADAM_BF16_BYTES, MachineProfile

MIB, GIB = 1 << 20, 1 << 30
SMALL = Effort(adam_numel=MIB, copy_bytes=8 * MIB, rounds=3, product_s=0.01, disk_bytes=8 * MIB)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(profile.ENVIRONMENT, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> tuple[Findings, Path, float, list[float]]:
    """A real, quick examination of this machine: findings, the disk's directory, seconds, and the
    shares of progress."""
    folder = tmp_path_factory.mktemp("disk")
    shares: list[float] = []
    begun = time.perf_counter()
    findings = doctor.examine(
        "emulated", folder, quick=True, progress=lambda _, share: shares.append(share)
    )
    return findings, folder, time.perf_counter() - begun, shares


# -- the measurement ------------------------------------------------------------------------------


def test_a_quick_examination_takes_seconds_and_tells_how_far_it_is(
    examined: tuple[Findings, Path, float, list[float]],
) -> None:
    _, _, seconds, shares = examined
    assert seconds < 10
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    assert shares == sorted(shares)
    assert shares[-2] < 1.0  # as many steps as were announced
    assert len(set(shares)) == len(shares)


def test_figures_are_positive_and_agree_with_each_other(
    examined: tuple[Findings, Path, float, list[float]],
) -> None:
    """Wide bounds: other processes use the same memory. A wrong count of bytes is found below."""
    machine = examined[0].profile
    assert machine.duplex_gbps <= 2 * (machine.fetch_gbps + machine.drain_gbps)
    assert list(machine.memory_gbps) == list(machine.adam_gbps)
    for threads, memory in machine.memory_gbps.items():
        assert machine.adam_gbps[threads] <= 1.6 * memory
    assert max(machine.memory_gbps) == machine.num_cores == limits.host_limits().num_cores
    assert machine.host_memory_bytes == limits.host_limits().usable_bytes
    assert machine.name.startswith("emulated on ")
    assert machine.sources == ()
    assert len(machine.measured) == len("2026-01-31")


def test_what_was_measured_survives_its_file(
    examined: tuple[Findings, Path, float, list[float]], tmp_path: Path
) -> None:
    examined[0].profile.save(tmp_path / "profile.json")
    assert MachineProfile.load(tmp_path / "profile.json") == examined[0].profile


def test_the_disks_file_is_gone_and_its_rates_are_there(
    examined: tuple[Findings, Path, float, list[float]],
) -> None:
    findings, folder, _, _ = examined
    assert list(folder.iterdir()) == []
    rates = findings.disk
    assert rates is not None
    assert rates.error == ""
    assert set(rates.read_gbps) == set(rates.write_gbps) == set(disk.DEPTHS)
    assert min(*rates.read_gbps.values(), *rates.write_gbps.values(), rates.mixed_gbps) > 0
    if rates.direct:
        assert findings.profile.nvme_path == str(folder.resolve())
        assert findings.profile.nvme_read_gbps == pytest.approx(
            max(rates.read_gbps.values()), rel=1e-3
        )
    else:  # the page cache's rates are not the disk's
        assert findings.profile.nvme_read_gbps is None


def test_a_paced_link_is_measured_at_its_pace() -> None:
    device = EmulatedDevice(link_gbps=0.4, poison=False)
    try:
        rates = measure.link_rates(device, SMALL, lambda _: None)
        assert device.allocated_bytes == 0
    finally:
        device.close()
    for rate in (rates.fetch_gbps, rates.drain_gbps):
        assert 0.3 < rate <= 0.401
    assert 0.5 < rates.duplex_gbps <= 0.802
    assert rates.gpu_memory_gbps > 0.4  # not over the link
    assert rates.pin_error == ""


class Lopsided(EmulatedDevice):
    """A link of which one direction is twice as fast."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        rate = 0.2 if threading.current_thread().name.endswith(":fetch") else 0.4
        time.sleep(target.numel() / (rate * 1e9))


def test_each_direction_is_measured_by_itself_and_both_until_both_end() -> None:
    """Copies of equal size would leave the faster direction idle for half the time: 0.4."""
    device = Lopsided(poison=False)
    try:
        rates = measure.link_rates(device, SMALL, lambda _: None)
    finally:
        device.close()
    assert 0.15 < rates.fetch_gbps <= 0.2
    assert 0.3 < rates.drain_gbps <= 0.4
    assert 0.45 < rates.duplex_gbps <= 0.61


def test_rates_count_the_bytes_and_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock on which everything takes a second, rates are what was moved."""

    def one_second(run: Callable[[], object]) -> float:
        run()
        return 1.0

    monkeypatch.setattr(measure, "_seconds", one_second)
    memory, adam = measure.host_rates(SMALL, 2, lambda _: None)
    assert memory == adam == dict.fromkeys((1, 2), MIB * ADAM_BF16_BYTES / 1e9)
    device = EmulatedDevice(poison=False)
    try:
        rates = measure.link_rates(device, SMALL, lambda _: None)
        flops = measure.product_flops(device, torch.float32, SMALL)
    finally:
        device.close()
    copies = 4 * 8 * MIB / 1e9
    assert rates.fetch_gbps == rates.drain_gbps == copies
    assert rates.duplex_gbps == rates.gpu_memory_gbps == 2 * copies
    assert flops == 2.0 * 256**3


def test_an_unpinnable_host_is_measured_as_it_is() -> None:
    class Unpinnable(EmulatedDevice):
        pinned = 0

        def pin(self, tensor: torch.Tensor) -> None:
            if self.pinned:
                raise OSError("no more locked memory")
            self.pinned += 1

        def unpin(self, tensor: torch.Tensor) -> None:
            self.pinned -= 1

    device = Unpinnable(poison=False)
    try:
        rates = measure.link_rates(device, SMALL, lambda _: None)
    finally:
        device.close()
    assert rates.pin_error == "no more locked memory"
    assert rates.fetch_gbps > 0
    assert device.pinned == 0


@pytest.mark.parametrize(
    ("cores", "expected"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])]
)
def test_threads_double_up_to_all_cores(cores: int, expected: list[int]) -> None:
    assert measure.thread_counts(cores) == expected


def test_a_machine_with_little_free_memory_is_measured_with_little() -> None:
    size = measure.effort(False, 512 * MIB)
    assert size.adam_numel * measure.ADAM_RESIDENT_BYTES <= 64 * MIB
    assert size.copy_bytes <= 32 * MIB


def test_the_callers_random_numbers_stay_theirs() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    device = EmulatedDevice()
    measure.product_flops(device, torch.float32, SMALL)
    device.close()
    assert torch.equal(torch.rand(4), expected)


def test_a_callers_device_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "effort", lambda *_: SMALL)
    device = EmulatedDevice(budget_bytes=40 * MIB, poison=False)
    try:
        found = doctor.examine(device)
        assert found.profile.gpu_memory_bytes == 40 * MIB
        assert found.disk is None
        assert device.fetch.submit("still there", lambda: None).wait() is None
    finally:
        device.close()


# -- the disk -------------------------------------------------------------------------------------


def test_the_disks_file_never_has_a_name(tmp_path: Path) -> None:
    seen: list[list[Path]] = []
    rates = disk.disk_rates(tmp_path, 8 * MIB, lambda _: seen.append(list(tmp_path.iterdir())))
    assert rates.error == ""
    assert len(seen) == len(disk.DEPTHS) + 1
    assert not any(seen)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_the_disks_file_is_gone_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object) -> float:
        raise error

    monkeypatch.setattr(disk, "_transfer", fail)
    if isinstance(error, OSError):
        rates = disk.disk_rates(tmp_path, 8 * MIB, lambda _: None)
        assert "No space left" in rates.error
    else:
        with pytest.raises(KeyboardInterrupt):
            disk.disk_rates(tmp_path, 8 * MIB, lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_ends_the_measurement_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "LONGEST_S", 0.0)
    rates = disk.disk_rates(tmp_path, 64 * MIB, lambda _: None)
    assert rates.error == ""
    assert min(*rates.read_gbps.values(), rates.mixed_gbps) > 0


def test_the_best_depth_is_the_least_that_is_fast() -> None:
    rates = {1: 1.0, 4: 3.0, 16: 3.1, 32: 3.0}
    assert DiskRates(path="", read_gbps=rates, write_gbps=rates).best_depth == 4


def test_a_directory_that_is_not_there_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(ConfigError, match="/nowhere"):
        doctor.examine("emulated", "/nowhere", progress=lambda *_: pytest.fail("measured"))


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="got 'tpu', expected cuda or emulated"):
        doctor.examine("tpu")


# -- what is wrong --------------------------------------------------------------------------------

Change = Callable[[Findings], Findings]
HEALTHY = Findings(
    profile=dataclasses.replace(MachineProfile.load("a100-80gb"), measured="2026-01-31"),
    limits=HostLimits(
        memory_bytes=512 * GIB, available_bytes=500 * GIB, num_cores=32, huge_pages="madvise"
    ),
    emulated=False,
    isa="avx512",
    best_isa="avx512",
    link=PcieLink(speed=16.0, width=16, max_speed=16.0, max_width=16),
    disk=DiskRates(
        path="/disk",
        engine="io_uring",
        direct=True,
        read_gbps={1: 2.0, 4: 6.0},
        write_gbps={1: 2.0, 4: 3.0},
        mixed_gbps=5.0,
    ),
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
EMULATED = found(emulated=True, link=None)

# What is wrong, what is just not wrong, words of the problem, words of the remedy.
CASES: dict[str, tuple[Change, Change, str, str]] = {
    "pinning": (
        found(pin_error="refused"),
        found(pin_error=""),
        "cannot be pinned: got refused",
        "ulimit -l unlimited",
    ),
    "slow link": (
        rates(fetch_gbps=21.0, duplex_gbps=40.0),
        rates(fetch_gbps=22.5, duplex_gbps=40.0),
        "slow link between host and GPU: got 21.0 GB/s on 16 GT/s x16, expected 22 GB/s or more of",
        "slot of the processor's own",
    ),
    "few lanes": (
        both(rates(drain_gbps=13.0, duplex_gbps=35.0), found(link=NARROW)),
        both(rates(drain_gbps=25.0), found(link=NARROW)),
        "13.0 GB/s on 16 GT/s x8",
        "8 of 16 lanes",
    ),
    "link that nobody describes": (
        both(rates(drain_gbps=10.0), found(link=None)),
        both(rates(drain_gbps=12.0), found(link=None)),
        "got 10.0 GB/s, expected 11 GB/s or more",
        "slot",
    ),
    "shared link": (
        rates(duplex_gbps=27.0),
        rates(duplex_gbps=33.0),
        "both directions of the link share one: got 27.0 GB/s together",
        "memory channels",
    ),
    "few channels": (
        rates(memory_gbps={1: 100.0, 4: 120.0, 32: 121.0}),
        rates(memory_gbps={1: 100.0, 4: 120.0, 32: 130.0}),
        "few memory channels: got 121 GB/s with 32 threads, 100 with one",
        "every channel",
    ),
    "low bandwidth": (
        rates(memory_gbps={1: 22.0, 32: 88.0}, adam_gbps={1: 20.0, 32: 80.0}),
        rates(memory_gbps={1: 22.0, 32: 91.0}, adam_gbps={1: 20.0, 32: 80.0}),
        "host memory is slow for this link: got 88 GB/s, expected 90 GB/s",
        "fill every memory channel",
    ),
    "no vectors": (
        found(isa="scalar", best_isa="scalar"),
        found(isa="avx2", best_isa="avx2"),
        "without vector instructions: got scalar code, expected AVX2",
        "host-passthrough",
    ),
    "scalar on purpose": (
        found(isa="scalar"),
        found(isa="neon", best_isa="neon"),
        "got scalar code, expected avx512",
        "unset STRONGHOLD_ISA",
    ),
    "lesser vectors": (
        found(isa="avx2"),
        found(isa="avx512"),
        "does not use the best instructions: got avx2, expected avx512",
        "unset STRONGHOLD_ISA",
    ),
    "slow Adam": (
        rates(adam_gbps={1: 20.0, 32: 110.0}),
        rates(adam_gbps={1: 20.0, 32: 113.0}),
        "Adam is slower than memory: got 110 of 160 GB/s",
        "more cores",
    ),
    "quota": (
        limited(cpu_quota=7.5),
        limited(cpu_quota=32.0),
        "got 7.5 cores' time for 32 cores",
        "stronghold.cpu_threads to 7",
    ),
    "occupied memory": (
        limited(available_bytes=200 * GIB),
        limited(available_bytes=200 * GIB, cgroup_bytes=400 * GIB),
        "got 200 of 512 GiB free",
        "end what holds it",
    ),
    "swap on": (
        limited(swap_bytes=8 * GIB),
        limited(swap_bytes=0),
        "swap is on: got 0.0 of 8.0 GiB used",
        "swapoff -a",
    ),
    "swap in use": (
        limited(swap_bytes=8 * GIB, swap_used_bytes=2 * GIB),
        limited(),
        "swap is in use: got 2.0 of 8.0 GiB used",
        "swapoff -a, after",
    ),
    "locked memory": (
        limited(locked_bytes=8 * MIB),
        limited(locked_bytes=256 * GIB),
        "the limit of locked memory is small: got ulimit -l of 0.01 GiB",
        "--ulimit memlock=-1",
    ),
    "overcommit": (
        limited(overcommit=2),
        limited(overcommit=1),
        "got vm.overcommit_memory = 2, expected 0 or 1",
        "sysctl",
    ),
    "huge pages": (
        limited(huge_pages="never"),
        limited(huge_pages="always"),
        "huge pages are off",
        "echo madvise",
    ),
    "unreadable disk": (
        on_disk(error="Permission denied", read_gbps={}, write_gbps={}),
        found(disk=None),
        "the disk could not be measured: got Permission denied",
        "--path",
    ),
    "page cache": (
        on_disk(direct=False),
        on_disk(direct=True),
        "got no O_DIRECT in /disk",
        "local disk",
    ),
    "threads for files": (
        on_disk(engine="threads", note="io_uring_setup: Operation not permitted"),
        on_disk(note="memory was not registered"),
        "the kernel refuses io_uring: got io_uring_setup: Operation not permitted",
        "seccomp",
    ),
    "threads on purpose": (
        on_disk(engine="threads"),
        on_disk(engine="io_uring"),
        "files are read and written by threads",
        "unset STRONGHOLD_IO_ENGINE",
    ),
    "slow reads": (
        on_disk(read_gbps={1: 0.4, 4: 1.4}),
        on_disk(read_gbps={1: 0.4, 4: 1.6}),
        "slow disk: got 1.40 GB/s read, 3.00 GB/s written in /disk",
        "NVMe",
    ),
    "slow writes": (
        on_disk(write_gbps={1: 0.7}),
        on_disk(write_gbps={1: 0.8}),
        "0.70 GB/s written",
        "NVMe",
    ),
}


def test_a_healthy_machine_has_no_problem() -> None:
    assert HEALTHY.problems == ()
    assert "No problem found." in report.table(HEALTHY)


@pytest.mark.parametrize("case", CASES)
def test_a_problem_is_found_where_it_is_and_not_where_it_is_not(case: str) -> None:
    wrong, right, words, remedy = CASES[case]
    (problem,) = wrong(HEALTHY).problems
    assert words in str(problem)
    assert remedy in problem.remedy
    assert right(HEALTHY).problems == ()


def test_every_rule_has_a_case() -> None:
    answering = {rule for rule in RULES for wrong, *_ in CASES.values() if rule(wrong(HEALTHY))}
    assert answering == set(RULES)


@pytest.mark.parametrize("case", ["slow link", "shared link", "low bandwidth", "locked memory"])
def test_an_emulated_link_is_not_held_against_a_real_one(case: str) -> None:
    assert both(CASES[case][0], EMULATED)(HEALTHY).problems == ()


def test_a_faster_link_than_pcie_is_no_problem() -> None:
    memory = {1: 30.0, 32: 1500.0}
    change = rates(
        fetch_gbps=400.0, drain_gbps=300.0, duplex_gbps=700.0, memory_gbps=memory, adam_gbps=memory
    )
    assert both(change, found(link=None))(HEALTHY).problems == ()


def test_the_gravest_problem_comes_first() -> None:
    change = both(CASES["slow reads"][0], CASES["swap on"][0], CASES["pinning"][0])
    assert [problem.what for problem in change(HEALTHY).problems] == [
        "host memory cannot be pinned",
        "swap is on",
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
    link = doctor.read_link(tmp_path)
    assert (None if link is None else str(link)) == expected


# -- what is said ---------------------------------------------------------------------------------


def test_the_table_says_what_each_figure_bounds() -> None:
    text = report.table(rates(fetch_gbps=20.0, drain_gbps=25.0, adam_gbps={32: 130.0})(HEALTHY))
    flat = " ".join(text.split())
    for words in (
        "host to device (16 GT/s x16) 20.0 GB/s a bf16 8 B model streams its weights (16 GB) in "
        "800 ms, twice per step",
        "device to host 25.0 GB/s its gradients leave in 640 ms",
        "matrix products, bf16 256 TFLOP/s a step of 8192 tokens computes for 1.54 s",
        "Adam (avx512), 32 threads 130.0 GB/s updates 8 B parameters in 1.60 s",
        "file reads, depth 4 6.00 GB/s states of an 8 B model (96 GB) pass in 16 s",
        "host memory, free 500.0 GiB holds exact AdamW states (12 bytes) of 44.7 B parameters",
        "locked memory unlimited",
        "swap none",
        "cores 32",
    ):
        assert words in flat, words
    assert max(len(line) for line in text.splitlines()) <= 100


def test_break_even_is_where_compute_takes_as_long_as_the_weights() -> None:
    machine = HEALTHY.profile
    tokens = report.break_even_tokens(machine)
    parameters = 3e9
    compute_s = 6 * parameters * tokens / machine.flops["bf16"]
    assert compute_s == pytest.approx(2 * 2 * parameters / (machine.fetch_gbps * 1e9))


def test_every_problem_is_printed_with_its_remedy() -> None:
    worst = HEALTHY
    for case, (wrong, *_) in CASES.items():
        if case != "unreadable disk":  # which has no other problem
            worst = wrong(worst)
    text = report.table(worst)
    flat = " ".join(text.replace("->", "").split())
    assert len(worst.problems) >= 10
    assert f"{len(worst.problems)} problems:" in text
    for problem in worst.problems:
        assert " ".join(problem.got.split()) in flat
        assert " ".join(problem.remedy.split()) in flat
    assert max(len(line) for line in text.splitlines()) <= 100


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "effort", lambda *_: SMALL)


@pytest.mark.usefixtures("small")
def test_the_command_prints_the_table_and_writes_the_machines_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert cli.main(["doctor", "--quick", "--device", "emulated"]) == 0
    output = capsys.readouterr().out
    saved = profile.find()
    assert saved is not None
    assert saved.name in output
    assert output.rstrip().endswith(str(profile.default_path()))
    for words in ("host to device", "Adam (", "matrix products, bf16", "file reads", "problem"):
        assert words in output
    assert list((tmp_path / "here").iterdir()) == []
    assert saved.nvme_path in ("", str(tmp_path / "here"))


@pytest.mark.usefixtures("small")
def test_the_command_writes_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "profiles" / "box.json"
    arguments = ["--device", "emulated", "--path", str(tmp_path), "--json", str(target)]
    assert cli.main(["doctor", "--quick", *arguments]) == 0
    assert str(target) in capsys.readouterr().out
    assert MachineProfile.load(target).name.startswith("emulated on ")
    assert profile.find() is None


@pytest.mark.usefixtures("small")
def test_the_table_is_printed_even_if_the_profile_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    arguments = ["--path", str(tmp_path), "--json", str(tmp_path / "file" / "box.json")]
    assert cli.main(["doctor", "--quick", "--device", "emulated", *arguments]) == 2
    captured = capsys.readouterr()
    assert "host to device" in captured.out
    assert "cannot be written" in captured.err


def test_the_command_refuses_a_directory_that_is_not_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["doctor", "--quick", "--device", "emulated", "--path", "/nowhere"]) == 2
    assert "--path: got /nowhere" in capsys.readouterr().err


def test_a_problem_reads_as_a_sentence() -> None:
    problem = Problem(what="slow", got="1", expected="2", remedy="do this")
    assert str(problem) == "slow: got 1, expected 2; do this"


def test_something_is_on_the_screen_within_two_seconds(tmp_path: Path) -> None:
    """Before torch is loaded, which alone takes longer on a cold machine."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    command = [sys.executable, "-m", "stronghold.cli", "doctor", "--device", "emulated"]
    begun = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--json", str(tmp_path / "box.json")],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    try:
        ready, _, _ = select.select([ours], [], [], 10.0)
        seconds = time.perf_counter() - begun
        assert ready
        assert "loading torch" in os.read(ours, 1000).decode(errors="replace")
        assert seconds < 2.0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)
    assert list(tmp_path.iterdir()) == []  # nothing is left of a killed one
