import json
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.limits import HANG_S

from ronde.cli import read_run_request
from ronde.errors import UsageError

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


def variables(*words, environ=()):
    """Return what all ranks are told with these words before their program."""
    return read_run_request([*words, "train.py"], dict(environ)).spec.env


def horovodrun(*words, env):
    return subprocess.run(
        [sys.executable, "-m", "ronde", "horovodrun", *words],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


SETTING = {
    "--fusion-threshold-mb 64": ("FUSION_THRESHOLD", str(64 << 20)),
    "--cycle-time-ms 2.5": ("CYCLE_TIME", "2.5"),
    "--cache-capacity 0": ("CACHE_CAPACITY", "0"),
    "--hierarchical-allreduce": ("HIERARCHICAL_ALLREDUCE", "1"),
    "--no-hierarchical-allgather": ("HIERARCHICAL_ALLGATHER", "0"),
    "--torus-allreduce": ("TORUS_ALLREDUCE", "1"),
    "--autotune": ("AUTOTUNE", "1"),
    "--no-autotune": ("AUTOTUNE", "0"),
    "--autotune-log-file a.csv": ("AUTOTUNE_LOG", "a.csv"),
    "--autotune-warmup-samples 1": ("AUTOTUNE_WARMUP_SAMPLES", "1"),
    "--autotune-steps-per-sample=2": ("AUTOTUNE_STEPS_PER_SAMPLE", "2"),
    "--autotune-bayes-opt-max-samples 3": ("AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "3"),
    "--timeline-filename t.json": ("TIMELINE", "t.json"),
    "--timeline-mark-cycles": ("TIMELINE_MARK_CYCLES", "1"),
    "--no-stall-check": ("STALL_CHECK_DISABLE", "1"),
    "--stall-check": ("STALL_CHECK_DISABLE", "0"),
    "--stall-check-warning-time-seconds 5": ("STALL_CHECK_TIME_SECONDS", "5"),
    "--stall-check-shutdown-time-seconds 9": ("STALL_SHUTDOWN_TIME_SECONDS", "9"),
    "--thread-affinity 1": ("THREAD_AFFINITY", "1"),
    "--gloo-timeout-seconds 7": ("GLOO_TIMEOUT_SECONDS", "7"),
    "--log-level DEBUG": ("LOG_LEVEL", "DEBUG"),
    "--start-timeout 8": ("START_TIMEOUT", "8"),
    "--reset-limit 3": ("RESET_LIMIT", "3"),
}


def test_options_become_variables() -> None:
    told = variables(*[word for option in SETTING for word in option.split()])
    # Of an option and its opposite the later one counts.
    expected = dict(SETTING.values())
    assert {n: told[f"HOROVOD_{n}"] for n in expected} == expected


@pytest.mark.parametrize("option", ["--network-interfaces", "--network-interface"])
def test_interfaces_reach_those_who_open_sockets(ronde, option) -> None:
    done = ronde(
        *("run", "-n", "1", "--no-prefix", option, "eth0,eth1"),
        *(sys.executable, "-c", SHOW),
        env={"NCCL_SOCKET_IFNAME": "ib0"},
    )
    told = json.loads(done.stdout)
    names = ("HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    assert [told[name] for name in names] == ["eth0,eth1", "eth0,eth1", "ib0"]


def test_what_changes_nothing_is_named_in_one_line(ronde) -> None:
    words = "--tcp"
    words += " --blacklist-cooldown-range 1 2 --disable-cache -prefix-timestamp"
    words += " --mpi-args=-x --elastic-timeout 3 --log-without-timestamp --jsrun"
    done = ronde("run", "-n", "1", *words.split(), "/bin/true")
    assert done.returncode == 0
    [line] = done.stderr.decode().splitlines()
    assert line.startswith("ronde: these options have no effect here: --mpi-args, ")
    for name in ("blacklist-cooldown-range", "jsrun", "elastic-timeout"):
        assert f"--{name}" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gloo --mpi", "--gloo cannot be combined with --mpi"),
        ("--config-file /no/such", "given with --config-file"),
        ("--cycle-time-ms x", "HOROVOD_CYCLE_TIME must be a number of at least 0"),
        ("-x HOROVOD_AUTOTUNE=maybe", "HOROVOD_AUTOTUNE must be 1 or 0, got 'maybe'"),
        ("--fusion-threshold-mb x", "must be a whole number of at least 0, got 'x'"),
        (
            "--output-filename a --log-dir b",
            "--output-filename cannot be combined with",
        ),
    ],
)
def test_bad_options_are_refused(words, message) -> None:
    with pytest.raises(UsageError) as refused:
        variables("-n", "1", *words.split())
    assert message in str(refused.value)


def test_hosts_give_the_number_of_ranks(ronde, tmp_path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"# ours\n{socket.gethostname()} slots=3\n")
    script = tmp_path / "discover"
    script.write_text("echo 127.0.0.1\n")
    script.chmod(0o700)
    for words in (
        ("-H", "localhost,localhost,localhost"),
        ("--hostfile", str(hostfile)),
        ("--host-discovery-script", str(script), "--slots-per-host", "3"),
    ):
        done = ronde("run", "--no-prefix", *words, "/bin/sh", "-c", "echo $WORLD_SIZE")
        assert done.stdout == b"3\n3\n3\n", done.stderr


def test_the_slots_that_there_are_suffice_where_min_np_says_so(ronde) -> None:
    options = ("-np", "3", "--min-np", "1", "--no-prefix", "-H", "localhost:2")
    done = ronde("run", *options, "/bin/sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [b"0 of 2", b"1 of 2"]
    assert done.stderr.decode() == (
        "ronde: 2 ranks start, not 3: there are 2 slots, and --min-ranks is 1.\n"
    )


def test_too_few_slots_are_refused_in_horovods_words(ronde_here) -> None:
    words = ["-np", "4", "--min-np", "3", "-H", "localhost:2"]
    done = ronde_here("run", *words, "/bin/echo", "ran")
    assert (done.returncode, done.stdout) == (64, b"")
    assert b"processes (3) than there are available" in done.stderr


def test_output_is_found_where_horovodrun_puts_it(ronde, tmp_path) -> None:
    out = tmp_path / "out"
    program = "echo out $RANK; echo err $RANK >&2"
    for _ in range(2):  # the second time over the first one's
        done = ronde(
            *("run", "-np", "11", "--output-filename", str(out)),
            *("/bin/sh", "-c", program),
        )
        assert done.returncode == 0, done.stderr
    assert (out / "rank.03" / "stdout").read_text() == "out 3\n"
    assert (out / "rank.10" / "stderr").read_text() == "err 10\n"


CONFIG = """
controller: gloo
params:
  fusion_threshold_mb: 32
  hierarchical_allreduce: true
autotune:
  enabled: true
  log_file: 'a b.csv'
timeline: {filename: t.json, mark_cycles: true}
stall_check:
  enabled: false
  warning_time_seconds: 120
library_options: {num_nccl_streams: 2, gloo_timeout_seconds: 60}
logging: {level: INFO, hide_timestamp: true}
"""


def test_a_configuration_file_gives_what_options_do_not(tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    told = variables(
        "--config-file", str(path), "--fusion-threshold-mb", "8", "--no-autotune"
    )
    expected = {
        "FUSION_THRESHOLD": str(8 << 20),
        "HIERARCHICAL_ALLREDUCE": "1",
        "AUTOTUNE": "0",
        "AUTOTUNE_LOG": "a b.csv",
        "TIMELINE": "t.json",
        "TIMELINE_MARK_CYCLES": "1",
        "STALL_CHECK_DISABLE": "1",
        "STALL_CHECK_TIME_SECONDS": "120",
        "GLOO_TIMEOUT_SECONDS": "60",
        "LOG_LEVEL": "INFO",
    }
    assert {n: told[f"HOROVOD_{n}"] for n in expected} == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "may only have the sections"),
        ("wrong: {a: 1}", "may only have the sections"),
        (
            "params: {no_such: 1}",
            "has params.no_such=1, which is not an option",
        ),
        ("params: 3", "has params.=3, which is not an option"),
        ("controller: tcp", "has controller.=tcp"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_a_bad_configuration_file_is_refused(tmp_path, text, message) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        variables("--config-file", str(path))
    assert message in str(refused.value)


@pytest.fixture
def env(tmp_path):
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": str(tmp_path),
    }


def test_horovodrun_says_what_it_was_taken_for(env) -> None:
    done = horovodrun("-np", "2", "/bin/sh", "-c", "echo $HOROVOD_RANK\n", env=env)
    assert (done.returncode, sorted(done.stdout.split("\n"))[1:]) == (
        0,
        ["[0] 0", "[1] 1"],
    )
    expected = r"horovodrun: runs ronde run -np 2 /bin/sh -c 'echo $HOROVOD_RANK\n'"
    assert done.stderr == f"{expected}\n"


@pytest.mark.parametrize("word", ["-v", "--version", "-h", "--help"])
def test_horovodrun_says_what_it_is(ronde_here, word) -> None:
    done = ronde_here("horovodrun", word)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"ronde" in done.stdout


def test_check_build_is_as_horovods_and_true(env) -> None:
    done = horovodrun("--check-build", env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert "    [X] PyTorch\n" in done.stdout
    mark = "X" if find_spec("tensorflow") else " "
    assert f"    [{mark}] TensorFlow\n" in done.stdout
    assert "    [X] Gloo\n" in done.stdout
