"""Parameters as a program sees them outside of calls: hidden until it looks.

[Note: places of a parameter]
1. Bound: while its layer's forward or backward runs, it points at the layer's slot.
2. Hidden: it points at the host, where an update may write it, and a save may read it. Its class is
   a subclass of its own class, as torch's `UninitializedParameter` is until it has values.
3. Seen: torch calls `__torch_function__` of that subclass for every operation. The first one that
   needs values waits for the layer's operations. Then the layer's parameters have their own class
   again, and the program may read and write them.
4. `Weights.refresh` comes before the layer's next use, update or save. It takes over what was
   written, outdates the copy on the device, and hides the parameters. So a layer that is not seen
   is bound or hidden.
5. So every read waits, and every write is noticed, without a count of aliases.
6. Limit: a program may keep an alias (`p.data`, a view) over a pass or a step. No operation on the
   alias waits. The program calls `engine.synchronize()` first.

[Note: .data]
1. Torch counts writes in a version. All aliases share it, except those of `.data`.
2. Hazard: a layer's forward writes `weight.data`. That is its slot, and the write is lost.
3. So `.data` of an engine's parameters returns an alias that shares the version, and an assignment
   to it raises the version. The layer's hooks compare the version after each forward, and refuse
   the write.

[Note: set_] PEFT's adapters of fused experts parametrize weights in each forward, and restore them.
`torch.nn.utils.parametrize` sets a parameter to itself meanwhile (`p.set_(p)`). That changes no
value, and raises the version. So it does nothing to an engine's parameter.

[Note: .device]
1. Programs send a batch to the model: `batch.to(model.device)`. That is the device of its first
   parameter, mostly the embedding.
2. Its values rest on the host between two passes. So `.device` of a parameter outside of the blocks
   says where it computes.

[Note: another thread]
1. A look changes the state of a layer, which the training thread changes without a lock.
2. So a look of another thread is refused while one trains. So is one of a forked child.
3. An operation on a seen parameter is an ordinary one. Another thread may see values of two steps,
   as in plain PyTorch.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stronghold.devices.fences import LaneName
from stronghold.private import Replacements, without_torch_function
from stronghold.train.layer import Layer
from stronghold.train.quantised import replace_quantised
from stronghold.train.training_thread import TrainingThread

# Of a tensor: properties that an operation may read, ones that it may write, and methods. None of
# them needs values. A torch may lack some.
_READ = """
    _backward_hooks _grad _post_accumulate_grad_hooks _version device dtype grad grad_fn is_cpu
    is_cuda is_leaf is_meta is_mkldnn is_mps is_nested is_quantized is_sparse is_sparse_csr is_xpu
    itemsize layout name names nbytes ndim output_nr requires_grad retains_grad shape
"""
_WRITTEN = "_backward_hooks _grad _post_accumulate_grad_hooks grad requires_grad"
_CALLED = """
    __len__ dim element_size get_device is_complex is_contiguous is_floating_point is_pinned
    is_signed ndimension nelement numel register_hook register_post_accumulate_grad_hook
    requires_grad_ retain_grad size storage_offset stride
"""


def _of_tensors(names: str) -> list[Any]:
    return [getattr(Tensor, name) for name in names.split() if hasattr(Tensor, name)]


_WITHOUT_VALUES = frozenset(
    [attribute.__get__ for attribute in _of_tensors(_READ)]
    + [attribute.__set__ for attribute in _of_tensors(_WRITTEN)]
    + [*_of_tensors(_CALLED), torch.is_complex, torch.is_floating_point, torch.numel]
)


# Identities of the parameters of all engines, and the names that are replaced for them.
_counted: set[int] = set()
# By identity: where parameters outside of the blocks compute.
_devices: dict[int, torch.device] = {}
_replacements = Replacements()


def _counting_data(data: Any) -> property:
    """`torch.Tensor.data`, whose writes are counted ([Note: .data])."""

    def read(parameter: nn.Parameter) -> Tensor:
        is_counted = id(parameter) in _counted
        alias: Tensor = parameter.detach() if is_counted else data.__get__(parameter)
        return alias

    def write(parameter: nn.Parameter, values: Tensor) -> None:
        data.__set__(parameter, values)
        # Parameters of a library's class are frozen, and its own forward may assign to them, as
        # that of bitsandbytes' Linear8bitLt does. The next use points them at a slot again.
        if type(parameter) is nn.Parameter and id(parameter) in _counted:
            torch.autograd.graph.increment_version(parameter)

    return property(read, write, doc=data.__doc__)


def _where_it_computes(device: Any) -> property:
    """`torch.nn.Parameter.device` ([Note: .device])."""

    def read(parameter: Tensor) -> torch.device:
        found: torch.device = _devices.get(id(parameter)) or device.__get__(parameter)
        return found

    return property(read, doc=device.__doc__)


def _not_setting_to_itself(set_: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.nn.Parameter.set_` ([Note: set_])."""

    @functools.wraps(set_)
    def to(parameter: Tensor, *source: Any, **named: Any) -> Tensor:
        is_itself = len(source) == 1 and source[0] is parameter
        if is_itself and id(parameter) in _counted:
            return parameter
        return set_(parameter, *source, **named)

    return to


