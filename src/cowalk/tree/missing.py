"""The value that stands where a tree has none: `MISSING`, which is neither None nor zero."""

from __future__ import annotations

import enum
from typing import Final


class Missing(enum.Enum):
    """The type of `MISSING`. An enum, so that type checkers can narrow it and pickles keep its identity.

    >>> from cowalk import MISSING
    >>> bool(MISSING), MISSING
    (False, MISSING)
    """

    MISSING = enum.auto()

    def __repr__(self) -> str:
        return "MISSING"

    def __bool__(self) -> bool:
        return False


MISSING: Final = Missing.MISSING
