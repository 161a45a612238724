"""``ronde plan validate``: predictions before measurements, and their judgement."""

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from math import inf
from pathlib import Path

import pytest
from tests.commands import refusal
from tests.limits import HANG_S, until

from ronde.collectives import LinkCost, LinkCosts, all_reduce_s
from ronde.plan import (
    SIZES_BYTES,
    MeasuredSteps,
    Predicted,
    StepComparison,
    StepRequest,
    judge,
    layout_of,
    predict_steps,
    slower_rate,
)
from ronde.processes import descendants

COMMAND = (sys.executable, "-m", "ronde", "plan", "validate")

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"),
    reason="network namespaces need root and iproute2",
)


def measured(num_ranks=2, step_s=1.0, alpha_s=0.0, beta_s=0.0, buckets=(1000, 1000)):
    """Return a run whose all_reduces follow a ring's price exactly."""
    rounds, sent = 2 * (num_ranks - 1), 2 * (num_ranks - 1) / num_ranks
    times_s = [rounds * alpha_s + sent * size * beta_s for size in SIZES_BYTES]
    return MeasuredSteps(
        num_ranks,
        ranks_per_node=1,
        steps_s=[step_s] * 3,
        cpu_s=0.1,
        times_s=times_s,
        alone_s=0.9,
        backward_s=0.6,
        update_s=0.1,
        bucket_bytes=buckets,
        ready_s=[0.3, 0.6],
    )


def predict(run, num_ranks, **facts):
    return predict_steps([run], [layout_of(num_ranks, 1)], "ring", **facts)[0]


def test_a_prediction_without_exposed_communication_is_the_measured_step():
    low, middle, high = predict(measured(step_s=1.0, alpha_s=1e-9), 8)
    assert low < middle < high
    assert middle == pytest.approx(1.0, rel=0.01)


def test_a_prediction_adds_the_growth_of_the_exposed_communication():
    # The last bucket's all_reduce is exposed: 2 (n-1)/n of 0.1 s.
    run = measured(step_s=1.0, beta_s=1e-4)
    assert predict(run, 8).middle_s == pytest.approx(1.0 + 0.075, rel=0.01)


def test_ranks_that_share_cores_wait_for_all_their_work():
    run = measured(step_s=1.0, beta_s=1e-4)
    # Eight ranks on two cores: each bucket takes 4 * 1.75 * 0.05 s, more than the line
    # does, and delays the next; the update takes four times as long.
    crowded = predict(run, 8, shared_cores=2)
    assert crowded.middle_s == pytest.approx(0.9 + 0.65 + 0.35 - 0.6 + 0.3, rel=0.02)
    # All of a step but the emulated forward needs the cores.
    busy = run._replace(alone_cpu_s=0.3, cpu_s=0.4)
    needed_s = 0.2 + 4 * (0.3 + 1.75 * 0.1)
    # The middle of 1,000 draws that scatter by a fifth.
    needing = predict(busy, 8, shared_cores=2)
    assert needing.middle_s == pytest.approx(needed_s, rel=0.05)
    # A slow line takes longer than the cores do.
    slow = measured(step_s=2.9, beta_s=1e-3)
    middles_s = [predict(slow, 8, shared_cores=n).middle_s for n in (inf, 2)]
    assert middles_s[1] == pytest.approx(middles_s[0] + 0.3, rel=0.02)


def test_links_inside_and_between_nodes_are_distinguished():
    def run(num_ranks, costs):
        layout = layout_of(num_ranks, 2)
        price = partial(all_reduce_s, "two_levels", layout=layout, costs=costs)
        times_s = [price(num_bytes=size) for size in SIZES_BYTES]
        base = measured()._replace(num_ranks=num_ranks, ranks_per_node=2)
        exposed_s = 0.3 + 2 * price(num_bytes=1000) - 0.6
        return base._replace(times_s=times_s, steps_s=[0.9 + exposed_s] * 3)

    costs = LinkCosts(LinkCost(0.0, 1e-5), LinkCost(1e-3, 1e-3))
    runs = [run(ranks, costs) for ranks in (2, 4, 6)]
    predicted = predict_steps(runs[:2], [layout_of(6, 2)], "two_levels")[0]
    assert predicted.middle_s == pytest.approx(runs[2].step_s, rel=0.01)


def test_a_noisy_measurement_widens_the_interval():
    run = measured(alpha_s=1e-6)
    noisy = run._replace(steps_s=[0.8, 1.0, 1.2])
    widths = [p.high_s - p.low_s for p in (predict(run, 4), predict(noisy, 4))]
    assert widths[1] > 2 * widths[0]


def test_times_that_follow_no_line_are_priced_with_a_wide_interval(caplog):
    run = measured(beta_s=1e-4)
    times_s = [time_s * (4 if i % 2 else 1) for i, time_s in enumerate(run.times_s)]
    noisy = run._replace(times_s=[*times_s[:-1], run.times_s[-1]])
    widths = [p.high_s - p.low_s for p in (predict(run, 4), predict(noisy, 4))]
    assert widths[1] > 1.5 * widths[0]
    assert "the shortest and the longest all_reduce alone" in caplog.text


def case(measured_s, latency_share=0.01):
    return StepComparison(8, Predicted(0.9, 1.0, 1.1), measured_s, latency_share)


