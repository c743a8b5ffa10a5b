"""Views of a streamed layer's weights that autograd does not see: their memory is taken by other
layers. They are found and refused; what autograd sees, and copies, are right.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from stronghold.errors import ConfigError
from tests.models import HIDDEN, Block, Decoder, loss_of, token_batch
from tests.support.places import on_gpu
from tests.support.training import assert_identical, config, train_plain, train_windowed
from tests.support.twin import twin

POLICIES = ["keep", "offload", "recompute"]


class _ByAttribute(torch.autograd.Function):
    """What a kernel's author writes: the weight for backward is an attribute of the context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: str) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.weight = {
            "transposed": lambda: weight.t(),
            "detached": lambda: weight.detach(),
            "data": lambda: weight.data[2:].view(-1),
            "copied": lambda: weight.detach().clone(),
            "itself": lambda: weight,
        }[how]()
        ctx.how = how
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        weight = ctx.weight.t() if ctx.how == "transposed" else ctx.weight
        if ctx.how == "data":  # part of it
            weight = torch.cat([gradient.new_zeros(2, x.shape[-1]), weight.view(-1, x.shape[-1])])
        return gradient @ weight, gradient.flatten(0, 1).t() @ x.flatten(0, 1), None


class _Kernel(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(HIDDEN, HIDDEN))
        self.bias = nn.Parameter(torch.zeros(HIDDEN))
        self.how = how
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return x + getattr(self, f"_{self.how}", self._function)(x) + self.bias

    def _function(self, x: Tensor) -> Tensor:
        return _ByAttribute.apply(x, self.weight, self.how)

    def _linear(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.weight))

    def _hooked(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor):
            return self._linear(x)

    def _cpu(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return self._linear(x)

    def _copying(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor):
            return self._linear(x)

    def _closure(self, x: Tensor) -> Tensor:
        y, weight = self._linear(x), self.weight.detach()
        y.register_hook(lambda gradient: gradient * (1.0 + weight.mean()))
        return y

    def _remembered(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.weight.detach()
        return x @ self.kept

    def _cycle(self, x: Tensor) -> Tensor:
        ring: list[Any] = [self.weight.detach()]
        ring.append(ring)
        return self._linear(x)

    def _checkpointed(self, x: Tensor) -> Tensor:
        return checkpoint(self._half_used, x, self.weight.t(), use_reentrant=False)[0]

    def _half_used(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x @ weight), torch.tanh(x.sin() @ self.weight)

    def _given_out(self, x: Tensor) -> Tensor:
        self.kept = self._linear(x)
        return self.kept


class _Kernels(Block):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.kernel = _Kernel(how)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.kernel(x))


def factory_of(how: str) -> Any:
    def factory() -> Any:
        torch.manual_seed(0)
        return Decoder([_Kernels(how) for _ in range(3)]), token_batch

    return factory


# the graph lets go of them when backward has been there
RIGHT_IN_THEIR_STEP = ["hooked", "cpu"]
ALIASES = ["transposed", "detached", "data", "hooked", "closure", "remembered", "cpu"]


REFUSED = r"blocks\.0\.kernel\.weight: .*save_for_backward"


@pytest.mark.parametrize(
    ("how", "policy"),
    [
        # Under each policy the two that are most unlike; keep has them all.
        pytest.param(
            *(how, policy),
            marks=() if policy == "keep" or how in ("data", "closure") else pytest.mark.slow,
        )
        for how in ALIASES
        for policy in POLICIES
    ],
)
def test_a_view_of_weights_that_outlives_their_block_is_refused(how: str, policy: str) -> None:
    settings = config(section={"window": 2, "activations": policy})
    with pytest.raises(ConfigError, match=REFUSED):
        train_windowed(factory_of(how), steps=1, settings=settings)


@pytest.mark.parametrize("how", ALIASES)
def test_with_room_for_every_layer_a_view_may_live_until_the_step(how: str) -> None:
    """No slot changes hands before the step; a view that is held until then would be old."""
    settings = config(section={"window": 64, "activations": "keep"})
    if how in RIGHT_IN_THEIR_STEP:
        run = train_windowed(factory_of(how), steps=3, settings=settings)
        assert_identical(run, train_plain(factory_of(how), steps=3))
    else:
        with pytest.raises(ConfigError, match=REFUSED):
            train_windowed(factory_of(how), steps=3, settings=settings)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "how", ["copied", "itself", "copying", "cycle", "checkpointed", "given_out"]
)
def test_what_needs_no_view_is_right(how: str, policy: str) -> None:
    settings = config(section={"window": 2, "activations": policy})
    run = train_windowed(factory_of(how), steps=3, settings=settings)
    assert_identical(run, train_plain(factory_of(how), steps=3))