class Hidden(nn.Parameter):
    """The base of the classes of hidden parameters. `visible` has those of one model."""

    visible: ClassVar[Visible]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _WITHOUT_VALUES:
            with without_torch_function():
                return func(*args, **kwargs)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Hidden):
                leaf.visible.look(leaf)
        return func(*args, **kwargs)

    # A class may define these two in Python, and copy its class before an operation looks.
    def __deepcopy__(self, memo: Any) -> Any:
        self.visible.look(self)
        return copy.deepcopy(self, memo)

    def __copy__(self) -> Any:
        self.visible.look(self)
        return copy.copy(self)


class Visible:
    """Hides the parameters of a model's layers, and shows them."""

    def __init__(self, layers: Sequence[Layer], thread: TrainingThread) -> None:
        self._layers, self._thread = layers, thread
        self._layer_of = {id(p): layer for layer in layers for p in layer.parameters}
        # The parameters of each layer, with their own class and the hidden one. Other tensors of a
        # quantised weight are frozen, and their library alone writes them.
        self._classes: dict[Layer, list[tuple[Any, type, type]]] = {}
        self._outside = [
            parameter
            for layer in layers
            for parameter in ([] if layer.is_block else layer.parameters)
            if isinstance(parameter, nn.Parameter)
        ]
        hidden: dict[type, type] = {}
        for layer in layers:
            parameters = [p for p in layer.parameters if isinstance(p, nn.Parameter)]
            for kind in {type(parameter) for parameter in parameters} - hidden.keys():
                hidden[kind] = self._make_hidden_class(kind)
            self._classes[layer] = [(p, type(p), hidden[type(p)]) for p in parameters]
        _counted.update(self._layer_of)
        _replacements.put(nn.Parameter, "data", _counting_data)
        _replacements.put(nn.Parameter, "set_", _not_setting_to_itself)
        # Once for all models: a Function that is replaced twice has no `forward`.
        replace_quantised(_replacements, (p for layer in layers for p in layer.parameters))

    def set_device(self, device: torch.device | None) -> None:
        """Let parameters outside of the blocks say that they compute there. None: they say where
        their values are."""
        for parameter in self._outside:
            _devices.pop(id(parameter), None)
        if device is not None and device.type != "cpu":
            _devices.update((id(parameter), device) for parameter in self._outside)
            _replacements.put(nn.Parameter, "device", _where_it_computes)

    def hide(self, layer: Layer) -> None:
        """Let the next look at a parameter of the layer wait."""
        for parameter, _, hidden in self._classes[layer]:
            parameter.__class__ = hidden

    def _make_hidden_class(self, kind: Any) -> type:
        """A subclass that has the name of a library's class, which others know it by."""
        is_ordinary = kind is nn.Parameter
        bases = (Hidden,) if is_ordinary else (Hidden, kind)
        name = "HiddenParameter" if is_ordinary else kind.__name__
        own = {"__module__": __name__, "visible": self}
        hidden: type = type(kind)(name, bases, own)
        return hidden

    def show(self, layer: Layer) -> None:
        """Give the layer's parameters their own class back."""
        for parameter, shown, _ in self._classes[layer]:
            parameter.__class__ = shown

    def look(self, parameter: Tensor) -> None:
        """The program needs the values of a hidden parameter, or writes them. Waits for the layer's
        operations, and raises what they have raised.

        ConfigError in another thread than the one that trains, and in a forked child."""
        layer = self._layer_of[id(parameter)]
        self._thread.check(f"reading {layer.name}")
        for fence in layer.weight_record.users:  # the readers, too: a save is one
            # The program's own operations are queued behind those of compute.
            if not (layer.is_on_gpu and fence.lane is LaneName.COMPUTE):
                fence.wait()
        _note_look(layer)  # first: an interrupt may come before all are shown
        self.show(layer)

    def see_all(self) -> None:
        """Wait for the operations of all layers. All count as seen: the program may write through
        aliases that it has kept."""
        for layer in self._layers:
            layer.weight_record.wait()
            _note_look(layer)

    def close(self) -> None:
        """Give every parameter its own class back, and torch its names."""
        for layer in self._layers:
            self.show(layer)
        self.set_device(None)
        _counted.difference_update(self._layer_of)
        if not _counted:
            _replacements.undo()


def _note_look(layer: Layer) -> None:
    layer.num_looks += 1
    layer.is_seen = True
