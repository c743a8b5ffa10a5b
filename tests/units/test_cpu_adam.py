"""Laws of `CPUAdam`: an ordinary optimizer, exact masters, state that saving keeps bit for bit."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from stronghold.errors import ConfigError
from stronghold.optim import states
from stronghold.optim.cpu_adam import CPUAdam

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (F32, BF16, F16)
SHAPES = ((1,), (15,), (17, 3), (4097,), (0,), ())


def parameters(dtype=F32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES
    ]


def set_gradients(params, step, dtype=None):
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        grad = torch.randn(param.shape, generator=generator)
        if dtype is not None:
            param.grad_dtype = dtype
        param.grad = grad.to(dtype or param.dtype)


def train(optimizer, params, steps, dtype=None):
    for step in steps:
        set_gradients(params, step, dtype)
        optimizer.step()


def masters(optimizer, params):
    out = []
    for param in params:
        if param.dtype == F32:
            out.append(param.detach())
        elif param.dtype == F16:
            out.append(optimizer.state[param]["low"])
        else:
            high = param.detach().view(torch.int16).int() << 16
            out.append((high + optimizer.state[param]["low"].int()).view(F32))
    return out


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("adamw", [True, False], ids=["adamw", "l2"])
def test_it_is_torchs_optimizer_up_to_rounding(adamw):
    ours, theirs = parameters(), parameters()
    kind = torch.optim.AdamW if adamw else torch.optim.Adam
    groups = [
        [{"params": params[:2], "lr": 1e-2}, {"params": params[2:], "weight_decay": 0.0}]
        for params in (ours, theirs)
    ]
    left = CPUAdam(groups[0], lr=1e-3, weight_decay=0.1, adamw_mode=adamw, num_threads=1)
    right = kind(groups[1], lr=1e-3, weight_decay=0.1)
    train(left, ours, range(20))
    train(right, theirs, range(20))
    # The bound of test_kernels: 20 steps of two roundings of |p| < 5, and of an update
    # below 4 lr with a relative error of 2^-20, for either side.
    bound = 2 * 20 * (2 * 2**-24 * 5 + 1e-2 * 4 * 2**-20)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_half_precision_parameters_train_their_exact_fp32_master(dtype):
    halves = parameters(dtype)
    wholes = [torch.nn.Parameter(param.detach().float()) for param in halves]
    left, right = CPUAdam(halves, num_threads=2), CPUAdam(wholes, num_threads=1)
    for step in range(10):
        set_gradients(halves, step)
        for half, whole in zip(halves, wholes, strict=True):
            whole.grad = half.grad.float()
        left.step()
        right.step()
    assert equal(masters(left, halves), [whole.detach() for whole in wholes])
    # lr 1e-3 is below a bf16 weight's resolution: without the master it would not move.
    assert not equal(masters(left, halves)[:4], [half.detach().float() for half in halves][:4])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
def test_gradients_of_any_dtype_are_read_as_they_are(dtype, grad_dtype):
    mixed, same = parameters(dtype), parameters(F32, seed=0)
    for whole, part in zip(same, mixed, strict=True):
        whole.data.copy_(part.detach())
    left, right = CPUAdam(mixed, num_threads=1), CPUAdam(same, num_threads=1)
    train(left, mixed, range(3), grad_dtype)
    for step in range(3):
        set_gradients(same, step, F32)
        for param in same:
            param.grad = param.grad.to(grad_dtype).float()
        right.step()
    assert equal(masters(left, mixed), [param.detach() for param in same])


@pytest.mark.parametrize("dtype", [*DTYPES, "lean"], ids=str)
def test_saving_loading_and_copying_change_no_bit(dtype):
    dtype, kind = (BF16, "lean") if dtype == "lean" else (dtype, "exact")
    straight, resumed = parameters(dtype), parameters(dtype)
    one = CPUAdam(straight, lr=1e-2, weight_decay=0.1, states=kind, num_threads=2)
    train(one, straight, range(6))

    first = CPUAdam(resumed, lr=1e-2, weight_decay=0.1, states=kind, num_threads=1)
    train(first, resumed, range(3))
    file = io.BytesIO()
    torch.save({"optimizer": first.state_dict(), "model": [p.detach() for p in resumed]}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = CPUAdam(fresh := parameters(dtype, seed=5), states=kind, num_threads=1)
    second.load_state_dict(saved["optimizer"])
    for param, value in zip(fresh, saved["model"], strict=True):
        param.data.copy_(value)
    twin = copy.deepcopy(second)
    for optimizer in (second, twin):
        params = optimizer.param_groups[0]["params"]
        train(optimizer, params, range(3, 6))
        assert equal([p.detach() for p in params], [p.detach() for p in straight])
        for mine, other in zip(params, straight, strict=True):
            expected = one.state[other]
            assert optimizer.state[mine].keys() == expected.keys()
            for name, value in expected.items():
                found = torch.as_tensor(optimizer.state[mine][name])
                assert torch.equal(found, torch.as_tensor(value)), name


@pytest.mark.parametrize(("dtype", "kind"), [(F32, "exact"), (BF16, "exact"), (BF16, "lean")])
def test_it_continues_from_torchs_state(dtype, kind):
    params = parameters(dtype)
    theirs = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)
    train(theirs, params, range(3))
    fresh = [torch.nn.Parameter(param.detach().clone()) for param in params]
    ours = CPUAdam(fresh, states=kind, num_threads=1)
    ours.load_state_dict(theirs.state_dict())
    train(theirs, params, range(3, 6))
    train(ours, fresh, range(3, 6))
    # Torch has no master: each of its three steps of 1e-2 rounds a bf16 weight to 8 bits.
    rtol, atol = (0, 1e-6) if dtype == F32 else (2**-6, 6e-3)
    for mine, other in zip(fresh, params, strict=True):
        assert torch.allclose(mine, other, rtol=rtol, atol=atol)
    assert ours.state[fresh[0]]["step"] == 6


def test_copies_and_pickles_step_on_their_own():
    params = parameters()
    optimizer = CPUAdam(params, num_threads=2)
    train(optimizer, params, range(2))
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        theirs = twin.param_groups[0]["params"]
        train(twin, theirs, [2])
        assert not torch.equal(theirs[3], params[3])
        assert twin.state[theirs[3]]["step"] == 3
        assert optimizer.state[params[3]]["step"] == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_layout_never_changes_a_bit(dtype):
    base = torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(3)).to(dtype)
    views = {
        "contiguous": base.clone(),
        "transposed": base.transpose(0, 2).contiguous().transpose(0, 2),
        "strided": torch.zeros(6, 8, 8, dtype=dtype)[..., ::2].copy_(base),
    }
    results = []
    for name, view in views.items():
        param = torch.nn.Parameter(view)
        optimizer = CPUAdam([param], lr=1e-2, num_threads=1)
        for step in range(3):
            grad = torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(step)).to(dtype)
            param.grad = grad.transpose(0, 2).contiguous().transpose(0, 2)
            optimizer.step()
        assert param.is_contiguous() == (name == "contiguous")
        results.append((param.detach().contiguous(), optimizer.state[param]["exp_avg"]))
    assert not torch.equal(results[0][0], base)
    assert all(equal(results[0], other) for other in results[1:])


def test_gaps_between_a_strided_parameters_elements_are_not_written():
    buffer = torch.full((4, 8), 7.0)
    param = torch.nn.Parameter(buffer[:, ::2])
    param.grad = torch.ones(4, 4)
    CPUAdam([param], num_threads=1).step()
    assert (buffer[:, 1::2] == 7.0).all()
    assert (buffer[:, ::2] != 7.0).all()


def test_parameters_without_gradient_are_skipped():
    params = parameters()
    optimizer = CPUAdam(params, weight_decay=0.1, num_threads=1)
    set_gradients(params[:1], 0)
    before = params[3].detach().clone()
    optimizer.step()
    assert torch.equal(params[3], before)
    assert params[3] not in optimizer.state
    assert optimizer.state[params[0]]["step"] == 1
    set_gradients(params, 1)
    optimizer.step()
    assert [optimizer.state[params[i]]["step"] for i in (0, 3)] == [2, 1]


def test_closure_runs_with_gradients_enabled_and_its_value_is_returned():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = CPUAdam([param], num_threads=1)

    def closure():
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert optimizer.step() is None


def test_parameters_can_be_added_later():
    first, late = parameters(), parameters(seed=1)
    optimizer = CPUAdam(first, num_threads=1)
    train(optimizer, first, [0])
    optimizer.add_param_group({"params": late, "lr": 0.5})
    train(optimizer, first + late, [1])
    assert optimizer.state[late[0]]["step"] == 1
    alone = CPUAdam(other := parameters(seed=1), lr=0.5, num_threads=1)
    generator_order = parameters() + other
    set_gradients(generator_order, 1)
    alone.step()
    assert equal([p.detach() for p in late], [p.detach() for p in other])


def test_learning_rate_schedulers_drive_it():
    params = parameters()
    optimizer = CPUAdam(params, lr=1e-2, num_threads=1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step > 0))
    before = params[3].detach().clone()
    train(optimizer, params, [0])
    assert torch.equal(params[3], before)
    scheduler.step()
    train(optimizer, params, [1])
    assert not torch.equal(params[3], before)


def test_maximize_is_the_step_along_the_negated_gradient():
    up, down = parameters(), parameters()
    train(CPUAdam(up, maximize=True, num_threads=1), up, [0])
    set_gradients(down, 0)
    for param in down:
        param.grad = -param.grad
    CPUAdam(down, num_threads=1).step()
    assert equal([p.detach() for p in up], [p.detach() for p in down])


def test_a_backward_through_updated_parameters_fails_loudly():
    param = torch.nn.Parameter(torch.ones(3))
    loss = (param**2).sum()
    param.grad = torch.ones(3)
    CPUAdam([param], num_threads=1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"amsgrad": True}, "CPUAdam: amsgrad is on"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"lr": -1.0}, "lr"),
        ({"eps": float("nan")}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"num_threads": 0}, "num_threads"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        CPUAdam(parameters(), **{"num_threads": 1, **arguments})


def test_parameters_that_cannot_be_updated_exactly_are_refused():
    overlapping = torch.nn.Parameter(torch.ones(1).expand(4))
    for param, message in (
        (overlapping, "overlap"),
        (torch.nn.Parameter(torch.ones(4, dtype=torch.float64)), "float64"),
        (torch.nn.Parameter(torch.ones(4, device="meta")), "meta"),
    ):
        with pytest.raises(ConfigError, match=message):
            CPUAdam([param], num_threads=1)


def test_a_sparse_gradient_is_refused_before_anything_is_updated():
    table = torch.nn.Embedding(4, 3, sparse=True)
    dense = torch.nn.Parameter(torch.ones(3))
    dense.grad = torch.ones(3)
    optimizer = CPUAdam([dense, *table.parameters()], num_threads=1)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse"):
        optimizer.step()
    assert torch.equal(dense, torch.ones(3))
    assert not optimizer.state


# ---- Lean states ------------------------------------------------------------------------------


def test_lean_states_are_decoded_into_exact_ones_and_encoded_back_without_loss():
    params = parameters(BF16)
    ours = CPUAdam(params, lr=1e-2, states="lean", num_threads=1)
    train(ours, params, range(4))
    exact = CPUAdam(same := [torch.nn.Parameter(p.detach().clone()) for p in params])
    exact.load_state_dict(ours.state_dict())
    for param, other in zip(params, same, strict=True):
        state, decoded = ours.state[param], exact.state[other]
        assert decoded["step"] == 4
        assert decoded["exp_avg"].dtype == F32
        expected = states.decode_signed(state["exp_avg"], state["exp_avg_scale"])
        assert torch.equal(decoded["exp_avg"], expected)
        expected = states.decode_root(state["exp_avg_sq"], state["exp_avg_sq_scale"])
        assert torch.equal(decoded["exp_avg_sq"], expected)
    expected = [states.join_master(p.detach(), ours.state[p]["low"]) for p in params]
    assert equal(masters(exact, same), expected)
    back = CPUAdam(again := [torch.nn.Parameter(p.detach().clone()) for p in params], states="lean")
    back.load_state_dict(exact.state_dict())
    for param, other in zip(params, again, strict=True):
        for name in ("low", "exp_avg", "exp_avg_sq"):
            assert torch.equal(back.state[other][name], ours.state[param][name])
        for name in ("exp_avg_scale", "exp_avg_sq_scale"):
            torch.testing.assert_close(
                back.state[other][name], ours.state[param][name], rtol=2**-21, atol=0
            )


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_lean_states_are_refused_for_other_weights_than_bf16(dtype):
    with pytest.raises(ConfigError, match="lean states are a layout of bfloat16"):
        CPUAdam(parameters(dtype), states="lean", num_threads=1)
    with pytest.raises(ConfigError, match=r"states: got 'leen'.*Did you mean \"lean\""):
        CPUAdam(parameters(BF16), states="leen", num_threads=1)


def test_lean_states_take_5_bytes_and_an_eighth():
    param = torch.nn.Parameter(torch.zeros(4096, dtype=BF16))
    param.grad = torch.ones_like(param)
    optimizer = CPUAdam([param], states="lean", num_threads=1)
    optimizer.step()
    kept = [value for value in optimizer.state[param].values() if torch.is_tensor(value)]
    assert sum(value.nbytes for value in kept) + param.nbytes == 4096 * 5.125
