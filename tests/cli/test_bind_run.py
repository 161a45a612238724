"""``ronde run --bind``, ``--gpu-view`` and ``--dry-run``, with ranks that tell."""

import os
import sys

import pytest

ALLOWED = sorted(os.sched_getaffinity(0))

TELL = (
    "import os; print(sorted(os.sched_getaffinity(0)), "
    "os.environ['OMP_NUM_THREADS'], os.environ.get('CUDA_VISIBLE_DEVICES'))"
)

needs_two_cpus = pytest.mark.skipif(
    len(ALLOWED) != 2, reason="what is expected here is counted for two CPUs"
)


def told(ronde, *options: str, env: dict[str, str] | None = None) -> list[str]:
    """Return what each rank tells, by rank."""
    words = ("run", *options, "--", sys.executable, "-c", TELL)
    done = ronde(*words, env={"CUDA_VISIBLE_DEVICES": ""} | (env or {}))
    assert done.returncode == 0, done.stderr.decode()
    return sorted(done.stdout.decode().splitlines())


@needs_two_cpus
@pytest.mark.parametrize("mode", ["core", "auto"])
def test_each_rank_has_a_core_of_its_own(ronde, mode):
    first, second = ALLOWED
    lines = told(ronde, "-n", "2", "--bind", mode)
    assert lines == [f"[0] [{first}] 1 ", f"[1] [{second}] 1 "]


@needs_two_cpus
def test_more_ranks_than_cores_share_them_and_that_is_said(ronde):
    words = ("run", "-n", "3", "--bind", "core", "--", sys.executable, "-c", TELL)
    done = ronde(*words, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0
    assert b"3 ranks share 2 cores." in done.stderr
    assert done.stdout.count(f"{ALLOWED} 1".encode()) == 3


def test_each_rank_sees_its_own_of_the_visible_gpus(ronde):
    visible = {"CUDA_VISIBLE_DEVICES": "GPU-a,MIG-b"}
    lines = told(ronde, "-n", "2", "--gpu-view", "one", env=visible)
    assert [line.rsplit(maxsplit=1)[1] for line in lines] == ["GPU-a", "MIG-b"]
    lines = told(ronde, "-n", "2", "--bind", "core", env=visible)
    assert {line.rsplit(maxsplit=1)[1] for line in lines} == {"GPU-a,MIG-b"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--bind socket", "--bind must be none, core, numa or auto, got 'socket'."),
        (
            "--bind core --bind-policy strict",
            "--bind-policy must be best-effort, restricted or single-numa-node, got",
        ),
        (
            "--bind-policy restricted",
            "numa or auto. Type: --bind numa --bind-policy restricted",
        ),
        ("--gpu-view two", "--gpu-view must be all or one, got 'two'."),
        ("--gpu-view one", "--gpu-view one needs a GPU for each rank"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(ronde, options, reason):
    words = ("run", "-n", "2", *options.split(), "--", "echo", "started")
    done = ronde(*words, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 64
    assert reason in done.stderr.decode()
    assert done.stdout == b""


def test_a_dry_run_shows_the_plan_and_starts_nothing(ronde, tmp_path):
    mark = tmp_path / "started"
    words = ("run", "-n", "2", "--dry-run", "--bind", "core", "-x", "MY_TOKEN=hunter2")
    done = ronde(
        *words, "--", "touch", str(mark), env={"CUDA_VISIBLE_DEVICES": "GPU-a"}
    )
    text = done.stdout.decode()
    assert done.returncode == 0, done.stderr.decode()
    assert text.startswith("2 ranks on 1 host, meeting at 127.0.0.1: touch ")
    rows = [line.split() for line in text.splitlines()[3:5]]
    assert [row[:3] for row in rows] == [
        [os.uname().nodename, "0", "0"],
        [os.uname().nodename, "1", "1"],
    ]
    assert "  WORLD_SIZE=2\n" in text
    assert "  RANK: 0-1\n" in text
    assert "2 ranks and fewer GPUs, 1" in text
    assert "hunter2" not in text
    assert text.endswith("Nothing was started.\n")
    assert not mark.exists()


def test_a_dry_run_shows_the_hosts_that_are_kept_out(ronde, tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=1\nn8 slots=0\nn9:0\n")
    done = ronde("run", "--hostfile", str(hostfile), "--dry-run", "--", "true")
    said = f"n8 ({hostfile} line 2), n9 ({hostfile} line 3)."
    assert f"\nnote: not used, with 0 slots: {said}\n" in done.stdout.decode()
