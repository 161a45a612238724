import os
import socket
import stat
import subprocess
import sys

import pytest
from tests.cli.conftest import clean_environment
from tests.limits import HANG_S

import ronde as package
from ronde.world import ALGORITHMS, ENGINES


def write(path, text, mode=0o755):
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize("words", [(), ("--help",), ("help",)])
def test_help(ronde_here, words):
    done = ronde_here(*words)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"run    start a program once for every slot" in done.stdout


def test_help_of_run_names_what_there_is(ronde_here):
    text = " ".join(ronde_here("run", "--help").stdout.decode().split())
    # MPI starts its ranks itself.
    assert ", ".join(name for name in ENGINES if name != "mpi") in text
    assert ", ".join(ALGORITHMS) in text


def test_help_of_run_waits_for_no_parser():
    code = (
        "import sys; from ronde.cli import main; main(['run', '--help']); "
        "sys.exit('argparse' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=HANG_S)
    assert done.returncode == 0


def test_version(ronde_here):
    assert ronde_here("--version").stdout.decode() == f"ronde {package.__version__}\n"


def test_the_programs_own_options_are_its_own(ronde):
    done = ronde("run", "-n", "1", "/bin/echo", "-n", "--help", "--", "x")
    assert done.stdout == b"[0] --help -- x\n"


def test_the_exit_code_of_the_rank_is_ours(ronde):
    program = "[ $RANK = 1 ] && exit 255; exit 0"
    assert ronde("run", "-n", "2", "--", "/bin/sh", "-c", program).returncode == 255


@pytest.mark.parametrize(("name", "code"), [("SEGV", 139), ("KILL", 137)])
def test_a_signal_is_128_and_its_number(ronde, name, code):
    done = ronde("run", "-n", "1", "--", "/bin/sh", "-c", f"kill -{name} $$")
    assert done.returncode == code
    assert f"killed by SIG{name}".encode() in done.stderr


def test_a_python_file_needs_no_interpreter_before_it(ronde, tmp_path):
    write(tmp_path / "a.py", "import sys; print(sys.executable, sys.argv[1])", 0o644)
    for program in (f"{tmp_path}/a.py", "./a.py", "a.py"):
        done = ronde("run", "-n", "1", program, "x", cwd=tmp_path)
        assert done.stdout.decode() == f"[0] {sys.executable} x\n"


def test_a_program_is_found_on_the_path_of_the_ranks(ronde, tmp_path):
    write(tmp_path / "prog", "#!/bin/sh\necho found\n")
    done = ronde("run", "-n", "1", "prog", env={"PATH": str(tmp_path)})
    assert done.stdout == b"[0] found\n"


def usage_error(done) -> str:
    """Return the one sentence that a usage error is."""
    said = done.stderr.decode()
    assert (done.returncode, done.stdout) == (64, b""), said
    assert said.startswith("ronde: ")
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["-n", "0", "true"], "-n must be a whole number of at least 1, got"),
        (["-n", "2.0", "true"], "-n must be a whole number of at least 1, got"),
        (
            ["-H", "localhost:1", "--nproc-per-node", "2", "true"],
            "localhost (-H) has 1.",
        ),
        (
            ["--launcher", "x", "true"],
            "--launcher must be auto, ssh, slurm or ray, got",
        ),
        (["-n", "2"], "a program is required"),
        (["-n", "2", "--"], "a program is required"),
        (["no-such-program"], "is neither a file nor a command on PATH"),
        (["/no/such/program"], "'/no/such/program' does not exist"),
        (["/"], "'/' is a directory"),
        (["--chdir", "/no/such/dir", "true"], "cannot enter --chdir '/no/such/dir'"),
        (["--log-dir", "/proc/no", "true"], "cannot write to --log-dir '/proc/no'"),
        (["--grace", "soon", "true"], "--grace"),
        (
            ["--master-port", "70000", "true"],
            "--master-port must be a whole number from",
        ),
        (["-x", "NOT_SET_ANYWHERE", "true"], "-x must be NAME=VALUE"),
    ],
)
def test_bad_words_get_one_sentence(ronde_here, words, complaint):
    assert complaint in usage_error(ronde_here("run", *words))