@pytest.mark.parametrize(
    ("cases", "code"),
    [
        ([case(1.0), case(1.05), case(2.0)], 0),
        ([case(1.0), case(2.0)], 0),
        ([case(1.0), case(2.0), case(0.5)], 1),
        # A machine that is too small neither passes nor fails.
        ([case(1.0), case(9.0, 0.2), case(9.0, 0.2)], 0),
        ([case(2.0), case(1.0, 0.2), case(1.0, 0.2)], 1),
        ([case(1.0, 0.2)], 2),
    ],
)
def test_more_than_half_of_the_valid_cases_decide(cases, code):
    found, sentence = judge(cases)
    assert found == code
    assert ("no size counts" in sentence) == (code == 2)


def test_latency_counts_once_for_each_round():
    run = measured(8, step_s=1.0, alpha_s=5e-4)._replace(times_s=[7e-3])
    assert run.latency_share("ring") == pytest.approx(14 * 7e-3)
    assert case(1.0, 0.098).is_valid
    assert not case(1.0, 0.102).is_valid
    assert "try --rate 50Mbit/s" in case(1.0, 0.102).shown(99e6)


def test_a_slower_rate_is_lower_and_round():
    assert slower_rate(1e9, 0.101) == 5e8
    assert slower_rate(1e9, 0.2) == 5e7


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "-n is required"),
        (("-n", "4"), "at least 2 ascending numbers"),
        (("-n", "1,2,2"), "at least 2 ascending numbers"),
        (("-n", "4,2"), "at least 2 ascending numbers"),
        (("-n", "1,x"), "at least 2 ascending numbers"),
        (("-n", "1,2"), "one to measure and one to predict"),
        (("-n", "2,4", "--per-node", "2"), "one to measure and one to predict"),
        (("-n", "2,4,7", "--per-node", "2"), "must be a multiple of 2 a node"),
        (("-n", "1,2,4", "--rate", "fast"), "must be a rate or unlimited, got 'fast'"),
        (("-n", "1,2,4", "--model", "mlp"), "--compute real"),
        (("-n", "1,2,4", "--compute", "real", "--model", "vgg"), "model must be"),
        (("-n", "1,2,4", "--engine", "mpi"), "--engine must be"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(capsys, words, reason):
    text = refusal(capsys, "plan", "validate", *words)
    assert reason in text
    assert text.count("\n") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may limit a line")
def test_a_rate_needs_root(capsys):
    assert "needs root" in refusal(
        capsys, "plan", "validate", "-n", "1,2,4", "--rate", "1Gbit/s"
    )


def check_run(run, request):
    """Check figures that hold on a loaded machine, too."""
    # A step contains all waits of its layers.
    forward_s, layers = request.emulated_layers()
    least_s = forward_s + layers[-1][1]
    assert min(run["steps_s"]) > least_s
    assert run["backward_s"] > layers[-1][1]
    assert sorted(run["ready_s"]) == run["ready_s"]
    assert run["ready_s"][0] >= 0
    assert 0 < run["alone_cpu_s"] < run["cpu_s"]
    assert len(run["times_s"]) == len(SIZES_BYTES)
    return least_s


def test_ranks_of_this_machine():
    request = StepRequest("emulated", "vgg", 250e6, 0, 1, is_base=True)
    words = ("run", "-n", "2", "--standalone", "-m", "ronde", *COMMAND[3:], "--rank")
    done = subprocess.run(
        [*COMMAND[:3], *words, json.dumps(request)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout[done.stdout.index("{") :])
    check_run(run, request)
    assert (run["num_ranks"], run["ranks_per_node"]) == (2, 2)
    assert len(run["bucket_bytes"]) == 6


@needs_root
def test_hosts_with_slow_lines():
    """The interval may be missed on a loaded machine, but not the order."""
    words = ("-n", "2,3", "--steps", "1", "--rate", "1Gbit/s", "--json")
    done = subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    if "network namespaces" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode in (0, 1, 2), done.stderr
    found = json.loads(done.stdout)
    assert (found["form"], found["version"]) == ("ronde-plan-validate", 1)
    lines = [line.split()[:2] for line in done.stderr.splitlines()]
    order = [["2", "measured"], ["3", "predicted"], ["3", "measured"]]
    assert [line for line in lines if line in order] == order
    (run,), (predicted,) = found["measured"], found["predicted"]
    assert (run["num_ranks"], predicted["ranks"]) == (2, 3)
    assert 0 < predicted["low_s"] < predicted["middle_s"] < predicted["high_s"]
    request = StepRequest(*(found[name] for name in StepRequest._fields))
    assert predicted["measured_s"] > check_run(run, request)
    # The line lets through no more than its rate.
    assert run["times_s"][-1] > 0.9 * (1 << 22) / 125e6
    assert run["ranks_per_node"] == 1


@needs_root
def test_nothing_is_left_after_sigterm():
    words = (*COMMAND, "-n", "1,2,3", "--rate", "100Mbit/s")
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as command:
        seen = set()
        until(lambda: command.poll() is not None or has_rank(command, seen))
        command.terminate()
        _, errors = command.communicate(timeout=HANG_S)
    if "network namespaces" in errors:
        pytest.skip(errors)
    assert len(seen) >= 5
    until(lambda: not [pid for pid in seen if Path(f"/proc/{pid}").exists()])


def has_rank(command, seen):
    """Note all processes; True once a bridge, three hosts and a rank were there."""
    children = descendants(command.pid)
    seen.update(child.pid for child in children)
    return len(children) >= 5 and any(c.name.startswith("python") for c in children)