class Raising(Block):
    """Fails beside a view of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.fails, self.view = False, torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.view = view = self.norm1.weight.detach()
        if self.fails:
            self.view = torch.empty(0)
            raise ValueError(f"of the program, beside {len(view)} elements")
        self.view = torch.empty(0)
        return super().forward(x)


def test_the_frames_of_an_exception_may_keep_views() -> None:
    """As in a notebook, which keeps the last exception. Views of others are refused as before."""

    def factory() -> Any:
        torch.manual_seed(0)
        return Decoder([Raising() for _ in range(3)]), token_batch

    kept: list[Any] = []

    def fail(engine: Any, micro: int) -> None:
        if micro == 0:
            engine.module.blocks[1].fails = True
            with pytest.raises(ValueError, match="beside 16 elements") as raised:
                engine(**token_batch(5))
            kept.append(raised.value)
            engine.module.blocks[1].fails = False
        elif micro == 2:
            block = engine.module.blocks[0]
            block.mlp.register_forward_hook(lambda *_: kept.append(block.norm2.weight.detach()))
            with pytest.raises(ConfigError, match=r"blocks\.0\.norm2\.weight: "):
                engine.backward(loss_of(engine(**token_batch(6))))

    settings = config(section={"window": 1, "activations": "keep"})
    run = train_windowed(factory, steps=3, settings=settings, after=fail)
    assert isinstance(kept[0], ValueError)
    assert_identical(run, train_plain(factory, steps=3))


def test_a_view_in_a_forward_that_still_runs_is_refused() -> None:
    class Collecting(Decoder):
        def run(self, x: Tensor, input_ids: Tensor) -> Tensor:
            views = []
            for block in self.blocks:
                x = block(x)
                views.append(block.kernel.kept)
                block.kernel.kept = None
            return x

    def factory() -> Any:
        torch.manual_seed(0)
        return Collecting([_Kernels("remembered") for _ in range(3)]), token_batch

    settings = config(section={"window": 1, "activations": "keep"})
    with pytest.raises(ConfigError, match=REFUSED):
        train_windowed(factory, steps=1, settings=settings)


@pytest.mark.parametrize("how", ["transposed", "detached", "closure", "remembered"])
def test_a_view_of_a_resident_is_refused_when_newer_weights_come(how: str) -> None:
    section = {"resident_layers": "all", "resident_updates": "host"}
    with pytest.raises(ConfigError, match=REFUSED):
        train_windowed(factory_of(how), steps=2, settings=config(section=section))


@pytest.mark.parametrize("how", ["transposed", "detached", "hooked", "closure", "remembered"])
def test_views_of_weights_that_stay_are_right(how: str) -> None:
    run = train_windowed(factory_of(how), steps=3, settings=config(section=on_gpu("whole")))
    assert_identical(run, train_plain(factory_of(how), steps=3))


def test_backward_reads_through_an_alias_what_forward_had() -> None:
    """The part of the graph that was made first is the last in backward, after its layer's
    gradients: no value changes between."""
    with twin("gpt", clipping=0.0, early="all") as both:

        def objective(model: Any) -> Tensor:
            module = getattr(model, "module", model)
            alias = module.blocks[1].mlp.up.weight.data
            penalty = (module.embedding.weight @ alias.t()).square().mean()
            return loss_of(model(**both.make_batch(0))) + penalty

        for _ in range(2):
            both.backward(objective)
            both.step()


class SparseMap(nn.Module):
    """A map of few weights, which are the values of a sparse matrix."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout
        self.weight = nn.Parameter(0.3 * torch.randn(3 * HIDDEN))
        rows = torch.arange(HIDDEN).repeat_interleave(3)
        columns = (rows + torch.tensor([0, 2, 5]).repeat(HIDDEN)) % HIDDEN
        self.register_buffer("indices", torch.stack([rows, columns]))
        self.register_buffer("starts", 3 * torch.arange(HIDDEN + 1))

    def forward(self, x: Tensor) -> Tensor:
        size = HIDDEN, HIDDEN
        if self.layout == "coo":
            matrix = torch.sparse_coo_tensor(self.indices, self.weight, size)
        else:
            matrix = torch.sparse_csr_tensor(self.starts, self.indices[1], self.weight, size)
        return torch.sparse.mm(matrix, x.flatten(0, 1).t()).t().view_as(x)


class Sparse(Block):
    def __init__(self, layout: str) -> None:
        super().__init__()
        self.map = SparseMap(layout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.map(super().forward(x)).tanh()


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_sparse_tensor_of_a_weights_memory_is_made_again_for_backward(
    layout: str, policy: str
) -> None:
    def factory() -> Any:
        return Decoder([Sparse(layout) for _ in range(3)]), token_batch

    settings = config(accumulation=2, section={"window": 1, "activations": policy})
    run = train_windowed(factory, steps=3, settings=settings)
    assert_identical(run, train_plain(factory, steps=3, accumulation=2))
