"""`cowalk demo`: what it trains, prints and promises, for every framework that is installed."""

import io
import os
import signal
import subprocess
import sys
import threading
from importlib.util import find_spec

import numpy as np
import pytest
from rich.console import Console

import cowalk
from cowalk import ratio
from cowalk.demo import run
from cowalk.demo.digits import batches, load

FRAMEWORKS = [
    pytest.param(name, marks=pytest.mark.skipif(find_spec(name) is None, reason="")) for name in run.FRAMEWORKS
]


def console():
    return Console(file=io.StringIO(), width=80)


def net_of(name):
    return __import__(f"cowalk.demo.{name}", fromlist=["build"])


class TestDigits:
    def test_the_split_is_fixed_and_without_overlap(self):
        learn, held_back = load()
        assert (learn.images.shape, held_back.images.shape) == ((1437, 8, 8), (360, 8, 8))
        assert set(learn.labels) == set(held_back.labels) == set(range(10))
        assert (load()[1].images == held_back.images).all()

    def test_pixels_go_from_paper_to_ink(self):
        learn, _ = load()
        assert (learn.images.dtype, learn.images.min(), learn.images.max()) == (np.float32, 0, 1)

    def test_batches_show_every_digit_once_before_one_comes_again(self):
        learn, _ = load()
        drawn = [next_batch for next_batch, _ in zip(batches(learn, 479, seed=0), range(3), strict=False)]
        assert sorted(np.concatenate([batch.labels for batch in drawn])) == sorted(learn.labels)

    def test_source_and_licence_come_with_them(self):
        from importlib.resources import files

        note = files("cowalk.demo").joinpath("digits.LICENSE.md").read_text()
        for words in ("Alpaydin", "Kaynak", "UCI", "Attribution", "10.24432/C50P49", "Changed"):
            assert words in note


class TestChoice:
    def test_the_first_installed_framework_is_taken_without_importing_it(self):
        code = (
            "import sys; from cowalk.demo.run import choose; print(choose(None), {'torch', 'jax'} & set(sys.modules))"
        )
        found = next(name for name in run.FRAMEWORKS if find_spec(name) is not None)
        assert python("-c", code).stdout == f"{found} set()\n"

    def test_the_order(self, monkeypatch):
        monkeypatch.setattr(run, "find_spec", lambda name: None if name == "torch" else object())
        assert run.choose(None) == "jax"

    def test_one_that_is_not_installed_is_an_error_with_the_command_that_installs_it(self, monkeypatch):
        monkeypatch.setattr(run, "find_spec", lambda _: None)
        with pytest.raises(run.DemoError, match=r"pip install 'cowalk\[jax\]'"):
            run.choose("jax")

    def test_one_that_is_broken_is_an_error_that_says_why(self, monkeypatch):
        monkeypatch.setattr(run, "find_spec", lambda _: object())
        monkeypatch.setitem(sys.modules, "cowalk.demo.jax", None)
        with pytest.raises(run.DemoError, match="jax is installed but cannot be imported"):
            run.demo(console(), "jax", 1)


