"""Laws that only a GPU keeps: a test's function, and what it asks for that is not pretended."""

from __future__ import annotations

SPEED = "compares speeds"
BUS = "asks the system's PCI bus for the GPU"

DESELECTED = {
    "tests/gpu/test_comparison_cuda.py::test_our_row_plans_with_the_whole_cap": SPEED,
    "tests/gpu/test_doctor_cuda.py::test_a_gpu_is_measured_as_what_it_is": SPEED,
    "tests/gpu/test_doctor_cuda.py::test_the_address_is_one_of_the_pci_buss": BUS,
}