def test_an_unknown_verb_gets_one_sentence(ronde):
    assert "ronde run train.py" in usage_error(ronde("train.py"))


def test_a_program_that_may_not_run_is_told_how_to(ronde_here, tmp_path):
    program = write(tmp_path / "prog", "#!/bin/sh\n", 0o644)
    assert f"chmod +x {program}" in usage_error(ronde_here("run", program))
    assert "Did you mean ./prog?" in usage_error(
        ronde_here("run", "prog", cwd=tmp_path)
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has files of other users")
@pytest.mark.parametrize(
    ("name", "mode", "folder_mode", "what"),
    [("p", 0o700, 0o755, "run"), ("p.py", 0o600, 0o755, "read"), ("p", 0, 0, "reach")],
)
def test_a_program_of_another_user_is_told_so(tmp_path, name, mode, folder_mode, what):
    folder = tmp_path / "own"
    folder.mkdir()
    program = write(folder / name, "#!/bin/sh\n", mode)
    for path in (program, folder):
        os.chown(path, 65534, 65534)
    folder.chmod(folder_mode)
    # A root that no mode is set aside for, as on a shared disk.
    plain = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--"]
    words = [*plain, sys.executable, "-m", "ronde", "run", program]
    done = subprocess.run(words, capture_output=True, timeout=HANG_S, check=False)
    assert f"may not {what} program {program!r}" in usage_error(done)


def test_a_file_that_is_no_program_is_refused(ronde, tmp_path):
    program = write(tmp_path / "prog", "no program")
    assert "Exec format error" in usage_error(ronde("run", program))


def test_a_port_in_use_is_refused(ronde_here):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = ronde_here("run", "--master-port", str(port), "true")
    assert f"{port} is not free on 127.0.0.1: address already in use" in usage_error(
        done
    )


def test_a_port_that_is_free_is_taken(ronde):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = ("--", "/bin/sh", "-c", "echo $MASTER_PORT")
    done = ronde("run", "-n", "1", "--master-port", str(port), *words)
    assert done.stdout.decode() == f"[0] {port}\n"


RANKS_OF_OTHERS = {
    "ronde": {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}
    | {"LOCAL_WORLD_SIZE": "4", "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    | {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "RONDE_JOB_ID": "j"},
    "torchrun": {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}
    | {"LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    | {"TORCHELASTIC_RUN_ID": "j"},
    "openmpi": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
    | {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
}


@pytest.mark.parametrize("launcher", RANKS_OF_OTHERS)
def test_inside_another_world_it_starts_none_by_mistake(ronde, launcher):
    env = RANKS_OF_OTHERS[launcher]
    said = usage_error(ronde("run", "-n", "2", "true", env=env))
    assert "4 * 2 = 8 processes would start in 4 worlds, not 2 in one" in said
    assert f"started by rank 0 of 4 of {launcher}" in said
    assert "--nested" in said
    program = ("--", "/bin/sh", "-c", "echo $RANK/$WORLD_SIZE${OMPI_COMM_WORLD_SIZE}")
    done = ronde("run", "-n", "2", "--nested", *program, env=env)
    assert sorted(done.stdout.splitlines()) == [b"[0] 0/2", b"[1] 1/2"]


def test_half_an_environment_is_refused(ronde_here):
    done = ronde_here("run", "-n", "2", "true", env={"RANK": "0"})
    assert "--nested" in usage_error(done)


def test_log_files_hold_what_was_written_and_are_the_users_alone(ronde, tmp_path):
    program = "printf 'out\\377\\r\\n%s' $RANK; printf err >&2"
    logs = tmp_path / "new" / "logs"
    done = ronde(
        *("run", "-n", "2", "--log-dir", str(logs), "--", "/bin/sh", "-c", program)
    )
    assert done.returncode == 0
    (job,) = logs.iterdir()
    for rank in range(2):
        own = job / "attempt_0" / str(rank)
        assert (own / "stdout.log").read_bytes() == b"out\xff\r\n%d" % rank
        assert (own / "stderr.log").read_bytes() == b"err"
        assert stat.S_IMODE(own.stat().st_mode) == 0o700
        assert stat.S_IMODE((own / "stdout.log").stat().st_mode) == 0o600
    assert stat.S_IMODE(job.stat().st_mode) == 0o700


def test_a_failure_says_where_the_files_are(ronde, tmp_path):
    words = ("--log-dir", str(tmp_path), "--", "/bin/sh", "-c", "echo why >&2; exit 3")
    done = ronde("run", "-n", "1", *words)
    (job,) = tmp_path.iterdir()
    said = done.stderr.decode()
    assert said.startswith("[0] why\n+-- ronde: the job failed, exit code 3 ")
    assert "exit code 3" in said
    assert "\n|     why\n" in said
    assert f"| logs:            {job}/attempt_0\n" in said


def test_neither_launcher_nor_agent_waits_for_torch_or_elastic_parts():
    code = (
        "import sys, ronde.cli.run, ronde.launch.agent\n"
        "others = {'torch', 'numpy', 'asyncio'}\n"
        "elastic = ('ronde.membership', 'ronde.launch.job.elastic')\n"
        "print([m for m in sys.modules if m in others or m.startswith(elastic)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, timeout=HANG_S
    )
    assert done.stdout == b"[]\n"


FOR_FEW_JOBS = (
    *("cli.check", "cli.elastic", "cli.horovodrun", "launch.hosts.sources"),
    *("launch.hosts.spawner", "launch.network", "launch.wire.tls", "membership"),
    *("render.job", "timeline", "topology.placement", "world.horovod_config"),
)


def test_a_small_job_imports_nothing_that_others_need(ronde):
    python, *words = ronde.command("run", "-n", "3", "--", "/bin/true")
    done = subprocess.run(
        [python, "-X", "importtime", *words],
        env=clean_environment(),
        stderr=subprocess.PIPE,
        timeout=HANG_S,
        check=True,
    )
    lines = done.stderr.decode().splitlines()
    loaded = {line.rpartition("|")[2].strip() for line in lines}
    assert "ronde.launch.job.controller" in loaded
    assert not loaded & {f"ronde.{name}" for name in FOR_FEW_JOBS}
    assert not loaded & {"fractions", "shutil", "ssl", "tempfile", "torch"}


def test_a_closed_standard_output_is_no_harm(ronde):
    command = ronde.command(
        "run", "-n", "2", "--nested", "/bin/sh", "-c", "echo x; exit 3"
    )
    done = subprocess.run(
        ["/bin/sh", "-c", '"$@" >&-', "sh", *command],
        env=clean_environment(),
        stderr=subprocess.PIPE,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 3, done.stderr


def test_the_engine_is_told_to_the_ranks(ronde):
    options = ("--engine", "scheduled", "--algorithm", "tree")
    done = ronde(
        *("run", "-n", "1", *options, "--", "/bin/sh", "-c"),
        "echo $RONDE_ENGINE $RONDE_ALGORITHM",
        env={"RONDE_ENGINE": "gloo"},
    )
    assert done.stdout == b"[0] scheduled tree\n"


@pytest.mark.parametrize(
    ("options", "env", "said"),
    [
        (("--engine", "gluu"), {}, b"--engine must be one of auto, shared_memory,"),
        (("--algorithm", "star"), {}, b"--algorithm must be one of ring, tree,"),
        ((), {"RONDE_ENGINE": "gluu"}, b"RONDE_ENGINE must be one of auto,"),
        (("-x", "RONDE_ENGINE=gluu"), {}, b"RONDE_ENGINE must be one of auto,"),
    ],
)
def test_an_unknown_engine_starts_nothing(ronde_here, tmp_path, options, env, said):
    flag = tmp_path / "started"
    program = ("--", "/usr/bin/touch", str(flag))
    done = ronde_here("run", "-n", "1", *options, *program, env=env)
    assert done.returncode == 64
    assert said in done.stderr
    assert not flag.exists()
