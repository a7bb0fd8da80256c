"""Paths: where a node sits in a tree.

A `Path` is a tuple of the raw keys from the root, so it compares and hashes like one. Positions in lists and tuples are
`Index` keys (integers that know they are positions), which is what lets the text tell `layers.0` (a position) from
`layers[0]` (an integer key of a dict). The text is unambiguous and can be read back:

    encoder.layers.0.weight     names, positions
    scores[1]                   the integer key 1 of a dict
    table['a.b']                a text key that is not a plain word
    table[(1, 2)]               any other key, by its repr
"""

from __future__ import annotations

import ast
import re
from collections.abc import Hashable, Iterable
from typing import Any, Final

Key = Hashable

_WORD: Final = re.compile(r"[^\W\d]\w*|\d+")
_TOKEN: Final = re.compile(
    r"\.?(?P<word>[^.\[\]]+)|\[(?P<literal>(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^\]'\"])+)\]"
)


class Index(int):
    """A position in a list or tuple. Equal to, and hashed as, the integer it is.

    >>> from cowalk.tree import Index, Path
    >>> Index(0) == 0, Path(("layers", Index(0))), Path(("layers", 0))
    (True, Path('layers.0'), Path('layers[0]'))
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[type[Index], tuple[int]]:
        return Index, (int(self),)


class Path(tuple[Key, ...]):
    """The keys from the root of a tree to a node: a tuple with a readable text.

    >>> from cowalk import Path
    >>> path = Path(("encoder", "layers", "0", "weight"))
    >>> str(path), path[-1], path == ("encoder", "layers", "0", "weight")
    ('encoder.layers.0.weight', 'weight', True)
    >>> str(Path(("scores", 1, "a.b")))
    "scores[1]['a.b']"
    """

    __slots__ = ()

    def __str__(self) -> str:
        return "".join(map(_text, self)).removeprefix(".")

    def __repr__(self) -> str:
        return f"Path({str(self)!r})"

    def __add__(self, other: Iterable[Key]) -> Path:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Path((*self, *other))

    def __getitem__(self, item: Any) -> Any:
        taken = tuple.__getitem__(self, item)
        return Path(taken) if isinstance(item, slice) else taken

    @property
    def parent(self) -> Path:
        """The path of the node that holds this one (the root's is the root's)."""
        return self[:-1]

    @classmethod
    def parse(cls, text: str) -> Path:
        """Read a path's text. Positions come back as text keys ("0"), which match positions wherever they are looked up.

        Raises:
            ValueError: the text is no path; the message shows where.
        """
        keys: list[Key] = []
        at = 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None or (found["word"] and at > 0 and text[at] != ".") or (at == 0 and text[0] == "."):
                raise ValueError(f"not a path: {text!r} (at character {at}: {text[at : at + 12]!r})")
            keys.append(_literal(found["literal"], text) if found["word"] is None else found["word"])
            at = found.end()
        return cls(keys)


def _text(key: Key) -> str:
    if isinstance(key, Index):
        return f".{int(key)}"
    if isinstance(key, str):
        plain = str.__str__(key)  # a subclass, or an enum, may print as something else
        return f".{plain}" if _WORD.fullmatch(plain) else f"[{plain!r}]"
    return f"[{key!r}]"


def _literal(source: str, text: str) -> Key:
    try:
        return ast.literal_eval(source)
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"not a path: {text!r} (cannot read the key [{source}])") from error


def brief(path: Iterable[Key], limit: int = 200) -> str:
    """The text of a path for a message: the root by name, and a very deep path cut in the middle."""
    keys = tuple(path)
    if len(keys) > 40:
        return f"{Path(keys[:8])} … ({len(keys) - 16} more) … {Path(keys[-8:])}"
    text = str(Path(keys)) or "the root"
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-limit // 2 :]}"


def twin(key: Key) -> Key | None:
    """The other spelling of a numeric key: "0" for 0, 0 for "0"; None where there is none."""
    if isinstance(key, str):
        return int(key) if key.isascii() and key.isdigit() and (key == "0" or key[0] != "0") and len(key) < 18 else None
    if isinstance(key, int) and not isinstance(key, bool) and key >= 0:
        return str(int(key))
    return None


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A path pattern as a regular expression: `*` is any run of characters (separators too), `?` is any one character."""
    parts = (".*" if char == "*" else "." if char == "?" else re.escape(char) for char in pattern)
    return re.compile("".join(parts), re.DOTALL)
