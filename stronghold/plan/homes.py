"""Homes: where each array of each layer lies between two operations.

Pure. A plan chooses them, `memory` has one store for each, and kernels run on the lane of the home
of a layer's weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from stronghold.model.arrays import file_order
from stronghold.model.layout import ModelLayout, Range
from stronghold.optim.states import Formats


@dataclass(frozen=True, slots=True)
class Home:
    """A place for arrays. `is_staged`: a kernel cannot address it, so that arrays are loaded to
    the host in pieces, and spilled from there when a piece was changed."""

    name: str
    is_staged: bool = False

    def __str__(self) -> str:
        return self.name


GPU = Home("gpu")
HOST = Home("host")
FILE = Home("file", is_staged=True)

Row = tuple[tuple[str, Home], ...]
"""Of one layer: the arrays that do not lie on the host, in the order of `model.arrays.file_order`,
each with its home."""


@dataclass(frozen=True, slots=True, repr=False)
class Homes:
    """`homes[layer, array]` is where the array lies: `HOST`, unless the layer's row has another
    home. A layer behind the last row has all of its arrays on the host."""

    rows: tuple[Row, ...] = ()
    on_gpu: frozenset[int] = field(init=False, compare=False)  # layers whose weights are there

    def __post_init__(self) -> None:
        on_gpu = frozenset(i for i, row in enumerate(self.rows) if ("weights", GPU) in row)
        object.__setattr__(self, "on_gpu", on_gpu)

    def __getitem__(self, key: tuple[int, str]) -> Home:
        layer, array = key
        for name, home in self.row(layer):
            if name == array:
                return home
        return HOST

    def __repr__(self) -> str:
        numbers: dict[str, list[int]] = {}
        for index, row in enumerate(self.rows):
            for array, home in row:
                numbers.setdefault(f"{array} {home}", []).append(index)
        return f"<homes: {', '.join(f'{what} {layers}' for what, layers in numbers.items())}>"

    def row(self, layer: int) -> Row:
        return self.rows[layer] if layer < len(self.rows) else ()

    def arrays(self, layer: int, home: Home) -> tuple[str, ...]:
        """The layer's arrays that lie at `home`, which is not the host."""
        return tuple(array for array, at in self.row(layer) if at == home)

    def named(self, home: Home) -> frozenset[str]:
        """The names of the arrays that lie at `home` of any layer."""
        return frozenset(array for row in self.rows for array, at in row if at == home)

    def staged(self, layer: int) -> tuple[str, ...]:
        """The layer's arrays that pass the host in pieces, always in one order."""
        return tuple(array for array, home in self.row(layer) if home.is_staged)

    @property
    def staged_homes(self) -> tuple[Home, ...]:
        """The homes that need a store beside the host's memory and the GPU's."""
        homes = (home for row in self.rows for _, home in row if home.is_staged)
        return tuple(dict.fromkeys(homes))

    def replaced(
        self, old: Home, new: Home, which: Collection[tuple[int, str]] | None = None
    ) -> Homes:
        """The same, with `new` in the place of `old`: for the (layer, array) in `which`, or for
        all."""

        def replacing(layer: int, row: Row) -> Iterator[tuple[str, Home]]:
            for array, home in row:
                chosen = which is None or (layer, array) in which
                yield array, new if home == old and chosen else home

        rows = (replacing(layer, row) for layer, row in enumerate(self.rows))
        return Homes(tuple(tuple((a, at) for a, at in row if at != HOST) for row in rows))


ALL_ON_HOST = Homes()


def make_homes(
    layout: ModelLayout,
    formats: Formats,
    *,
    on_gpu: Collection[int] = (),
    staged: Sequence[Collection[str]] = (),
    like: Homes | None = None,
) -> Homes:
    """The homes of a model's arrays. Of the layers `on_gpu` all are on the GPU. Layer i has those
    that `staged[i]` names at the home that they have in `like`, or in files without it. All others
    are on the host."""
    orders: dict[tuple[Range, ...], tuple[str, ...]] = {}  # layers with equal ranges are alike
    rows: list[Row] = []
    for layer in layout.layers:
        index = layer.index
        if layer.ranges not in orders:
            orders[layer.ranges] = file_order(layer, formats)
        order = orders[layer.ranges]
        if index in on_gpu:
            rows.append(tuple((array, GPU) for array in order))
            continue
        names = staged[index] if index < len(staged) else ()
        present = (array for array in order if array in names)
        rows.append(tuple((a, FILE if like is None else like[index, a]) for a in present))
    return Homes(tuple(rows))
