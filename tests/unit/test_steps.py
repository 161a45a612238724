"""The times of a rank's steps, and the figures that its program reports."""

import gc
import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
import torch
from tests.limits import HANG_S

import ronde
from ronde.errors import UsageError
from ronde.launch import own_environment
from ronde.status import StepMeter, decode_status


class Watch:
    """A clock that stands still between two calls of ``sleep``."""

    now_s = 100.0

    def read(self):
        return self.now_s

    def sleep(self, duration_s):
        self.now_s += duration_s


class Optimizer:
    """Something that makes steps."""


@pytest.fixture
def watch():
    return Watch()


@pytest.fixture
def meter(watch):
    return StepMeter(watch.read)


def numbers(steps):
    return [each.step for each in steps]


def make_steps(meter, watch, owner, first, last, step_s=0.25):
    for step in range(first, last + 1):
        watch.sleep(step_s)
        meter.step_done(owner, step)


def test_a_step_is_divided_and_only_the_outermost_activity_counts(meter, watch):
    own = Optimizer()
    meter.step_done(own, 1)
    watch.sleep(1)
    with meter.input:
        watch.sleep(2)
        with meter.blocked:  # a DataLoader that exchanges something
            watch.sleep(4)
    with suppress(KeyError), meter.blocked:
        watch.sleep(8)
        raise KeyError
    meter.step_done(own, 2)
    watch.sleep(16)
    meter.step_done(own, 3)
    assert meter.sample() == ((2, 15, 8, 6, 0), (3, 16, 0, 0, 0))


def test_activities_of_other_threads_are_ignored(meter, watch):
    def block():
        with meter.blocked:
            watch.sleep(1)

    thread = threading.Thread(target=block)
    with meter.input:
        thread.start()
        thread.join()
    block()
    assert (meter.input.total_s, meter.blocked.total_s) == (1, 1)


def test_garbage_collections_count_unless_the_thread_is_blocked(watch):
    class Ticking(Watch):
        def read(self):
            self.sleep(1)
            return self.now_s

    meter, own = StepMeter(Ticking().read), Optimizer()
    meter.watch_gc()
    try:
        meter.step_done(own, 1)
        gc.collect()
        meter.step_done(own, 2)
        with meter.blocked:
            gc.collect()
        meter.step_done(own, 3)
    finally:
        gc.callbacks.pop()
    assert [each.gc_s for each in meter.sample()] == [1, 0]


def test_of_two_optimizers_in_turn_the_first_counts(meter, watch):
    generator, discriminator = Optimizer(), Optimizer()
    for step in range(1, 6):
        make_steps(meter, watch, generator, step, step)
        make_steps(meter, watch, discriminator, 3 * step, 3 * step + 2)
    found = meter.sample()
    assert numbers(found) == [2, 3, 4, 5]
    assert {each.total_s for each in found} == {1}


def test_another_optimizer_counts_once_the_first_is_over(meter, watch):
    first, second = Optimizer(), Optimizer()
    make_steps(meter, watch, first, 1, 20)
    make_steps(meter, watch, second, 1, 20)
    found = meter.sample()
    assert numbers(found) == [*range(10, 21)]
    assert {each.total_s for each in found} == {0.25}
    third = Optimizer()
    del first, second
    make_steps(meter, watch, third, 1, 3)
    assert numbers(meter.sample()) == [2, 3]


def test_steps_that_the_program_reports_replace_those_of_optimizers(meter, watch):
    own = Optimizer()
    make_steps(meter, watch, own, 1, 5)
    for step in range(50, 53):
        make_steps(meter, watch, own, step, step)
        watch.sleep(0.75)
        meter.report(step)
    # A sample may come between the report's two parts.
    found = meter.sample(53)
    assert numbers(found) == [51, 52]
    assert {each.total_s for each in found} == {1}


def test_the_job_may_count_otherwise(meter, watch):
    make_steps(meter, watch, Optimizer(), 1, 5)
    assert numbers(meter.sample(1005)) == [1002, 1003, 1004, 1005]
    assert StepMeter().sample(1005) == ()


@pytest.mark.parametrize(
    ("step_s", "later_s"),
    [(0.001, 1), (0.001, 2), (0.03, 1), (0.03, 5), (0.4, 5), (7.0, 7), (60.0, 60)],
)
def test_ranks_that_report_at_different_times_choose_equal_steps(step_s, later_s):
    samples = []
    for pause_s in (0.0, later_s):
        watch = Watch()
        meter, own = StepMeter(watch.read), Optimizer()
        num_steps = 10_000 + round(pause_s / step_s)
        make_steps(meter, watch, own, 1, num_steps, step_s)
        samples.append(numbers(meter.sample()))
    for found in samples:
        assert 4 <= len(found) <= 16
        if found[-1] - found[0] >= 64:
            assert {step % 2 for step in found} == {0, 1}
    assert len(set(samples[0]) & set(samples[1])) >= 2


def test_outside_of_a_job_progress_has_no_effect():
    before = threading.active_count()
    ronde.progress(step=1, loss=0.5, tokens=100, accuracy=0.25)
    assert threading.active_count() == before


@pytest.mark.parametrize("value", ["a", torch.ones(2), [], 10**400])
def test_a_figure_must_be_a_number(value):
    with pytest.raises(UsageError, match=r"progress\(loss=...\) must be a number"):
        ronde.progress(loss=value)
    with pytest.raises(UsageError, match=r"progress\(step=...\) must be a number"):
        ronde.progress(step=value)


@pytest.mark.parametrize("step", [-1, float("nan")])
def test_a_step_must_not_be_negative(step):
    with pytest.raises(UsageError, match="must be at least 0"):
        ronde.progress(step=step)


REPORTS = """
import math, sys
import ronde
from ronde.status import Part, add_source
class Optimizer:
    def report(self):
        return Part(step=7)
optimizer = Optimizer()
add_source(optimizer.report)
class Loss(float):
    def detach(self):
        return 2.5
for line in sys.stdin:
    exec(line)
"""


def test_figures_are_in_the_next_statuses():
    own, other = socket.socketpair()
    with own, other:
        inode = os.fstat(other.fileno()).st_ino
        channel = f"{other.fileno()}:{inode}:0:plain"
        env = {**own_environment(), "RONDE_CHANNEL": channel}
        words = [sys.executable, "-c", REPORTS]
        process = subprocess.Popen(
            words, env=env, pass_fds=[other.fileno()], stdin=subprocess.PIPE, text=True
        )
        with process, own.makefile() as lines:
            own.settimeout(HANG_S)

            def await_status(is_there):
                texts = (json.loads(line.removeprefix("status ")) for line in lines)
                return next(filter(is_there, map(decode_status, texts)))

            def call(line):
                process.stdin.write(line + "\n")
                process.stdin.flush()

            try:
                call("ronde.progress(loss=Loss(math.nan), tokens=10)")
                found = await_status(lambda each: each.progress)
                assert found.progress == {"loss": 2.5, "tokens": 10}
                assert found.step == 7
                call("ronde.progress(loss=math.nan, tokens=32, accuracy=0.5)")
                call("ronde.progress(step=3)")
                found = await_status(lambda each: each.step == 3)
                assert found.progress == {"loss": None, "tokens": 42, "accuracy": 0.5}
            finally:
                process.kill()
