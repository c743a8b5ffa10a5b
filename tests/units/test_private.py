"""Names of other packages: the table of `stronghold.private` has each, and torch does with them
what the engine relies on."""

from __future__ import annotations

import ast
import re
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from stronghold import private
from tests.units.test_rooms import SOURCES, dotted

# Private by an underscore, and documented for everybody.
DOCUMENTED = {"_exit", "_replace", "_fields", "_asdict", "_make", "_current_frames"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


# -- private names of other packages --------------------------------------------------------------
# Strings that look like private names and are none: the built kernels' folder, a prefix of names.
ONLY_TEXT = {"_native", "_forward_"}


def names_of_ours() -> set[str]:
    """Private names that the package gives to its functions, classes, attributes and variables."""
    names = set(ONLY_TEXT)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.update([node.attr] if dotted(node.value) in ("self", "cls") else [])
    return names


def private_words(path: Path) -> Iterator[tuple[str, bool]]:
    """Each private name in a file, and whether it is an attribute of `self` or `cls`: attributes,
    imports, and strings that are a name (`getattr(x, "_name")`, `vars(x)["_name"]`)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        words: list[str] = []
        if isinstance(node, ast.Attribute):
            words = [node.attr]
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            words = [
                word for alias in node.names for word in f"{node.module}.{alias.name}".split(".")
            ]
        elif isinstance(node, ast.Import):
            words = [word for alias in node.names for word in alias.name.split(".")]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = [node.value] if id(node) not in texts and node.value.isidentifier() else []
        is_own = isinstance(node, ast.Attribute) and dotted(node.value) in ("self", "cls")
        yield from ((word, is_own) for word in words if is_private(word))


def test_every_private_name_stands_in_the_table() -> None:
    table = set(re.findall(r"\b_(?!_)\w+", private.__doc__))
    objects = [torch.ones(1), nn.Linear(1, 1), torch.ones(1).untyped_storage()]
    theirs = table.union(name for thing in objects for name in dir(thing) if is_private(name))
    ours = names_of_ours()
    used = {
        (word, path.name)
        for path in SOURCES
        for word, is_own in private_words(path)
        if word not in ours or (word in theirs and not is_own)
    }
    assert {(word, file) for word, file in used if word not in table} == set(), "not in the table"
    code = "".join(path.read_text(encoding="utf-8") for path in SOURCES).replace(
        private.__doc__, ""
    )
    assert [word for word in table if word not in code] == [], "nothing uses it"


# -- versions -------------------------------------------------------------------------------------
def test_every_pinned_version_was_tried() -> None:
    pins = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8")
    pinned = dict(line.split(" ;")[0].split("==") for line in pins.splitlines() if "==" in line)
    assert private.untried_versions(private.TRIED, pinned.__getitem__) == []


def test_an_untried_version_is_one_phrase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(private.TRIED, "torch", ("2.11.0", "2.13.1"))

    def phrase(version: str) -> list[str]:
        return private.untried_versions(["torch"], lambda _: version)

    assert phrase("2.11.3+cu129") == phrase("2.12.0") == phrase("2.13.9") == []
    assert phrase("2.14.0.dev1") == ["torch 2.14.0.dev1 (tried: 2.11.0 to 2.13.1)"]
    assert phrase("2.9") == ["torch 2.9 (tried: 2.11.0 to 2.13.1)"]


# -- what the engine relies on --------------------------------------------------------------------
def test_running_node() -> None:
    weight = torch.ones(1, requires_grad=True)
    other = torch.ones(1, requires_grad=True)
    result = weight * other
    executed: list[bool] = []

    def look(_: torch.Tensor) -> None:
        node = private.running_node()
        assert node.name() == "MulBackward0"
        leaves = [behind for behind, _ in node.next_functions]
        assert leaves[0].variable is weight
        assert leaves[1].variable is other
        for leaf in leaves:
            try:
                executed.append(private.will_execute(leaf))
            except RuntimeError:
                executed.append(False)

    result.register_hook(look)
    torch.autograd.grad(result, weight, retain_graph=True)
    assert executed == [False, False]
    executed.clear()
    result.backward()
    assert executed == [True, True]


def test_end_of_backward() -> None:
    order = []
    weight = torch.ones(1, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda _: order.append("gradient"))
    result = weight * 1.0
    result.register_hook(lambda _: private.at_end_of_backward(lambda: order.append("end")))
    result.backward()
    assert order == ["gradient", "end"]
    with pytest.raises(RuntimeError):
        private.at_end_of_backward(lambda: None)


def test_saved_tensor_hooks() -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    outer, inner = (pack, pack), (pack, lambda packed: packed)
    assert private.saved_tensor_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(*outer):
        assert private.saved_tensor_hooks() == outer
        torch.autograd.graph.saved_tensors_hooks(*inner).__enter__()  # and never its exit
        assert private.saved_tensor_hooks() == inner
        private.pop_saved_tensor_hooks_above(outer)
        assert private.saved_tensor_hooks() == outer
    assert private.saved_tensor_hooks() is None


def test_transforms() -> None:
    inside = []

    def function(given: torch.Tensor) -> torch.Tensor:
        inside.append(private.is_transformed())
        return given.sin().sum()

    def with_hooks(given: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            return function(given)

    assert not private.is_transformed()
    torch.func.grad(function)(torch.ones(2))
    torch.func.vmap(function)(torch.ones(2, 2))
    assert inside == [True, True]
    with pytest.raises(RuntimeError, match="support saved tensor hooks"):
        torch.func.grad(with_hooks)(torch.ones(2))
    assert not private.is_transformed()


def test_aliases() -> None:
    slot = torch.ones(8)
    address = slot.untyped_storage()._cdata

    def count() -> int:
        return torch._C._storage_Use_Count(address)

    alone = count()
    views = [slot[2:], slot.detach(), slot.numpy()]
    assert count() == alone + 3
    del views[:]
    assert count() == alone
    weight = nn.Parameter(torch.ones(1))
    weight.data = slot[:1]
    assert count() == alone + 1


def test_own_storage() -> None:
    slot = torch.arange(8.0)
    piece = slot[2:4]
    view = private.with_own_storage(piece)
    assert view.data_ptr() == piece.data_ptr()
    assert view.untyped_storage().nbytes() == view.nbytes == 8
    address = view.untyped_storage()._cdata
    before = torch._C._storage_Use_Count(address)
    more = slot[:1]
    assert torch._C._storage_Use_Count(address) == before
    view.add_(1.0)
    assert slot.tolist() == [0.0, 1.0, 3.0, 4.0, 4.0, 5.0, 6.0, 7.0]
    del slot, piece, more
    assert view.tolist() == [3.0, 4.0]


def test_one_storage_object() -> None:
    tensor = torch.ones(4, device="meta")
    identity = id(tensor.untyped_storage())
    assert id(tensor[1:].untyped_storage()) == identity == id(tensor.untyped_storage())
    assert id(torch.ones(4, device="meta").untyped_storage()) != identity
    ended: list[int] = []
    reference = weakref.ref(tensor.untyped_storage(), lambda _: ended.append(1))
    assert reference() is not None
    view = tensor[1:]
    del tensor
    assert ended == []
    del view
    assert ended == [1]


def test_gradient_hooks() -> None:
    weight, order = nn.Parameter(torch.ones(1)), []
    assert not weight._backward_hooks
    assert private.hooks_after_gradient(weight) == {}
    one, two = (
        weight.register_post_accumulate_grad_hook(lambda _, number=number: order.append(number))
        for number in (1, 2)
    )
    hooks = private.hooks_after_gradient(weight)
    assert list(hooks) == [one.id, two.id]
    hooks[one.id] = hooks.pop(one.id)
    weight.sum().backward()
    assert order == [2, 1]
    one.remove()
    assert list(private.hooks_after_gradient(weight)) == [two.id]
    handle = weight.register_hook(lambda gradient: gradient)
    assert len(weight._backward_hooks) == 1
    handle.remove()
    assert not weight._backward_hooks


# -- replacements ---------------------------------------------------------------------------------
def test_a_name_is_replaced_once_and_given_back() -> None:
    class Base:
        def number(self) -> int:
            return 1

    class Owner(Base):
        pass

    replacements = private.Replacements()
    for _ in range(2):
        replacements.wrap(Owner, "number", lambda original, owner: 10 + original(owner))
    assert Owner().number() == 11
    replacements.undo()
    assert "number" not in vars(Owner)
    assert Owner().number() == 1


def test_a_wrapper_of_another_package_stays() -> None:
    class Owner:
        @staticmethod
        def number() -> int:
            return 1

    replacements = private.Replacements()
    replacements.wrap(Owner, "number", lambda original: 10 + original())
    inner = Owner.number
    Owner.number = staticmethod(lambda: 100 + inner())  # type: ignore[method-assign]
    replacements.undo()
    assert Owner.number() == 111
