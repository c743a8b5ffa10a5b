"""`stronghold test` on a GPU: bits and bytes as on the emulated device, and the link's rate."""

from __future__ import annotations

import pytest

from stronghold.tools.doctor import selftest

pytestmark = pytest.mark.gpu


def test_all_three_checks_pass_on_a_gpu() -> None:
    bits, memory, link = selftest.run(lambda _: None)
    assert bits.passed, bits
    assert "on the GPU" in bits.text
    assert memory.passed, memory
    assert link.passed, link
    assert link.text.count("GB/s") == 2
