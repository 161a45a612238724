"""``ronde run --min-ranks --max-ranks`` on one host, with small programs."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.limits import HANG_S

RANK = str(Path(__file__).with_name("elastic_rank.py"))
HOST = os.uname().nodename


def run(run_words, plan, *options, last_view=1, start=""):
    env = {"PLAN": json.dumps(plan), "LAST_VIEW": f"{last_view}", "START_PLAN": start}
    words = ("run", "-np", "4", "--min-ranks", "2", *options)
    return run_words(*words, "--", sys.executable, RANK, env=env)


def lines(result: "subprocess.CompletedProcess[bytes]") -> list[str]:
    """Return what the launcher wrote of itself."""
    text = result.stderr.decode()
    return [line for line in text.splitlines() if line.startswith("ronde: ")]


def done(result) -> list[str]:
    return sorted(re.findall(r"done .*", result.stdout.decode()))


@pytest.mark.parametrize("number", [0, 3])
def test_the_others_go_on_when_a_rank_is_killed(ronde, tmp_path, number):
    words = ("--log-dir", str(tmp_path))
    result = run(ronde, {f"{number}:3": "SIGKILL"}, *words, last_view=2)
    assert result.returncode == 0, result.stderr
    assert done(result) == [f"done {rank} of 4" for rank in range(4)]
    first, second, *_ = lines(result)
    lost = f"ronde: rank {number} on {HOST} was killed by SIGKILL; 4 ranks became 3 "
    assert first.startswith(f"{lost}and go on from step ")
    assert second.startswith(f"ronde: a rank joins on {HOST}; 3 ranks became 4 and go ")
    assert re.fullmatch(
        r"ronde: 2 changes of membership, 3 to 4 ranks: .*s at a standstill, no steps "
        r"lost\.",
        lines(result)[-1],
    )
    [attempt] = tmp_path.glob("*/attempt_0")
    index = json.loads((attempt / "index.json").read_text())
    assert len(index["ranks"]) == 5
    views = json.loads((attempt / "end.json").read_text())["verdict"]["views"]
    assert [(each["view"], each["size"]) for each in views] == [(0, 4), (1, 3), (2, 4)]
    assert views[1]["reason"].endswith("was killed by SIGKILL")


def test_ranks_that_are_killed_before_they_train_are_reported(ronde):
    plan = {"1:joined": "SIGKILL", "4:start": "SIGKILL"}
    result = run(ronde, plan, last_view=2)
    assert result.returncode == 0, result.stderr
    first, second = f"rank 1 on {HOST}", f"worker 4 on {HOST}"
    joined = f"ronde: {first} was killed by SIGKILL; 4 ranks became 3 and go "
    assert any(line.startswith(joined) for line in lines(result))
    start = f"ronde: {second} was killed by SIGKILL before it joined."
    assert start in lines(result)


def test_the_others_do_not_wait_for_the_end_of_a_rank_that_fails(ronde):
    # For longer than this test may take they would wait, and it would stay.
    result = run(ronde, {"0:3": "raise and stay"}, "--reform-timeout", "1h")
    assert result.returncode == 0, result.stderr
    assert done(result) == [f"done {rank} of 3" for rank in range(3)]
    lost = f"ronde: rank 0 on {HOST} failed with ValueError: the program is "
    assert lines(result)[0].startswith(f"{lost}wrong; 4 ranks became 3 and go on from ")
    assert b"[0] ValueError: the program is wrong" in result.stderr


def test_the_others_go_on_when_a_rank_stands_still(ronde):
    result = run(ronde, {"2:3": "SIGSTOP"})
    assert result.returncode == 0, result.stderr
    assert lines(result)[0].startswith(f"ronde: rank 2 on {HOST} was stopped for 1.5 s")
    assert done(result) == [f"done {rank} of 3" for rank in range(3)]


def test_stacks_of_a_hung_rank_are_shown_before_it_is_killed(ronde):
    plan, limit = {"2:3": "hang", "1:30": "SIGKILL"}, ("--reform-timeout", "1s")
    result = run(ronde, plan, *limit, last_view=2)
    assert result.returncode == 0, result.stderr
    text = result.stderr.decode()
    first, second = f"rank 1 on {HOST} was killed by SIGKILL", f"rank 2 on {HOST} hung"
    assert f"ronde: {first} and {second} for 1 s; 4 ranks became 2 and go on" in text
    assert f"ronde: rank 2 on {HOST} hung for 1 s; stacks follow" in text
    assert "+-- ronde: where the ranks are, most recent call first" in text
    assert re.search(rf"\| rank 2 on {HOST} \(python\S*, pid \d+\)\n", text)
    assert re.search(r"line \d+ in befall", text)
    assert "in train" in text


def test_a_mistake_of_the_program_ends_the_job_with_its_traceback(ronde):
    raising = {f"{n}:{step}": "raise" for n in range(20) for step in range(3, 9)}
    result = run(ronde, raising, last_view=9)
    assert result.returncode == 1
    text = result.stderr.decode()
    assert "|     ValueError: the program is wrong" in text
    assert text.count("]   File ") <= 3 * 6


@pytest.mark.parametrize(
    ("how", "codes"),
    [
        ("kill -KILL $$", {137}),
        ("kill -STOP $$", {1, 143}),  # rank 0 has ended, or is ended
        # the reaper and the agent
        ("read -r _ _ _ reaper _ < /proc/$PPID/stat; kill -KILL $reaper $PPID", {70}),
    ],
)
def test_a_program_that_takes_no_part_fails_with_a_rank_or_host(ronde, how, codes):
    hosts = ("-H", "localhost:1,127.0.0.2:1", "--failure-domain", "host")
    program = ("--", "/bin/sh", "-c", f'[ "$RANK" = 0 ] || {{ {how}; }}')
    result = ronde("run", *hosts, "--min-ranks", "1", *program)
    assert result.returncode in codes, result.stderr
    assert " before any rank was ready." in lines(result)[0]


def test_a_rank_that_ends_before_it_joins_the_others_ends_the_job(ronde):
    text = f'[ "$RANK" = 1 ] && exit 0; exec "{sys.executable}" {RANK}'
    program = ("--", "/bin/sh", "-c", text)
    env = {"PLAN": "{}", "LAST_VIEW": "1"}
    limits = ("--reform-timeout", "1h", "--elastic-timeout", "1h")
    words = ("-np", "2", "--min-ranks", "1", *limits)
    result = ronde("run", *words, *program, env=env)
    assert result.returncode != 0
    assert lines(result)[0] == (
        f"ronde: worker 1 on {HOST} ended with exit code 0, while the others wait in "
        "hvd.init(). Call it on all ranks."
    )


def test_a_signal_ends_the_job(ronde):
    env = {"PLAN": "{}", "LAST_VIEW": "9"}
    words = ("run", "-np", "2", "--min-ranks", "1", "--grace", "2s", "--")
    text = f'echo ready; exec "{sys.executable}" {RANK}'
    with ronde.start(*words, "/bin/sh", "-c", text, env=env) as process:
        assert process.stdout.readline()
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=HANG_S)
    assert process.returncode == 130


def test_a_spare_takes_the_lost_rank(ronde):
    result = run(ronde, {"1:3": "SIGKILL"}, "--spares", "1", "-H", "localhost:5")
    assert result.returncode == 0, result.stderr
    assert done(result) == [f"done {rank} of 4" for rank in range(4)]
    assert "4 ranks became 4" not in result.stderr.decode()


def test_the_reset_limit_ends_the_job(ronde):
    """The worker that took a rank is named by both."""
    words = ("--reset-limit", "1", "--spares", "1", "-H", "localhost:5")
    result = run(ronde, {"1:3": "SIGKILL", "4:joined": "raise"}, *words, last_view=9)
    assert result.returncode == 1
    assert b"rank 1 (worker 4) failed first, after " in result.stderr
    assert any(
        "exceeded limit: 1, the last time because" in line for line in lines(result)
    )


def test_too_few_ranks_for_too_long_end_the_job(ronde):
    limits = ("--min-ranks", "4", "--elastic-timeout", "1s")
    program = ("--", sys.executable, RANK)
    env = {"PLAN": '{"1:3": "SIGKILL"}', "LAST_VIEW": "9", "START_PLAN": "SIGSTOP"}
    result = ronde("run", "-np", "4", *limits, *program, env=env)
    assert result.returncode == 69, result.stderr
    text = result.stderr.decode()
    assert text.count("3 ranks for 1 s, but --min-ranks is 4: ") == 1


def test_a_host_whose_new_ranks_fail_is_left_out(ronde, tmp_path):
    seen = tmp_path / "seen"
    plan = {"1:3": "SIGKILL"} | {f"{n}:30": f"exit when {seen}" for n in (0, 2, 3)}
    left_out = f"ronde: {HOST} gets no new rank for 30s after 3 failures.\n"
    with run(ronde.start, plan, last_view=9, start="exit 5") as process:
        shown = [process.stderr.readline().decode()]
        while shown[-1] != left_out:
            assert shown[-1], shown
            shown.append(process.stderr.readline().decode())
        seen.touch()
        process.communicate(timeout=HANG_S)
    assert process.returncode == 0
    assert any("exit code 5" in line for line in shown)


def test_a_rank_may_not_leave_early_unnoticed(ronde):
    raising = {f"{n}:{step}": "raise" for n in range(20) for step in range(9, 15)}
    plan = {**raising, "3:3": "exit 0"}
    result = run(ronde, plan, "--cooldown", "1s,1s", last_view=9)
    assert result.returncode == 1


DIVIDED = """
import os, pathlib, signal, time
import torch
import ronde.torch as hvd
from ronde.membership import own_member

hvd.init()
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.Adam(model.parameters()), model.named_parameters(), zero=1
)
data = torch.utils.data.TensorDataset(torch.randn(8, 4))
applied = pathlib.Path("applied")
for step in hvd.elastic.Loop(
    model, optimizer, data, batch=8, epochs=12, copy_every=4
):
    with step:
        if step.number == 7 and own_member().number == 0:
            applied.touch()
        elif step.number == 7:
            while not applied.exists():  # the other has applied as many
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        (inputs,) = step.inputs
        model(inputs).square().sum().backward()
        optimizer.step()
"""


def test_steps_since_the_last_copy_are_said_to_be_lost(ronde, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(DIVIDED)
    words = ("-np", "2", "--min-ranks", "1", "--", sys.executable, str(script))
    result = ronde("run", *words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    first, *_, last = lines(result)
    text = r".*; 2 ranks became 1 and go on from step 4 after .*s, 3 steps lost\."
    assert re.fullmatch(text, first)
    assert last.endswith(" at a standstill, 3 steps lost.")
