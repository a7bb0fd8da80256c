"""The handwritten digits that the nets learn. Their source, authors and licence: digits.LICENSE.md."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class Digits(NamedTuple):
    """Pictures (n, 8, 8) as float32 from 0 (paper) to 1 (ink), and what they show (n,) as int64."""

    images: Array
    labels: Array


def load() -> tuple[Digits, Digits]:
    """The digits to learn from, 1,437 of them, and those held back, 360: every fifth one."""
    with resources.files("cowalk.demo").joinpath("digits.npz").open("rb") as file, np.load(file) as archive:
        images = archive["images"].astype(np.float32) / 16
        labels = archive["labels"].astype(np.int64)
    held_back = np.arange(len(images)) % 5 == 0
    return Digits(images[~held_back], labels[~held_back]), Digits(images[held_back], labels[held_back])


def batches(digits: Digits, size: int, seed: int) -> Iterator[Digits]:
    """Batches without end: the digits in a new order each time they have all been seen."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(digits.images))
        for start in range(0, len(order) - size + 1, size):
            chosen = order[start : start + size]
            yield Digits(digits.images[chosen], digits.labels[chosen])
