import json
import os
import signal
import sys
from pathlib import Path

from tests.limits import HANG_S

from ronde.launch import base_environment
from ronde.topology import count_cores
from ronde.world import Launcher, read_rank_info

DUMP = """
import json, os
store = os.stat(os.path.dirname(os.environ["RONDE_STORE"]))
print(json.dumps({"env": dict(os.environ), "umask": 0, "cwd": os.getcwd(),
                  "sid": os.getsid(0), "pid": os.getpid(),
                  "store_mode": store.st_mode & 0o777}))
"""

# The contract's list: torchrun's names, those of further front ends, Horovod's, ours.
SAME_FOR_ALL = {
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "LOCAL_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "NODE_RANK": "0",
    "CROSS_RANK": "0",
    "CROSS_SIZE": "1",
    "ROLE_NAME": "default",
    "ROLE_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "PYTHONUNBUFFERED": "1",
    "HOROVOD_HOSTNAME": os.uname().nodename,
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "0",
    "HOROVOD_CROSS_SIZE": "1",
    "RONDE_EPOCH": "0",
    "RONDE_HOST": os.uname().nodename,
    "RONDE_NODE_RANK": "0",
}
OWN_NUMBER = ("RANK", "LOCAL_RANK", "ROLE_RANK", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK")
ONE_VALUE = (
    "MASTER_PORT",
    "RONDE_STORE",
    "TORCHELASTIC_RUN_ID",
    "RONDE_JOB_ID",
    "RONDE_COOKIE",
)


def dump(ronde, *options, env=None):
    done = ronde(
        *("run", "-n", "2", "--no-prefix", *options, "--", sys.executable, "-c", DUMP),
        env=env,
    )
    assert done.returncode == 0, done.stderr.decode()
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return sorted(found, key=lambda rank: rank["env"]["RANK"])


def test_each_rank_gets_the_whole_contract(ronde):
    ranks = dump(ronde)
    for number, rank in enumerate(ranks):
        env = rank["env"]
        assert {name: env.get(name) for name in SAME_FOR_ALL} == SAME_FOR_ALL
        assert {env[name] for name in OWN_NUMBER} == {str(number)}
        assert env["OMP_NUM_THREADS"] == str(max(1, count_cores() // 2))
        assert "TORCHELASTIC_ERROR_FILE" not in env
        # Its own session: the terminal's signals come through the launcher only.
        assert rank["sid"] == rank["pid"]
        node_info = read_rank_info(env)
        assert (node_info.launcher, node_info.rank, node_info.size) == (
            Launcher.RONDE,
            number,
            2,
        )
    first, second = (rank["env"] for rank in ranks)
    assert all(first[name] == second[name] != "" for name in ONE_VALUE)
    assert first["TORCHELASTIC_RUN_ID"] == first["RONDE_JOB_ID"]
    # It was this user's alone, and went with the job.
    assert {rank["store_mode"] for rank in ranks} == {0o700}
    assert not Path(first["RONDE_STORE"]).parent.exists()


def test_the_port_lies_below_the_ephemeral_ones(ronde):
    port = int(dump(ronde)[0]["env"]["MASTER_PORT"])
    ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    assert 1024 <= port < int(ephemeral.split()[0])


def test_the_users_own_words_win(ronde):
    words = {"OMP_NUM_THREADS": "7", "KEPT": "a b\n'$(c)\"", "RONDE_ENGINE": "gloo"}
    ranks = dump(ronde, "-x", "ADDED=1=2", "-x", "KEPT", env=words)
    for rank in ranks:
        expected = words | {"ADDED": "1=2"}
        assert {name: rank["env"].get(name) for name in expected} == expected


def test_what_is_no_text_is_passed_on_byte_for_byte(ronde):
    code = "import os; print(os.environb[b'RAW'], flush=True)"
    done = ronde(
        *("run", "-n", "1", "--", sys.executable, "-c", code), env={"RAW": "\udcff"}
    )
    assert done.stdout == b"[0] b'\\xff'\n"


def test_other_launchers_words_are_taken_away():
    foreign = {
        "OMPI_COMM_WORLD_RANK": "1",
        "PMIX_RANK": "1",
        "PMI_SIZE": "4",
        "MPI_LOCALRANKID": "1",
        "HYDI_CONTROL_FD": "5",
        "SLURM_PROCID": "1",
        "SLURM_NTASKS": "4",
        "TORCHELASTIC_ERROR_FILE": "/tmp/x",  # noqa: S108 - only a word here
        "RONDE_COOKIE": "old",
    }
    kept = {"SLURM_JOB_ID": "7", "PATH": "/bin", "RONDE_ENGINE": "solo"}
    assert base_environment(foreign | kept) == kept


def test_what_a_killed_agent_and_its_reaper_leave_is_gone_after_the_next_job(ronde):
    """The reaper removes it, if it may; nobody does where both are killed."""
    code = "import os, time; print(os.environ['RONDE_STORE'], flush=True); "
    words = ("run", "-n", "1", "--no-prefix", "--", sys.executable, "-c")
    for num_victims in (1, 2):
        with ronde.start(*words, code + "time.sleep(600)") as process:
            path = Path(process.stdout.readline().decode().strip())
            reaper = only_child(process.pid, "agent")
            agent = only_child(reaper, "agent")
            if num_victims == 2:
                os.kill(reaper, signal.SIGSTOP)  # or it may remove it in between
                path.parent.chmod(0o755)  # or a job of another test may: it is private
            for pid in (agent, reaper)[:num_victims]:
                os.kill(pid, signal.SIGKILL)
            process.communicate(timeout=HANG_S)
            assert process.returncode != 0
        is_left = path.exists()
        assert is_left is (num_victims == 2)
    path.parent.chmod(0o700)
    assert ronde(*words, "pass").returncode == 0
    assert not path.parent.exists()


def only_child(pid, word):
    """Return the child of a process that has a word among its own."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    words = {c: Path(f"/proc/{c}/cmdline").read_bytes() for c in children}
    (found,) = (int(c) for c in children if word.encode() in words[c])
    return found
