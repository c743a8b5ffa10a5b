"""Deferred updates: which layers are updated while the next forward runs, not in backward.

Pure arithmetic on sizes and seconds; any thread.

[Note: deferred updates] Where nothing holds updates back (no clipping, no overflow check) gradients
come in the order L..1, and the next forward needs weights in the order 1..L. Updated as they come,
a step takes max(B, D) + F, for a forward of F seconds, a backward of B and updates of D (of the
disk or the CPU, whichever takes longer): in forward nothing is left to update. So gradients of some
layers are held, and these are updated after backward, in forward order, while forward runs; each
fetch waits for its layer's update, as always. With a share f of the updates deferred, evenly over
the depth, a step takes

    max(B, (1 - f) D) + max(F, f D)

which is max(F + B, D), the least there can be, for f = 1 - B / D where D is at most F + B, and
from F / D to 1 - B / D beyond. Evenly, because layer i can be updated from B i / L before the end
of backward to F i / L after it: these spans lie in each other, and of the layers below any depth
backward takes its share and forward the rest. The lower ones have the least time: early ones among
them are updated last in backward, deferred ones first in forward.

States of a layer's gradients in a step, where updates are not held back:
  early     drained into the ring -> updated when drained
  deferred  drained into the layer's own entry, norms taken -> (backward ends) -> updated
A layer called twice is deferred too, in an entry made for it. Races, and what prevents them:
  * the entry is filled again while it is read  -> the drain waits for the update
  * Adam writes weights that a fetch reads      -> the update waits for the layer's last fetch as of
                                                   the end of backward
  * the update reads what has not drained       -> it waits for the norms, and they for the drain
  * a fetch reads weights of the step before    -> `updated` is the deferred update from the end of
                                                   backward on, before anything else is fetched
  * backward fails                              -> what was deferred is dropped with its gradients
Which layers are deferred never changes a bit: the same gradients, the same numbers of Adam.
"""

from __future__ import annotations

from collections.abc import Sequence

from stronghold.model.layout import LayerLayout


def spread(layers: Sequence[LayerLayout], count: int) -> frozenset[int]:
    """The indices of `count` of `layers` (all where there are fewer), evenly over their bytes."""
    trained = [layer for layer in layers if layer.trainable_numel]
    count = min(count, len(trained))
    total = sum(layer.trainable_numel for layer in trained)
    chosen: list[int] = []
    below = 0
    for position, layer in enumerate(trained):
        below += layer.trainable_numel
        # The middle of each of `count` equal parts; as many as are left, where layers are uneven.
        due = count * below >= (len(chosen) + 0.5) * total
        if len(chosen) < count and (due or len(trained) - position == count - len(chosen)):
            chosen.append(layer.index)
    return frozenset(chosen)


def shares(*, forward_s: float, backward_s: float, updates_s: float) -> tuple[float, float]:
    """The least and the largest share f for which a step takes the least ([Note: deferred
    updates]); both 0 where backward hides the updates.
    """
    if updates_s <= backward_s:
        return 0.0, 0.0
    within = 1.0 - backward_s / updates_s
    return min(within, forward_s / updates_s), within


def update_order(num_layers: int, *, early: bool, deferred: frozenset[int]) -> list[int]:
    """Layers in the order of their updates. `early`: they do not wait for the end of backward,
    unless they are `deferred`."""
    if not early:
        return list(range(num_layers))
    at_once = [layer for layer in reversed(range(num_layers)) if layer not in deferred]
    return [*at_once, *sorted(deferred)]
