"""Accumulators in files, to go on from after a stop or to bring together from several processes.

A file is one of NumPy's `.npz`: the sums as arrays, and a JSON text about the rest. No code is ever run from one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from cowalk.gradients.shapes import At
from cowalk.gradients.sums import WIDE, Sum
from cowalk.measure.arrays import is_tensor
from cowalk.tree import CowalkError, Index, Path

FORMAT, VERSION = "cowalk accumulator", 1


class SaveError(CowalkError, ValueError):
    """What cannot be saved, or a file that holds no accumulator. `file` is which."""

    def __init__(self, message: str, file: str) -> None:
        super().__init__(message)
        self.message = message
        self.file = file

    def __reduce__(self) -> tuple[type[SaveError], tuple[str, str]]:
        return SaveError, (self.message, self.file)


def write(file: str | os.PathLike[str], about: Mapping[str, Any], shape: Any, sums: Mapping[Path, Sum]) -> None:
    """Write sums, the shape of their tree and other data; the file is whole, or it is not there."""
    target = FilePath(file).resolve()  # a link stays one
    if target.exists() and not target.is_file():
        raise SaveError(f"{target} is no file, and will not be made one", str(target))
    arrays: dict[str, Any] = {}
    entries: list[dict[str, Any]] = []
    for i, (path, each) in enumerate(sums.items()):
        arrays[f"sum{i}"] = _plain(each.total)
        if each.lost is not None:
            arrays[f"lost{i}"] = _plain(each.lost)
        keys = [_written_key(key, target) for key in path]
        entries.append({"path": keys, "count": each.count, "square": each.square})
    data = {"format": FORMAT, "version": VERSION, **about, "sums": entries, "shape": _written_shape(shape, target)}
    text = np.frombuffer(json.dumps(data).encode(), np.uint8)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".cowalk-")
    try:
        with os.fdopen(handle, "wb") as stream:
            np.savez(stream, about=text, **arrays)
            stream.flush()
            os.fsync(stream.fileno())
        FilePath(name).chmod(_mode_of(target))
        FilePath(name).replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            FilePath(name).unlink()
        raise


def _mode_of(target: FilePath) -> int:
    """The permissions of a file that is there, or those that a new one has."""
    if target.exists():
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def read(file: str | os.PathLike[str]) -> tuple[dict[str, Any], Any, dict[Path, Sum]]:
    """What `write` wrote. Sums are NumPy arrays.

    Raises:
        SaveError: the file holds no accumulator, or is damaged.
        OSError: it cannot be read.
    """
    with FilePath(file).open("rb") as stream:
        try:
            return _parsed(stream)
        except Exception as error:  # a damaged archive may raise anything
            raise SaveError(
                f"{os.fspath(file)} holds no accumulator that can be read: {error}", os.fspath(file)
            ) from error


def _parsed(stream: Any) -> tuple[dict[str, Any], Any, dict[Path, Sum]]:
    with np.load(stream, allow_pickle=False) as found:
        about = json.loads(bytes(found["about"]))
        if about.get("format") != FORMAT:
            raise ValueError("it is a file of something else")
        if about.get("version") != VERSION:
            raise ValueError(f"it is of version {about.get('version')}, and this cowalk reads version {VERSION}")
        entries = about["sums"]
        sums = {Path(map(_read_key, entry["path"])): _read_sum(found, i, entry) for i, entry in enumerate(entries)}
        if len(sums) != len(entries):
            raise ValueError("it has two sums for one parameter")
        counts = [int(about["batches"]), int(about["weighted"])]
        weight = float(about["weight"])
        if min(counts) < 0 or not (math.isfinite(weight) and weight >= 0):
            raise ValueError("its counts and its weight are no numbers that an accumulator has")
        worst = [
            (int(index), float(norm), float(w), None if loss is None else float(loss))
            for index, norm, w, loss in about["worst"]
        ]
        known = {"weight": weight, "batches": counts[0], "weighted": counts[1], "worst": worst}
        return known, _read_shape(about["shape"], ()), sums


def _read_sum(found: Any, i: int, entry: Mapping[str, Any]) -> Sum:
    total = found[f"sum{i}"]
    lost = found[f"lost{i}"] if f"lost{i}" in found.files else None
    if total.dtype.name not in WIDE or (lost is not None and (lost.dtype, lost.shape) != (total.dtype, total.shape)):
        raise ValueError(f"the arrays of sum {i} are of no kind that an accumulator has")
    return Sum(total, lost, int(entry["count"]), float(entry["square"]))


def _plain(array: Any) -> Any:
    return array.detach().cpu().numpy() if is_tensor(array) else np.asarray(array)


def _written_key(key: Any, target: FilePath) -> Any:
    if isinstance(key, Index):
        return {"position": int(key)}
    if isinstance(key, str) or (isinstance(key, int) and not isinstance(key, bool)):
        return key
    raise SaveError(f"{target}: a key that is a {type(key).__name__} ({key!r:.60}) cannot be saved", str(target))


def _read_key(key: Any) -> Any:
    return Index(key["position"]) if isinstance(key, dict) else key


def _written_shape(shape: Any, target: FilePath) -> Any:
    """Containers as JSON: [keys, children] of a dict, {"list" or "tuple": children}, "leaf", or null."""
    if shape is None:
        return None
    if isinstance(shape, At):
        return "leaf"
    if isinstance(shape, dict):
        keys = [_written_key(key, target) for key in shape]
        return {"dict": [keys, [_written_shape(child, target) for child in shape.values()]]}
    return {type(shape).__name__: [_written_shape(child, target) for child in shape]}


def _read_shape(data: Any, path: Sequence[Any]) -> Any:
    if data is None:
        return None
    if data == "leaf":
        return At(Path(path))
    if "dict" in data:
        keys, children = data["dict"]
        pairs = zip(map(_read_key, keys), children, strict=True)
        return {key: _read_shape(child, (*path, key)) for key, child in pairs}
    name, kind = ("list", list) if "list" in data else ("tuple", tuple)
    return kind(_read_shape(child, (*path, Index(i))) for i, child in enumerate(data[name]))
