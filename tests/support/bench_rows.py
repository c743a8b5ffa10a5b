"""Rows of the comparison made in this process: a process of its own takes seconds to import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from methods import process
from methods.child import running
from methods.task import Task


def run_here(monkeypatch: pytest.MonkeyPatch, methods: Sequence[str]) -> None:
    """These methods run in this process, the others in one of their own as ever. What is seen of a
    method's memory from outside is zero.
    """
    in_a_process = process.run

    def run(method: str, task_json: str, **options: Any) -> dict[str, Any]:
        if method not in methods:
            return in_a_process(method, task_json, **options)
        with running(method, Task.from_json(task_json)) as result:
            return {"method": method, "host_anonymous_peak_bytes": 0, **result}

    monkeypatch.setattr(process, "run", run)
