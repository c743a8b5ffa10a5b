"""Laws of the host's slabs."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable, Iterator

import pytest
import torch

from stronghold.devices.emulated import EmulatedDevice
from stronghold.devices.pinned import HostPinning
from stronghold.memory.host import HostStore
from stronghold.memory.slab import HUGE_PAGE_BYTES, map_slab
from stronghold.memory.tiers import Tiers
from stronghold.model.layout import LayerLayout, ModelLayout, ParameterShape, layer_layout
from stronghold.optim.states import LOW_DTYPE
from tests.support.states import MOMENTS, adam_formats, view

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PAGE = mmap.PAGESIZE


class Remembering(HostPinning):
    """Remembers what is registered, and fails on what a real driver refuses."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def pin(self, tensor: torch.Tensor) -> None:
        assert tensor.numel() > 0
        assert tensor.data_ptr() not in self.pinned
        self.pinned[tensor.data_ptr()] = tensor.numel() * tensor.element_size()

    def unpin(self, tensor: torch.Tensor) -> None:
        del self.pinned[tensor.data_ptr()]


class PinningDevice(EmulatedDevice):
    """A device that remembers what is registered."""

    pinning: Remembering

    def __init__(self) -> None:
        super().__init__()
        self.pinning = Remembering()

    @property
    def pinned(self) -> dict[int, int]:
        return self.pinning.pinned


def layer(index: int, *shapes: tuple[int, ...], frozen: int = 0) -> LayerLayout:
    """A layer of these parameters, the last `frozen` of them frozen; aligned to 128, padded to
    2048."""
    parameters = [
        ParameterShape(
            name=f"layer{index}.p{position}", shape=shape, trainable=position < len(shapes) - frozen
        )
        for position, shape in enumerate(shapes)
    ]
    return layer_layout(parameters, index=index, name=f"layer{index}", streamed=index > 0)


LAYOUT = ModelLayout(
    layers=(
        layer(0, (1,), (3, 5), (17,)),
        layer(1, (4097,), (), (15, 1), frozen=1),
        layer(2, (64, 33), frozen=1),  # all frozen
        layer(3, (2048,)),
    )
)
NUMEL = sum(each.numel for each in LAYOUT.layers)
TRAINABLE = sum(each.trainable_numel for each in LAYOUT.layers)
LARGEST = max(each.trainable_numel for each in LAYOUT.layers)


Make = Callable[..., HostStore]


@pytest.fixture
def device() -> Iterator[PinningDevice]:
    device = PinningDevice()
    yield device
    device.close()


@pytest.fixture
def make_store(device: PinningDevice) -> Make:
    def make(
        dtype: torch.dtype = torch.bfloat16,
        *,
        hold: bool = False,
        accumulate: bool = False,
        ring_entries: int = 3,
    ) -> HostStore:
        return HostStore(
            LAYOUT,
            device,
            held=frozenset(layer.index for layer in LAYOUT.layers) if hold else frozenset(),
            accumulate=accumulate,
            ring_entries=0 if hold else ring_entries,
            tiers=Tiers(LAYOUT, adam_formats(dtype)),
        )

    return make


