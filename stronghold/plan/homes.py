"""Homes: the tier in which each array of each layer lies between two operations (its placement).

Pure data; any thread. A plan chooses the homes. A kernel runs on the lane of the home of a layer's
weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from stronghold.model.layout import LayerLayout, ModelLayout, Range, file_order
from stronghold.optim.states import Formats


@dataclass(frozen=True, slots=True)
class Home:
    """A tier of memory that can hold arrays.

    `is_staged`: no kernel can address it. The engine loads an array's pieces from there to the
    host, and spills the pieces that an update changed.
    """

    name: str
    is_staged: bool = False

    def __str__(self) -> str:
        return self.name


GPU = Home("gpu")
HOST = Home("host")
FILE = Home("file", is_staged=True)

Row = tuple[tuple[str, Home], ...]
"""One layer's arrays that do not lie on the host, each with its home. The order is that of
`model.layout.file_order`."""


@dataclass(frozen=True, slots=True, repr=False)
class Homes:
    """The home of every array: `homes[layer, array]`.

    `rows[layer]` lists the layer's arrays that are not on the host. All other arrays are at `HOST`,
    and so are all arrays of a layer behind the last row. `on_gpu` holds the indices of the layers
    whose weights are on the GPU.
    """

    rows: tuple[Row, ...] = ()
    on_gpu: frozenset[int] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        on_gpu = [layer for layer, row in enumerate(self.rows) if ("weights", GPU) in row]
        object.__setattr__(self, "on_gpu", frozenset(on_gpu))

    def __getitem__(self, key: tuple[int, str]) -> Home:
        layer, array = key
        for name, home in self.row(layer):
            if name == array:
                return home
        return HOST

    def __repr__(self) -> str:
        layers_of: dict[str, list[int]] = {}
        for index, row in enumerate(self.rows):
            for array, home in row:
                layers_of.setdefault(f"{array} {home}", []).append(index)
        entries = [f"{placement} {layers}" for placement, layers in layers_of.items()]
        return f"<homes: {', '.join(entries)}>"

    def row(self, layer: int) -> Row:
        """The layer's row; empty if all of its arrays are on the host."""
        return self.rows[layer] if layer < len(self.rows) else ()

    def arrays(self, layer: int, home: Home) -> tuple[str, ...]:
        """Names of the layer's arrays at `home`, which is not the host."""
        return tuple(array for array, placed in self.row(layer) if placed == home)

    def named(self, home: Home) -> frozenset[str]:
        """Names of the arrays that lie at `home` in any layer."""
        names: set[str] = set()
        for layer in range(len(self.rows)):
            names.update(self.arrays(layer, home))
        return frozenset(names)

    def staged(self, layer: int) -> tuple[str, ...]:
        """Names of the layer's arrays that pass the host in pieces. Their order never changes."""
        return tuple(array for array, home in self.row(layer) if home.is_staged)

    def replaced(
        self, old: Home, new: Home, which: Collection[tuple[int, str]] | None = None
    ) -> Homes:
        """A copy of these homes with `new` in the place of `old`.

        `which` lists the (layer, array) pairs to move; None: all of them.
        """
        rows: list[Row] = []
        for layer, row in enumerate(self.rows):
            moved: list[tuple[str, Home]] = []
            for array, home in row:
                is_chosen = which is None or (layer, array) in which
                moved.append((array, new if home == old and is_chosen else home))
            rows.append(_without_host(moved))
        return Homes(tuple(rows))


def _without_host(row: Sequence[tuple[str, Home]]) -> Row:
    return tuple((array, home) for array, home in row if home != HOST)


def owners(trained_bytes: Sequence[int], num_ranks: int) -> list[int]:
    """The owner of each layer: the largest first, each to the rank with the fewest bytes so far."""
    owner, loads = [0] * len(trained_bytes), [0] * num_ranks
    for k in sorted(range(len(owner)), key=lambda k: -trained_bytes[k]):
        owner[k] = loads.index(min(loads))
        loads[owner[k]] += trained_bytes[k]
    return owner


def make_homes(
    layout: ModelLayout,
    formats: Formats,
    *,
    on_gpu: Collection[int] = (),
    staged: Sequence[Collection[str]] = (),
    like: Homes | None = None,
) -> Homes:
    """Choose the home of every array of a model.

    All arrays of the layers in `on_gpu` are on the GPU. `staged[i]` names the arrays of layer i
    that are staged: each has the home that it has in `like`, or `FILE` without `like`. All other
    arrays are on the host.
    """
    # layers with equal ranges are alike
    orders: dict[tuple[Range, ...], tuple[str, ...]] = {}
    rows: list[Row] = []
    for layer in layout.layers:
        if layer.ranges not in orders:
            orders[layer.ranges] = file_order(layer, formats)
        order = orders[layer.ranges]
        if layer.index in on_gpu:
            rows.append(tuple((array, GPU) for array in order))
            continue
        names = staged[layer.index] if layer.index < len(staged) else ()
        present = (array for array in order if array in names)
        rows.append(tuple(_staged_row(layer, present, like)))
    return Homes(tuple(rows))


def _staged_row(
    layer: LayerLayout, arrays: Iterator[str], like: Homes | None
) -> Iterator[tuple[str, Home]]:
    """Each of the layer's staged arrays with its home."""
    for array in arrays:
        yield array, FILE if like is None else like[layer.index, array]
