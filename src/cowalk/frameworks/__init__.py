"""One file a framework: how its types open, what is numeric, trainable and missing in it, how it differentiates.

A file here is loaded when its framework is already imported and an object arrives whose type nobody knows yet.
"""

from __future__ import annotations

import importlib
from functools import partial

from cowalk.tree.kinds import load_imported, on_import

for _module in ("numpy", "torch", "jax", "equinox", "flax", "flax.nnx", "optax", "haiku", "keras", "optree"):
    _file = _module.rpartition(".")[2]
    on_import(_module, partial(importlib.import_module, f"cowalk.frameworks.{_file}"))

load_imported()  # frameworks that are there already: a first walk inside of torch.compile could not import anything
