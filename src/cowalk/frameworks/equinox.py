"""Equinox: a module's children are its dynamic fields, functions among them; static fields are carried along.

JAX's registration of modules says the same. Opening them as records is faster, and a field that is not set is no child
(Equinox's own flattening has a placeholder there).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx

from cowalk.frameworks import jax
from cowalk.frameworks.framework import Framework, add_framework
from cowalk.tree.kinds import Kind, add_finder
from cowalk.tree.records import record


def _find_module(cls: type) -> Kind | None:
    if not issubclass(cls, eqx.Module):
        return None
    fields: Any = dataclasses.fields(cls)
    return record(cls, tuple(field.name for field in fields if not field.metadata.get("static", False)), frozen=True)


add_finder(_find_module)


def _owns(model: Any) -> bool:
    return isinstance(model, eqx.Module) and jax.owns(model)


add_framework(Framework("Equinox", _owns, jax.differentiate, is_pure_jax=True))
