"""Parameters as a program sees them outside of calls: hidden until it looks.

[Note: places of a parameter]
1. In use: while its layer runs, forward or backward, it points at the layer's slot.
2. Hidden: it points at the host, where an update or a save may be under way. It is of a subclass of
   its class, as torch's `UninitializedParameter` is until it has values.
3. Seen: torch calls `__torch_function__` of that subclass for every operation. The first one that
   needs values waits for the layer's operations, and the layer's parameters have their class back.
   The program may read and write them now.
4. What is written is used: when the layer is used next, updated or saved, the host's weights are
   the truth, and those on the device are fetched again (`Weights.refresh`).
5. Then the layer is hidden again. So every read waits, and every write is noticed, without a count
   of aliases. But whoever keeps an alias (`p.data`, a view) over a pass or a step asks nobody: it
   must call `engine.synchronize()` before it uses the alias.

[Note: .data] Torch counts writes in a version that all aliases share, but for those of `.data`.
While an engine lives, `.data` of its parameters returns an alias that shares the version, too: a
layer's forward that writes into its slot, where nothing is kept, is noticed by the version.

[Note: another thread]
1. A thread that looks while another one trains would take the layer's state out of its hands. It is
   refused. So is a forked child.
2. What is seen asks nothing: another thread may see the values of two steps, as in plain PyTorch.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stronghold.devices.lane_name import LaneName
from stronghold.streaming.patches.autograd import without_torch_function
from stronghold.streaming.patches.replacements import Replacements
from stronghold.streaming.patches.tensors import tree_leaves
from stronghold.streaming.training_thread import TrainingThread
from stronghold.train.layer import Layer

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


# Identities of the parameters of all engines, and the name that is replaced for them.
_counted: set[int] = set()
_replacements = Replacements()


def _counting_data(data: Any) -> property:
    """`torch.Tensor.data`, whose writes are counted ([Note: .data])."""

    def read(parameter: nn.Parameter) -> Tensor:
        is_counted = id(parameter) in _counted
        alias: Tensor = parameter.detach() if is_counted else data.__get__(parameter)
        return alias

    return property(read, data.__set__, doc=data.__doc__)


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

    def __deepcopy__(self, memo: Any) -> Any:
        self.visible.look(self)
        return copy.deepcopy(self, memo)  # it has its own class now

    def __copy__(self) -> Any:
        self.visible.look(self)
        return copy.copy(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.visible.look(self)
        return self.__reduce_ex__(protocol)


class Visible:
    """Hides the parameters of a model's layers, and shows them."""

    def __init__(self, layers: Sequence[Layer], thread: TrainingThread) -> None:
        self._layers, self._thread = layers, thread
        self._layer_of = {id(p): layer for layer in layers for p in layer.parameters}
        # Of each layer those that can be hidden, with both classes. The bytes of a quantised weight
        # are frozen, in classes of libraries, and written by these alone.
        self._classes: dict[Layer, list[tuple[Any, type, type]]] = {}
        hidden: dict[type, type] = {}
        for layer in layers:
            kinds = [(p, type(p)) for p in layer.parameters]
            own = [
                (parameter, kind)
                for k, (parameter, kind) in enumerate(kinds)
                if k < layer.num_trained or kind is nn.Parameter
            ]
            for _, kind in own:
                if kind not in hidden:
                    hidden[kind] = self._make_hidden_class(kind)
            self._classes[layer] = [(parameter, kind, hidden[kind]) for parameter, kind in own]
        _counted.update(self._layer_of)
        _replacements.put(nn.Parameter, "data", _counting_data)

    def hide(self, layer: Layer) -> None:
        """Let the next look at a parameter of the layer wait: its values are about to change, or
        are written to a file. `layer.is_seen` stays, until the writes of before are taken over."""
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
        """Give the parameters their own class back. The caller has waited for the values, or will
        not let them be read."""
        for parameter, shown, _ in self._classes[layer]:
            parameter.__class__ = shown

    def look(self, parameter: Tensor) -> None:
        """The program needs the values of a hidden parameter, or writes them. Waits for the layer's
        operations, and raises what they have raised.

        ConfigError in another thread than the one that trains, and in a forked child."""
        layer = self._layer_of[id(parameter)]
        self._thread.check(f"reading {layer.name}")
        for fence in layer.weight_record.users:  # a save reads
            # What the device updates stays there, and the program's operations come behind.
            if not (layer.is_on_gpu and fence.lane is LaneName.COMPUTE):
                fence.wait()
        layer.is_seen = True  # first: an interrupt may come before all are shown
        self.show(layer)

    def see_all(self) -> None:
        """Wait for the operations of all layers. The program may use what it has kept of any
        parameter."""
        for layer in self._layers:
            layer.weight_record.wait()
            layer.is_seen = True

    def close(self) -> None:
        """Give every parameter its own class and `.data` back."""
        for layer in self._layers:
            self.show(layer)
        _counted.difference_update(self._layer_of)
        if not _counted:
            _replacements.undo()
