"""Optax: a MaskedNode stands for a missing value. Its states are named tuples, which open by themselves."""

from __future__ import annotations

import optax

from cowalk.tree.kinds import NOTHING, set_kind

set_kind(optax.MaskedNode, NOTHING)
