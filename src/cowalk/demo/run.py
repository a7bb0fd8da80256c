"""The demo: which framework, the training loop, and what is printed."""

from __future__ import annotations

import importlib
import signal
import textwrap
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, cast

from cowalk.measure import Pair, Table, stats
from cowalk.measure.arrays import plain
from cowalk.measure.stats import RATIO_COLUMNS
from cowalk.tree import CowalkError, fmapstructure, istrainable

if TYPE_CHECKING:
    from rich.console import Console

    from cowalk.demo.digits import Array

FRAMEWORKS = ("torch", "jax", "numpy")
STEPS = 300
BATCH = 64
INTERRUPTED = 130
"""The exit code of a program that Ctrl-C ended."""


class DemoError(CowalkError):
    """The demo cannot run as asked."""


class Net(Protocol):
    """What a framework's file offers."""

    NET: str
    IN_YOUR_LOOP: str

    def build(self) -> Any:
        """A model that has learned nothing yet."""
        ...

    def loss_and_gradients(self, model: Any, images: Array, labels: Array, /) -> tuple[float, Any]:
        """The loss of one batch, and its gradients."""
        ...

    def update(self, model: Any, gradients: Any, /) -> Any:
        """The model after one step; it may be the same object."""
        ...

    def predict(self, model: Any, images: Array, /) -> Array:
        """The digit the model sees in each picture."""
        ...


def choose(framework: str | None) -> str:
    """The framework asked for, or the first one installed; none is imported.

    Raises:
        DemoError: the one asked for is not installed.
    """
    if framework is None:
        return next(name for name in FRAMEWORKS if find_spec(name) is not None)
    if find_spec(framework) is None:
        raise DemoError(f"{framework} is not installed. Install it with: pip install 'cowalk[{framework}]'")
    return framework


def demo(console: Console, framework: str | None = None, steps: int = STEPS) -> int:
    """Train a small net on handwritten digits and print its table. Returns an exit code.

    Ctrl-C ends the training after the step that runs, and the table of that step is printed; a second one ends everything.

    Raises:
        DemoError: the framework is not installed, or cannot be imported.
    """
    name = choose(framework)
    try:
        net = cast("Net", importlib.import_module(f"cowalk.demo.{name}"))
    except ImportError as error:
        raise DemoError(
            f"{name} is installed but cannot be imported ({error}). "
            f"Mend it with: pip install --force-reinstall 'cowalk[{name}]'"
        ) from error

    from cowalk.demo.digits import batches, load

    learn, held_back = load()
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    say(f"{net.NET} learns handwritten digits: {steps:,} steps of {BATCH}.")
    say("The digits: E. Alpaydin, C. Kaynak; UCI Machine Learning Repository; CC BY 4.0.\n")
    model = net.build()
    losses: list[float] = []
    before = gradients = None
    with _stop_on_interrupt() as stopped, _progress(console, steps) as advance:
        for batch in batches(learn, BATCH, seed=0):
            loss, gradients = net.loss_and_gradients(model, batch.images, batch.labels)
            losses.append(loss)
            before = _copies(model)
            model = net.update(model, gradients)
            advance(loss)
            if len(losses) == steps or stopped():
                break

    right = float((net.predict(model, held_back.images) == held_back.labels).mean())
    done = "Stopped" if len(losses) < steps else "Done"
    say(f"{done} after step {len(losses):,}: the loss went from {losses[0]:.3g} to {losses[-1]:.3g},")
    say(f"and of {len(held_back.labels)} digits held back, {right:.1%} are read right.\n")
    updates = fmapstructure(lambda p, old: plain(p).values - old, model, before, where=istrainable)
    table = stats(model, gradients, updates)
    say("The last step: parameters, their gradients, and what the step added to them.\n")
    console.print(table)
    say("\nParameter / gradient, element by element:\n")
    console.print(table.select(*RATIO_COLUMNS))
    for remark in remarks(table):
        say(f"\n{textwrap.fill(remark, 80)}")
    say("\nThis table in your own loop:\n")
    say(textwrap.indent(net.IN_YOUR_LOOP, "    "))
    return INTERRUPTED if len(losses) < steps else 0


def _copies(model: Any) -> Any:
    """A model's parameters as they are now, for the update to be seen."""
    return fmapstructure(lambda p: plain(p).values.copy(), model, where=istrainable)


def remarks(table: Table) -> list[str]:
    """What a reader may want to be told about a table: sentences with its own numbers."""
    found: list[str] = []
    total = table.total.ratio
    if total is not None and total.x_by_zero:
        found.append(
            f"x/0: {total.x_by_zero:,} parameters got no gradient at all from the last batch. They stand at "
            "inputs that were zero in all its pictures, or at units that were silent."
        )
    rows = [(str(row.path), row.ratio) for row in table.rows if row.ratio is not None and row.ratio.mean_abs]
    if rows:
        path, worst = max(rows, key=lambda row: _largest_share(row[1]))
        found.append(
            f"A mean of quotients is made by the elements whose gradient is next to zero: in {path}, one of "
            f"{worst.defined:,} makes {_largest_share(worst):.0%} of mean |p/g|."
        )
    return found


def _largest_share(ratio: Pair) -> float:
    """How much of the sum of all |p/g| the largest one makes."""
    if ratio.min is None or ratio.max is None or not ratio.mean_abs:
        return 0.0
    return max(-ratio.min, ratio.max) / ratio.mean_abs / ratio.defined


@contextmanager
def _progress(console: Console, steps: int) -> Generator[Callable[[float], None], None, None]:
    """A progress bar, on a terminal only; it is told of each step's loss."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=steps, loss=float("nan"))
        yield lambda loss: bar.update(task, advance=1, loss=loss)


@contextmanager
def _stop_on_interrupt() -> Generator[Callable[[], bool], None, None]:
    """Within, the first Ctrl-C only makes the function yielded say true."""
    if threading.current_thread() is not threading.main_thread():  # signals belong to the main thread
        yield lambda: False
        return
    asked = threading.Event()

    def stop(*_: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
