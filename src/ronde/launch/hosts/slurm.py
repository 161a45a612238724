"""Start programs on the hosts of a Slurm allocation, by one ``srun`` per host.

``srun`` forwards bytes unbuffered and unchanged in both directions, and also the end of
input. Slurm does not notice an ``srun`` that was killed by SIGKILL: the program must
then exit by itself. Any other signal makes ``srun`` kill the whole step.
"""

from collections.abc import Sequence

from ronde.errors import Failure
from ronde.launch.host import Host
from ronde.launch.hosts.spawner import Spawner, explain_program, last_line

# Nothing else is passed on: Slurm would see the secrets of the environment.
_EXPORTED = "HOME,USER,LOGNAME,SHELL,PATH,LD_LIBRARY_PATH"
_STEP = (
    *("--nodes=1", "--ntasks=1", "--ntasks-per-node=1"),
    "--overlap",  # beside other steps, with all resources of the job there
    "--unbuffered",
    "--cpu-bind=none",
    "--mpi=none",
    "--kill-on-bad-exit=0",
    "--chdir=/",  # the one directory that exists everywhere
    f"--export={_EXPORTED}",
)
# Options of srun in the user's environment that contradict those above, change the
# bytes, or run other programs.
_UNSET = (
    *("LABELIO", "STDINMODE", "STDOUTMODE", "STDERRMODE", "UNBUFFEREDIO", "OPEN_MODE"),
    *("PROLOG", "EPILOG", "TASK_PROLOG", "TASK_EPILOG", "BCAST", "BCAST_EXCLUDE"),
    *("SEND_LIBS", "CONTAINER", "DEBUG", "TEST_EXEC", "TIMELIMIT", "EXIT_ERROR"),
    *("EXACT", "EXCLUSIVE", "HOSTFILE", "DISTRIBUTION", "NTASKS_PER_GPU"),
)
_CLEARED = (
    "env",
    *(word for name in _UNSET for word in ("-u", f"SLURM_{name}")),
    *("-u", "SRUN_DEBUG", "-u", "SRUN_CONTAINER"),
)
_NOT_FOUND = 127
_ERRORS = (
    ("execve()", "its Python is not there", "name the one there with --python"),
    ("Invalid node name", "unknown to Slurm", "scontrol show node {host}"),
    (
        "node configuration is not available",
        "not in this allocation",
        "name hosts that are: scontrol show hostnames",
    ),
    ("nvalid job id", "the allocation is over", "salloc or sbatch a new one"),
)
_WARNING = "cluster configuration lacks support for cpu binding"


class SlurmSpawner(Spawner):
    """Starts programs with ``srun`` inside a Slurm allocation."""

    name = "srun"

    def command(self, host: Host, words: Sequence[str]) -> list[str]:
        return [*_CLEARED, "srun", f"--nodelist={host.name}", *_STEP, "--", *words]

    def explain(self, host: Host, exit_code: int, errors: str) -> Failure:
        lines = [line for line in errors.splitlines() if _WARNING not in line]
        text = "\n".join(lines)
        if exit_code == _NOT_FOUND and "srun" in last_line(text):
            return Failure(f"srun is not there: {last_line(text)}", "name --launcher")
        for words, reason, cure in _ERRORS:
            for line in lines:
                if words in line:
                    return Failure(
                        f"{reason}: {last_line(line)}", cure.format(host=host.name)
                    )
        return explain_program(exit_code, text)
