"""Runs one distributed test of DeepSpeed's on several ranks of this machine, over gloo.

Owns the ranks' processes: each runs one test and ends. They are forked from a server that has
imported everything, also what torch and the engine import late. A rank that has not ended in time
is killed.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo
from _pytest.outcomes import Skipped

import stronghold.engine.engine  # noqa: F401 - the first engine imports it
from conformance_suite.deepspeed.process import adapt, adapt_init, leave_out_partition_checks

LIMIT_S = 300.0  # of one test
PATIENCE_S = 8.0  # for the other ranks, after the first that failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of one rank: "passed", "skipped" or "failed", and what was said."""

    rank: int
    outcome: str
    text: str


def run_test(test: Any, num_ranks: int, init_method: str) -> None:
    """Run a distributed test, or a distributed fixture, on `num_ranks` processes.

    Fails if one of them fails, with the text of each that failed. Skips if they skip.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pickled = pickle.dumps(test)
    port = free_port()
    processes = []
    receivers = {}
    for rank in range(num_ranks):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=run_rank, args=(pickled, rank, num_ranks, port, init_method, sender)
        )
        process.start()
        sender.close()
        processes.append(process)
        receivers[receiver] = rank
    try:
        reports = collect(receivers, processes)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    failures = [report for report in reports if report.outcome == "failed"]
    if failures:
        texts = [f"rank {report.rank}:\n{report.text}" for report in failures]
        pytest.fail("\n".join(texts), pytrace=False)
    skips = [report for report in reports if report.outcome == "skipped"]
    if skips:
        pytest.skip(skips[0].text)


def collect(receivers: dict[Any, int], processes: list[Any]) -> list[Report]:
    """Return the ranks' reports in the order in which they came.

    A rank that ends without a report has failed. Ranks that wait for a failed one have no report.
    """
    reports = []
    deadline = time.monotonic() + LIMIT_S
    waiting = dict(receivers)
    has_failed = False
    while waiting and time.monotonic() < deadline:
        ready = multiprocessing.connection.wait(list(waiting), deadline - time.monotonic())
        for receiver in ready:
            rank = waiting.pop(receiver)
            report = receive(receiver, rank, processes[rank])
            reports.append(report)
            if report.outcome == "failed":
                has_failed = True
                deadline = min(deadline, time.monotonic() + PATIENCE_S)
    if has_failed:
        return reports
    for rank in waiting.values():
        reports.append(failed(rank, f"no end within {LIMIT_S:.0f} s"))
    if not waiting:
        for rank, process in enumerate(processes):
            process.join(max(1.0, deadline - time.monotonic()))
            if process.exitcode != 0:
                reports.append(failed(rank, f"passed, then ended with {process.exitcode}"))
    return reports


def receive(receiver: Any, rank: int, process: Any) -> Report:
    """Return the report of a rank whose pipe is ready: it has a report, or is closed."""
    try:
        report: Report = receiver.recv()
    except EOFError:
        process.join(5.0)
        return failed(rank, f"the process ended with {process.exitcode}")
    return report


def failed(rank: int, text: str) -> Report:
    return Report(rank=rank, outcome="failed", text=f"E   {text}")


def run_rank(
    pickled: bytes, rank: int, num_ranks: int, port: int, init_method: str, sender: Any
) -> None:
    """The body of a rank's process.

    The test is unpickled here, because that imports its module, which takes names of modules that
    `adapt` changes.
    """
    faulthandler.enable()
    importlib.import_module("unit.common")
    adapt()
    adapt_init()
    try:
        test = pickle.loads(pickled)
        leave_out_partition_checks(sys.modules[type(test).__module__])
        skipped = test._dist_run(rank, num_ranks, port, init_method)
        outcome, text = ("skipped", skipped) if skipped else ("passed", "")
    except Skipped as skip:
        outcome, text = "skipped", str(skip.msg)
    except BaseException as error:
        outcome, text = "failed", formatted(error)
    sender.send(Report(rank=rank, outcome=outcome, text=text))
    sender.close()
    if outcome == "failed":
        sys.stdout.flush()
        os._exit(0)  # another rank may wait for this one in a collective
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def formatted(error: BaseException) -> str:
    """The traceback, and then the error's own lines, marked as pytest marks them."""
    stack = "".join(traceback.format_exception(error))
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    return stack + "\n".join(f"E   {line}" for line in lines)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
