"""Laws of `stronghold doctor`: what it measures is there, and the command says and writes it."""

from __future__ import annotations

import fcntl
import itertools
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stronghold import limits
from stronghold.devices.emulated import EmulatedDevice
from stronghold.devices.host_memory import HostPinning
from stronghold.errors import ConfigError
from stronghold.model.costs import DTYPES
from stronghold.plan import machine as profile
from stronghold.plan.machine import ADAM_BF16_BYTES, ADAM_LEAN_BYTES, MachineProfile
from stronghold.tools import cli
from stronghold.tools.doctor import examine as examination
from stronghold.tools.doctor.examine import Findings, examine
from stronghold.train import rates as measure
from stronghold.train.files import Files
from tests.support.quiet import law_of_time, on_time

MIB = 1 << 20
SHORT_S = 0.01


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(profile.ENVIRONMENT, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small arrays and short measurements."""
    monkeypatch.setattr(measure, "last_cache_bytes", lambda: MIB)
    monkeypatch.setattr(measure, "LEAST_BYTES", 8 * MIB)
    monkeypatch.setattr(measure, "TOKENS", 128)
    monkeypatch.setattr(examination, "SECONDS", SHORT_S)


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> tuple[Findings, Path, float, list[str]]:
    """A real examination of this machine: findings, the disk's directory, seconds, and the
    names of the measurements."""
    folder = tmp_path_factory.mktemp("disk")
    steps: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        # Arrays are twice the caches. A virtual machine may name its whole host's.
        patched.setattr(measure, "last_cache_bytes", lambda: 64 * MIB)
        begun = time.perf_counter()
        findings = examine("emulated", folder, step=steps.append)
        seconds = time.perf_counter() - begun
    return findings, folder, seconds, steps


# -- the measurement ------------------------------------------------------------------------------


@law_of_time
def test_an_examination_takes_seconds_and_names_what_it_measures(
    examined: tuple[Findings, Path, float, list[str]],
) -> None:
    _, _, seconds, steps = examined
    assert {"host to device", "matrix products, bf16", "file reads"} <= set(steps)
    on_time(seconds < 30, seconds)


@pytest.mark.alone  # beside the others that look at one examination
def test_figures_are_of_the_whole_machine(
    examined: tuple[Findings, Path, float, list[str]],
) -> None:
    machine = examined[0].profile
    assert machine.num_cores == limits.host_limits().num_cores
    assert machine.adam_lean_gbps is not None
    assert machine.host_memory_bytes == limits.host_limits().usable_bytes
    assert machine.name.startswith("emulated on ")
    assert machine.emulated
    for rates in (machine.attention_flops, machine.attention_backward_flops):
        assert {"fp32"} <= set(rates) <= set(machine.flops)  # by the CPU


@pytest.mark.alone
def test_what_was_measured_survives_its_file(
    examined: tuple[Findings, Path, float, list[str]], tmp_path: Path
) -> None:
    examined[0].profile.save(tmp_path / "profile.json")
    assert MachineProfile.load(tmp_path / "profile.json") == examined[0].profile


@pytest.mark.alone
def test_the_disks_file_is_gone_and_its_rates_are_there(
    examined: tuple[Findings, Path, float, list[str]],
) -> None:
    findings, folder, _, _ = examined
    assert list(folder.iterdir()) == []
    rates = findings.disk
    assert rates.error == ""
    assert min(rates.read_gbps, rates.write_gbps, rates.mixed_gbps) > 0
    if rates.direct:
        assert findings.profile.nvme_path == str(folder.resolve())
        assert findings.profile.nvme_read_gbps == pytest.approx(rates.read_gbps, rel=1e-3)
    else:  # the page cache's rates are not the disk's
        assert findings.profile.nvme_read_gbps is None


class Lopsided(EmulatedDevice):
    """A link of which one direction is twice as fast."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        rate = 0.2 if threading.current_thread().name.endswith(":fetch") else 0.4
        time.sleep(target.numel() / (rate * 1e9))


@law_of_time
@pytest.mark.usefixtures("small")
def test_each_direction_is_measured_by_itself_and_both_until_both_end() -> None:
    """Copies of equal size would leave the faster direction idle for half the time: 0.4."""
    device = Lopsided(poison=False)
    try:
        rates, _ = measure.link_rates(device, limits.host_limits(), 0.1, lambda _: None)
    finally:
        device.close()
    assert rates["fetch_gbps"] <= 0.2
    assert rates["offload_gbps"] <= 0.4
    assert rates["duplex_gbps"] <= 0.61
    on_time(rates["fetch_gbps"] > 0.15 and rates["offload_gbps"] > 0.3, rates)
    on_time(rates["duplex_gbps"] > 0.45, rates)


@pytest.mark.usefixtures("small")
def test_rates_count_the_bytes_and_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock on which everything takes a second, rates are what was moved."""
    clock = itertools.count()
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    machine = limits.host_limits()
    numel = measure.adam_numel(machine)
    rates = measure.host_rates(machine, 2, 0.5, lambda _: None)
    assert rates.pop("adam_lean_gbps") == pytest.approx(numel * ADAM_LEAN_BYTES / 1e9)
    moved = pytest.approx(numel * ADAM_BF16_BYTES / 1e9)
    assert rates == dict.fromkeys(("memory_gbps", "adam_gbps", "adam_thread_gbps"), moved)
    device = EmulatedDevice(poison=False)
    try:
        rates, _ = measure.link_rates(device, machine, 0.5, lambda _: None)
        flops = measure.product_flops(device, torch.float32, 0.5)
        attention = measure.attention_flops(device, torch.float32, 0.5)
    finally:
        device.close()
    copies = 4 * 4 * MIB / 1e9  # half of 8 MiB each, which took twice as long as they may
    assert rates["fetch_gbps"] == rates["offload_gbps"] == copies
    assert rates["duplex_gbps"] == 2 * copies
    assert rates["gpu_memory_gbps"] == 2 * 8 * MIB / 1e9  # one copy took longer than it may
    assert flops == 2.0 * 256**3
    pairs = 128 * 128  # of one head, also those above the diagonal
    assert attention == (4.0 * 128 * pairs, 8.0 * 128 * pairs)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("without", [{"bf16"}, {"bf16", "fp16", "fp32"}])
def test_a_dtype_in_which_attention_does_not_run_has_no_rate(
    without: set[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attend = torch.nn.functional.scaled_dot_product_attention

    def partly(query: torch.Tensor, *args: torch.Tensor, **kwargs: bool) -> torch.Tensor:
        if query.dtype in {DTYPES[precision] for precision in without}:
            raise RuntimeError("no such kernel")
        return attend(query, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", partly)
    device = EmulatedDevice(poison=False)
    try:
        profile, _ = measure.measure_machine(
            device, limits.host_limits(), lambda _: None, seconds=SHORT_S, threads=1
        )
    finally:
        device.close()
    for rates in (profile.attention_flops, profile.attention_backward_flops):
        assert set(rates or ()) == DTYPES.keys() - without
    assert "attention in bf16 does not run here: no such kernel" in caplog.text


@pytest.mark.usefixtures("small")
def test_an_unpinnable_host_is_measured_as_it_is() -> None:
    class Unpinnable(HostPinning):
        pinned = 0

        def register(self, tensor: torch.Tensor) -> None:
            if self.pinned:
                raise OSError("no more locked memory")
            self.pinned += 1

        def pin(self, tensor: torch.Tensor) -> None:
            self.pinned += 1  # refused, and known to be

        def unpin(self, tensor: torch.Tensor) -> None:
            self.pinned -= 1

    device = EmulatedDevice(poison=False)
    device.pinning = pinning = Unpinnable()
    try:
        rates, pin_error = measure.link_rates(device, limits.host_limits(), SHORT_S, lambda _: None)
    finally:
        device.close()
    assert pin_error == "no more locked memory"
    assert rates["fetch_gbps"] > 0
    assert pinning.pinned == 0


@pytest.mark.parametrize("cache", [32 * MIB, 300 * MIB, 1152 * MIB])
def test_adam_is_measured_outside_of_the_caches(
    cache: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "last_cache_bytes", lambda: cache)
    plenty = limits.HostLimits(memory_bytes=200 << 30, available_bytes=200 << 30)
    assert measure.adam_numel(plenty) * measure.LEAN_RESIDENT_BYTES >= 2 * cache - 8
    short = limits.HostLimits(memory_bytes=1 << 30, available_bytes=1 << 30)
    assert measure.adam_numel(short) * measure.ADAM_RESIDENT_BYTES <= (1 << 30) / 8


@pytest.mark.usefixtures("small")
def test_copies_on_the_device_are_measured_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that ticks once in each reading, ten copies take what one takes."""
    tick_s = 1e-6
    clock = itertools.count()
    timer = SimpleNamespace(perf_counter=lambda: next(clock) * tick_s)
    monkeypatch.setattr(measure, "time", timer)
    device = EmulatedDevice(poison=False)
    try:
        rates, _ = measure.link_rates(device, limits.host_limits(), 31 * tick_s, lambda _: None)
    finally:
        device.close()
    assert rates["gpu_memory_gbps"] == pytest.approx(10 * 2 * 8 * MIB / tick_s / 1e9)


def test_the_caches_of_all_chiplets_count(tmp_path: Path) -> None:
    for cpu, (cores, size) in enumerate([("0-1", "32768K")] * 2 + [("2", "16M")]):
        folder = tmp_path / f"cpu{cpu}" / "cache" / "index3"
        folder.mkdir(parents=True)
        (folder / "shared_cpu_list").write_text(f"{cores}\n")
        (folder / "size").write_text(f"{size}\n")
    assert measure.last_cache_bytes(tmp_path) == 48 * MIB
    assert measure.last_cache_bytes(tmp_path / "nothing") == 64 * MIB


@pytest.mark.usefixtures("small")
def test_a_callers_device_is_left_open() -> None:
    device = EmulatedDevice(budget_bytes=40 * MIB, poison=False)
    try:
        found = examine(device)
        assert found.profile.gpu_memory_bytes == 40 * MIB
        assert found.disk is None
        assert device.fetch.submit("still there", lambda: None).wait() is None
    finally:
        device.close()


# -- the disk -------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_the_disks_file_is_gone_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Files, "read", fail)
    if isinstance(error, OSError):
        rates = examination.disk_rates(tmp_path, 64 * MIB, lambda _: None)
        assert "No space left" in rates.error
    else:
        with pytest.raises(KeyboardInterrupt):
            examination.disk_rates(tmp_path, 64 * MIB, lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="got 'tpu', expected cuda or emulated"):
        examine("tpu")


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
def test_the_command_prints_the_table_and_writes_the_machines_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert cli.main(["doctor", "--device", "emulated"]) == 0
    output = capsys.readouterr().out
    saved = profile.find_profile()
    assert saved.name in output
    assert output.rstrip().endswith(str(profile.default_path()))
    for words in ("host to device", "Adam (", "matrix products, bf16", "files, read", "problem"):
        assert words in output
    assert list((tmp_path / "here").iterdir()) == []
    assert saved.nvme_path in ("", str(tmp_path / "here"))


def test_the_command_refuses_a_directory_that_is_not_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["doctor", "--device", "emulated", "--path", "/nowhere"]) == 2
    assert "--path: got /nowhere" in capsys.readouterr().err


@law_of_time
def test_something_is_on_the_screen_within_two_seconds(tmp_path: Path) -> None:
    """Before torch is loaded, which alone takes longer on a cold machine."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    command = [sys.executable, "-m", "stronghold.tools.cli", "doctor", "--device", "emulated"]
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
        on_time(seconds < 2.0, seconds)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)
    assert list(tmp_path.iterdir()) == []  # nothing is left of a killed one