@pytest.mark.parametrize("name", FRAMEWORKS)
class TestNets:
    def test_gradients_are_those_of_the_loss(self, name):
        """The loss falls by about |gradient|² · step along a tiny step against the gradient."""
        net, (learn, _) = net_of(name), load()
        model = net.build()
        loss, gradients = net.loss_and_gradients(model, learn.images[:64], learn.labels[:64])
        square = sum(float((np.asarray(g, np.float64) ** 2).sum()) for g in cowalk.flatten(gradients).values())
        before = net.LEARNING_RATE
        net.LEARNING_RATE = 1e-3
        try:
            after, _ = net.loss_and_gradients(net.update(model, gradients), learn.images[:64], learn.labels[:64])
        finally:
            net.LEARNING_RATE = before
        assert loss - after == pytest.approx(1e-3 * square, rel=0.05)

    def test_every_parameter_has_a_row_and_a_gradient(self, name):
        net, (learn, _) = net_of(name), load()
        model = net.build()
        _, gradients = net.loss_and_gradients(model, learn.images[:64], learn.labels[:64])
        table = ratio(model, gradients)
        assert len(table.rows) == len(cowalk.trainables(model)) == 6
        assert {row.state for row in table.rows} <= {"ok", "partly zero"}

    def test_two_runs_print_the_same(self, name):
        texts = []
        for _ in range(2):
            screen = console()
            assert run.demo(screen, name, 5) == 0
            texts.append(screen.file.getvalue())
        assert texts[0] == texts[1]

    def test_the_net_learns_to_read(self, name):
        net, (learn, held_back) = net_of(name), load()
        model = net.build()
        for batch, _ in zip(batches(learn, run.BATCH, seed=0), range(run.STEPS), strict=False):
            _, gradients = net.loss_and_gradients(model, batch.images, batch.labels)
            model = net.update(model, gradients)
        assert (net.predict(model, held_back.images) == held_back.labels).mean() > 0.95

    def test_the_line_for_your_own_loop_is_right(self, name, capsys):
        """It is run as it is printed, in a loop as a user of that framework writes it."""
        net, (learn, _) = net_of(name), load()
        images, labels = learn.images[:8], learn.labels[:8]
        model = net.build()
        line = next(line for line in net.IN_YOUR_LOOP.splitlines() if "cowalk" in line)
        names = {"cowalk": cowalk, "model": model, "params": model}
        if name == "torch":
            import torch

            net.loss_of(model, torch.from_numpy(images)[:, None], torch.from_numpy(labels)).backward()
        elif name == "jax":
            import jax

            names["grads"] = jax.grad(net.loss_of)(model, images[:, None], labels.astype("int32"))
        else:
            _, names["grads"] = net.loss_and_gradients(model, images, labels)
        exec(line, names)
        assert "all 6 rows" in capsys.readouterr().out

    def test_as_a_command(self, name):
        done = python("-m", "cowalk", "demo", "--framework", name, "--steps", "3")
        assert done.returncode == 0
        assert not done.stderr
        assert max(map(len, done.stdout.splitlines())) <= 80
        assert "\x1b" not in done.stdout
        for words in ("3 steps of 64", "after step 3", "held back", "mean |p/g|", "cowalk.stats(", "CC BY 4.0"):
            assert words in done.stdout


def python(*arguments):
    env = {**os.environ, "COLUMNS": "80"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, timeout=300)


class TestInterrupt:
    def interrupt_after(self, steps, monkeypatch):
        net = net_of("numpy")
        original, count = net.loss_and_gradients, iter(range(10**9))

        def counted(*arguments):
            if next(count) == steps:
                signal.raise_signal(signal.SIGINT)
            return original(*arguments)

        monkeypatch.setattr(net, "loss_and_gradients", counted)

    def test_what_is_there_is_printed_and_the_exit_code_is_130(self, monkeypatch):
        self.interrupt_after(4, monkeypatch)
        before, screen = signal.getsignal(signal.SIGINT), console()
        assert run.demo(screen, "numpy", 600) == 130
        assert "Stopped after step 5" in screen.file.getvalue()
        assert "all 6 rows" in screen.file.getvalue()
        assert signal.getsignal(signal.SIGINT) is before

    def test_it_also_runs_outside_the_main_thread(self):
        codes = []
        thread = threading.Thread(target=lambda: codes.append(run.demo(console(), "numpy", 2)))
        thread.start()
        thread.join()
        assert codes == [0]


def test_a_progress_bar_on_a_terminal_only():
    screen = Console(file=io.StringIO(), width=80, force_terminal=True)
    run.demo(screen, "numpy", 5)
    assert "5/5" in screen.file.getvalue()
    quiet = console()
    run.demo(quiet, "numpy", 5)
    assert "5/5" not in quiet.file.getvalue()


def test_the_remarks_say_what_the_table_holds():
    table = ratio({"a": np.ones(4), "b": np.ones(2)}, {"a": np.array([1.0, 1.0, 1e-3, 0.0]), "b": np.ones(2)})
    zero, mean = run.remarks(table)
    assert zero.startswith("x/0: 1 parameters got no gradient")
    assert mean.endswith("in a, one of 3 makes 100% of mean |p/g|.")
    assert run.remarks(ratio({}, {})) == []