def parameters(index: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return [
        torch.randn(part.shape, generator=generator).to(dtype)
        for part in LAYOUT.layers[index].slices
    ]


def adopt_all(
    store: HostStore, dtype: torch.dtype = torch.float32, *, maps_ahead: bool = False
) -> None:
    for each in LAYOUT.layers:
        store.layers[each.index].parameters = parameters(each.index, dtype)
        store.adopt(each.index)
        if maps_ahead:
            store.map_ahead(each.index)


# -- slabs -------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int16, torch.uint8])
@pytest.mark.parametrize("numel", [1, 15, 17, 4097, 3 << 20])
def test_a_slab_is_zero_exact_and_begins_at_a_page(numel: int, dtype: torch.dtype) -> None:
    slab = map_slab(numel, dtype)
    assert (slab.shape, slab.dtype) == ((numel,), dtype)
    assert slab.untyped_storage().nbytes() == numel * dtype.itemsize
    assert slab.data_ptr() % PAGE == 0
    assert not slab.any()
    slab.fill_(1)


def test_an_empty_slab_has_no_mapping() -> None:
    assert map_slab(0, torch.float32).shape == (0,)


@pytest.mark.parametrize("nbytes", [1 << 28, (1 << 28) - PAGE, 1 << 29])
def test_slabs_lie_no_multiple_of_a_large_power_of_two_apart(nbytes: int) -> None:
    """Adam's streams would fall together: three times slower on some CPUs."""
    # a layer's arrays; never touched
    slabs = [map_slab(nbytes, torch.uint8) for _ in range(5)]
    addresses = [slab.data_ptr() for slab in slabs]
    for one, other in itertools.combinations(addresses, 2):
        # small ones may fall into gaps, at any distance
        assert (one - other) % (1 << 28)


def test_a_slab_lives_as_long_as_its_views() -> None:
    views = [map_slab(4097, torch.float32)[1:].fill_(float(k)) for k in range(50)]
    for k, flat in enumerate(views):
        assert torch.equal(flat, torch.full((4096,), float(k)))


def mapping_flags(address: int) -> list[str]:
    """VmFlags of the mapping that holds `address`, as the kernel tells them."""
    inside = False
    with open("/proc/self/smaps", encoding="ascii") as smaps:
        for line in smaps:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                begin, end = (int(part, 16) for part in first.split("-"))
                inside = begin <= address < end
            elif inside and first == "VmFlags:":
                return line.split()[1:]
    raise AssertionError("no such mapping")


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="the kernel tells no flags")
def test_a_slab_is_private_may_have_huge_pages_and_is_not_copied_by_a_fork() -> None:
    """Shared memory gets no huge pages by default; a fork's copy-on-write would double the host's
    bytes and move pinned pages away from the device."""
    slab = map_slab(2 * HUGE_PAGE_BYTES, torch.uint8)
    flags = mapping_flags(slab.data_ptr() + PAGE)
    assert "sh" not in flags
    assert "dc" in flags
    if os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        assert "hg" in flags


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="the kernel tells no maps")
def test_a_forked_child_unmaps_nothing_of_its_own() -> None:
    """The child inherits the object that unmaps a slab, but not the slab: its address must be taken
    by nobody else, and letting the object go must be harmless."""
    slab = map_slab(HUGE_PAGE_BYTES, torch.uint8)
    address = slab.data_ptr()
    child = os.fork()
    if child == 0:
        with open("/proc/self/maps") as maps:
            found = [line.split()[1] for line in maps if line.startswith(f"{address:x}-")]
        del slab
        os._exit(0 if found == ["---p"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not slab.any()


# -- weights -----------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_adopted_weights_are_the_models_cast_once(
    make_store: Make, dtype: torch.dtype, source: torch.dtype
) -> None:
    store = make_store(dtype)
    adopt_all(store, source)
    for state in store.layers:
        given = parameters(state.layout.index, source)
        for part, parameter in zip(state.layout.slices, given, strict=True):
            assert torch.equal(view(state, part), parameter.to(dtype))
            assert view(state, part).shape == part.shape
        padding = torch.ones(state.layout.numel, dtype=torch.bool)
        for part in state.layout.slices:
            padding[part.offset : part.offset + part.numel] = False
        assert not state.weights.view(dtype)[padding].any()


def test_adopting_copies_and_a_wrong_number_of_parameters_is_refused(make_store: Make) -> None:
    store = make_store(torch.float32)
    given = [torch.nn.Parameter(parameter) for parameter in parameters(0)]
    store.layers[0].parameters = given
    store.adopt(0)
    with torch.no_grad():
        given[1].zero_()
    assert view(store.layers[0], LAYOUT.layers[0].slices[1]).all()
    assert not store.layers[0].weights.requires_grad
    store.layers[0].parameters = given[:-1]
    with pytest.raises(ValueError):
        store.adopt(0)


def test_weights_alone_until_training(make_store: Make, device: PinningDevice) -> None:
    """A forward-only engine costs its weights."""
    store = make_store(torch.bfloat16, hold=True)
    adopt_all(store)
    assert store.allocated_bytes == 2 * NUMEL
    assert sorted(device.pinned.values()) == sorted(2 * each.numel for each in LAYOUT.layers)
    for state in store.layers:
        assert not state.arrays
    assert not store.training


# -- training ----------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["ring", "held", "accumulated"])
@pytest.mark.parametrize("maps_ahead", [False, True])
def test_training_adds_masters_moments_and_gradients_and_no_more(
    make_store: Make, device: PinningDevice, dtype: torch.dtype, mode: str, maps_ahead: bool
) -> None:
    store = make_store(dtype, hold=mode == "held", accumulate=mode == "accumulated")
    adopt_all(store, maps_ahead=maps_ahead)
    low = {torch.bfloat16: 2, torch.float16: 4, torch.float32: 0}[dtype]
    size = dtype.itemsize
    weights, masters_and_moments = NUMEL * size, TRAINABLE * (low + 8)
    ring = 3 * LARGEST * size
    mapped = device.first_touch.nbytes
    assert store.allocated_bytes == weights + mapped
    store.prepare_training()
    gradients = {"ring": ring, "held": TRAINABLE * size, "accumulated": TRAINABLE * 4 + ring}
    assert store.allocated_bytes == weights + masters_and_moments + gradients[mode]
    drained = {"ring": ring, "held": TRAINABLE * size, "accumulated": ring}
    # Registered: what transfers touch, and nothing else.
    assert sum(device.pinned.values()) == weights + drained[mode]
    assert mapped == (store.allocated_bytes - weights - (mode != "held") * ring) * maps_ahead
    before = store.allocated_bytes
    store.prepare_training()
    for _ in range(7):
        if mode != "held":
            store.ring_entry()
    assert store.allocated_bytes == before
    for state in store.layers:
        numel = state.layout.trainable_numel
        for name in MOMENTS if numel else ():
            assert state.maps[name].dtypes == (torch.float32,)
            assert state.arrays[name].nbytes == 4 * numel
            assert not state.arrays[name].any()
        assert ("low" in state.arrays) == (LOW_DTYPE[dtype] is not None and numel > 0)
        assert ("accumulated" in state.arrays) == (mode == "accumulated")
        assert ("gradients" in state.arrays) == (mode == "held" and numel > 0)


# -- masters -----------------------------------------------------------------------------------
def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 -> bf16, to nearest with ties away from zero, and the 16 bits that are left."""
    bits = master.view(torch.int32).to(torch.int64)
    upper = (bits + 0x8000) >> 16
    low = bits - (upper << 16)
    weight = (((upper + 0x8000) % 0x10000) - 0x8000).to(torch.int16).view(torch.bfloat16)
    return weight, low.to(torch.int16)


def test_a_bf16_master_is_exact_to_the_bit(make_store: Make) -> None:
    """Random finite bit patterns of either sign, subnormals, and both ties."""
    store = make_store(torch.bfloat16)
    adopt_all(store)
    store.prepare_training()
    state, part = store.layers[1], LAYOUT.layers[1].slices[0]
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (part.numel,), generator=generator).to(torch.int32)
    ties = [0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 1, 0x8000, 0x7FFF, 0, 0x007FFFFF]
    for k, tie in enumerate(ties):
        bits[2 * k] = tie
        bits[2 * k + 1] = tie - 2**31
    master = bits.view(torch.float32)
    # What rounds to infinity has no bf16 weight: the largest exponent is left out.
    master = torch.where((bits & 0x7F800000) >= 0x7F000000, torch.ones(()), master)
    weight, low = split(master)
    view(state, part).copy_(weight)
    view(state, part, "low").copy_(low)
    exact = store.access.master(1, part)
    assert torch.equal(exact.view(torch.int32), master.view(torch.int32))
    assert exact.shape == part.shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_master_begins_at_its_weight(make_store: Make, dtype: torch.dtype) -> None:
    store = make_store(dtype)
    adopt_all(store)
    for state in store.layers:
        state.weights.view(dtype)[0] = -0.0
    store.prepare_training()
    for state in store.layers:
        for part in state.layout.slices:
            if part.trainable:
                master = store.access.master(state.layout.index, part)
                weights = view(state, part)
                assert master.dtype is torch.float32
                assert master.shape == part.shape
                assert torch.equal(master.view(torch.int32), weights.float().view(torch.int32))
                before = master.clone()
                master.add_(1.0)  # a copy: the slabs are not touched
                assert torch.equal(store.access.master(state.layout.index, part), before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_written_from_outside_becomes_the_master(
    make_store: Make, dtype: torch.dtype
) -> None:
    store = make_store(dtype)
    adopt_all(store)
    store.prepare_training()
    state, part = store.layers[3], LAYOUT.layers[3].slices[0]
    if "low" in state.arrays:
        state.arrays["low"].fill_(7)
    view(state, part).fill_(-2.5)
    # in fp16 a weight that is not its master's rounding is the master
    if dtype is torch.bfloat16:
        assert not torch.equal(store.access.master(3, part), torch.full((2048,), -2.5))
    store.access.restart_master(3)
    assert torch.equal(store.access.master(3, part), torch.full((2048,), -2.5))


# -- life --------------------------------------------------------------------------------------
def test_close_unregisters_and_drops_and_views_keep_their_values(
    make_store: Make, device: PinningDevice
) -> None:
    store = make_store(torch.float32, hold=True)
    adopt_all(store)
    store.prepare_training()
    kept = view(store.layers[1], LAYOUT.layers[1].slices[0])
    store.close()
    assert device.pinned == {}
    for state in store.layers:
        assert state.weights.numel() == 0
        assert not state.arrays
    assert torch.equal(kept, parameters(1)[0])
    store.close()
