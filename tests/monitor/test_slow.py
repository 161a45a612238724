"""Reasons for slow ranks that only simulated hosts have: GPUs, interfaces, chance."""

from tests.monitor.jobs import make_table, make_usage, make_watcher

from ronde.launch import HostAnswer
from ronde.monitor import Inspection, JobWatcher, ObservedJob, StackFrame, explain_slow
from ronde.plain_values import to_plain
from ronde.status import StepTime


def observe(watcher, **facts):
    view = watcher.view()
    return ObservedJob(view, view, facts.get("inspections", {}), {})


def inspect(worker, line):
    frame = StackFrame("train", "train.py", line, is_user=True)
    return Inspection(worker, 1000 + worker, "R", "", 1.0, 0.0, (frame,), "")


def test_a_throttled_gpu_explains_a_slow_rank_and_its_line_is_the_unusual_one():
    watcher = make_watcher(4, late=2, versions=1)
    usage = make_usage(range(4), at_s=9.0, num_gpus=4)
    gpus = [gpu._replace(pids=(1000 + gpu.number,)) for gpu in usage.gpus]
    gpus[2] = gpus[2]._replace(clock_mhz=1140, throttled_by=("HW thermal slowdown",))
    link = usage.interfaces[0]._replace(num_errors=12)
    usage = usage._replace(gpus=tuple(gpus), interfaces=(link,))
    watcher.add(HostAnswer("node0", to_plain(usage)))
    inspections = {n: [inspect(n, 40), inspect(n, 40)] for n in range(4)}
    inspections[2] = [inspect(2, 40), inspect(2, 41)]
    slow, errors = explain_slow(observe(watcher, inspections=inspections))
    assert (slow.kind, slow.ranks) == ("gpu", (2,))
    assert slow.text.startswith(
        "On the other ranks 30% of each step is waiting for rank 2 (no"
    )
    assert "takes 180ms, 50% more than the median of the others." in slow.text
    words = "Its GPU runs at 1140 MHz, the others at 1755 (HW thermal slowdown)."
    assert words in slow.text
    words = "It is at train.py:41 in train() more often than the others: in 1 of 2"
    assert words in slow.text
    assert slow.text.endswith("steps would be at most 1.4 times as fast.")
    inspections[2] = inspections[3]
    text = explain_slow(observe(watcher, inspections=inspections))[0].text
    assert "more often" not in text
    assert (errors.kind, errors.ranks) == ("errors", (0, 1, 2, 3))
    assert "12 packets" in errors.text


def test_no_rank_is_blamed_if_another_one_is_late_in_each_step():
    table = make_table(4)
    rows = []
    for row in table.workers:
        blocked_s = [0.02 + 0.1 * (n % 4 != row.rank) for n in range(16)]
        steps = [StepTime(n, 0.2, s, 0.0, 0.0) for n, s in enumerate(blocked_s)]
        rows.append(row._replace(status=row.status._replace(steps=tuple(steps))))
    watcher = JobWatcher(table._replace(workers=tuple(rows)))
    (fault,) = explain_slow(observe(watcher))
    assert (fault.kind, fault.ranks) == ("varying", ())
    assert "another rank each time" in fault.text


def test_jobs_without_steps_or_with_one_rank_have_no_slow_rank():
    table = make_table(2)
    rows = [row._replace(status=None) for row in table.workers]
    watcher = JobWatcher(table._replace(workers=tuple(rows)))
    assert explain_slow(observe(watcher)) == ()
    (fault,) = explain_slow(observe(JobWatcher(make_table(1))))
    assert fault.kind == "communication"
