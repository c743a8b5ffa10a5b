"""Law 5: against `torch.optim.AdamW` on fp32 masters the only difference is rounding.

[Note: the bound] One update from the same state and the same gradient differs by a few units in the
last place of the fp32 weight: test_kernels states it exactly. Over a training run the difference
feeds back through the gradients, and Adam divides by the gradient's size, so that an element whose
gradient is itself rounding noise may go either way, by up to the learning rate in each step. The
bound over T steps is therefore stated on the mean over all weights, in units of what the weights
could have moved (T times the learning rate): 2**-20 in fp32, where gradients carry 24 bits, and
2**-7 with bf16 weights, where they carry 8. Losses follow. Measured with three choices of torch's
kernels: 2**-23.7 and 2**-9.4 at most. At ten times the learning rate the run is chaotic, and the
difference what the kernels make of it: up to 2**-4.
"""

from __future__ import annotations

import pytest
import torch

from tests.models import loss_of
from tests.models.families import odd_llama as llama
from tests.support.training import ADAM, Run, config, train_windowed

STEPS = 20
RATES = {**ADAM, "lr": 1e-3}
BOUND = {"fp32": 2.0**-20, "bf16": 2.0**-7}
LOSS_BOUND = {"fp32": 5e-6, "bf16": 2e-3}


def train_with_torch(precision: str, clipping: float) -> Run:
    """A plain loop: autograd, torch's clipping, torch's AdamW on fp32 masters."""
    torch.manual_seed(0)
    model, make_batch = llama()
    if precision == "bf16":
        for parameter in model.parameters():  # buffers stay in fp32, as in DeepSpeed
            parameter.data = parameter.data.bfloat16()
    parameters = list(model.parameters())
    masters = [parameter.detach().float().clone() for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, **RATES)
    run = Run()
    for step in range(STEPS):
        loss = loss_of(model(**make_batch(step)))
        loss.backward()
        run.losses.append(loss.detach())
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        limit = clipping or float("inf")
        run.norms.append(torch.nn.utils.clip_grad_norm_(masters, limit).item())
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                parameter.copy_(master)
    run.weights = {name: value.detach().float() for name, value in model.named_parameters()}
    return run


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_twenty_steps_differ_from_torch_by_rounding_alone(clipping: float, precision: str) -> None:
    expected = train_with_torch(precision, clipping)
    settings = config(clipping=clipping, precision=precision, section={"window": 1})
    settings["optimizer"]["params"]["lr"] = RATES["lr"]
    run = train_windowed(llama, steps=STEPS, settings=settings)
    difference = sum(
        (run.weights[name].float() - weight).abs().sum().item()
        for name, weight in expected.weights.items()
    )
    mean = difference / sum(weight.numel() for weight in expected.weights.values())
    assert mean <= BOUND[precision] * STEPS * RATES["lr"]
    for loss, other in zip(run.losses, expected.losses, strict=True):
        assert abs(loss.item() - other.item()) <= LOSS_BOUND[precision]
    assert run.norms == pytest.approx(expected.norms, rel=1e-5 if precision == "fp32" else 2e-2)
