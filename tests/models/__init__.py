"""A zoo of tiny models: every shape of module, parameter and call that the runtime must survive.

`MODELS[name](**options)` returns `(model, make_batch)`: a float32 model in train mode, seeded, and
a function that turns a seed into the keyword arguments of one call, so that
`loss_of(model(**make_batch(seed)))` is a scalar loss. Nothing here touches the global random state
except by running a model with dropout.
"""

from tests.models import calls, families, parameters, toys  # noqa: F401 - they register their models
from tests.models.base import (
    HIDDEN,
    HUGGING_FACE,
    LENGTH,
    MODELS,
    PLAIN,
    TOYS,
    VOCAB,
    Block,
    Decoder,
    loss_of,
    token_batch,
    without_caches,
)

__all__ = [
    "HIDDEN",
    "HUGGING_FACE",
    "LENGTH",
    "MODELS",
    "PLAIN",
    "TOYS",
    "VOCAB",
    "Block",
    "Decoder",
    "loss_of",
    "token_batch",
    "without_caches",
]
