"""Well-known options of other launchers, and the options of ronde that replace them.

Source: ``torchrun --help`` (2.13), mpirun(1) of Open MPI 5, ``mpiexec --help`` of
MPICH 5, srun(1), and ``deepspeed --help``, ``accelerate launch --help`` of 2026.
"""

_TABLE = """\
torchrun: rdzv-backend rdzv-endpoint rdzv-id rdzv-conf node-rank
accelerate: machine-rank main-process-ip same-network
deepspeed: no-ssh
  Name all hosts with -H, or have the nodes join with --listen and --agent.
torchrun: master-addr local-addr
  Drop it: ronde chooses an address all hosts reach; --interface NAMES restricts it.
torchrun: shutdown-timeout
  Type --grace TIME.
torchrun: virtual-local-rank
srun: gpus-per-task
  Type --gpu-view one.
torchrun: signals-to-handle
  Drop it: SIGUSR1 and SIGUSR2 are passed on anyway.
torchrun: role monitor-interval start-method event-log-handler logs-specs run-path
  It has no equivalent here: drop it.
mpirun: map-by
  Type --nproc-per-node N for the ranks of each host.
mpirun: bind-to membind
srun: cpu-bind
torchrun: numa-binding
deepspeed: bind-cores-to-rank bind-core-list
  Type --bind core or --bind numa.
mpirun: rank-by rankfile rankmap
  It has no equivalent here: ranks follow the list of hosts.
mpirun: oversubscribe overcommit nooversubscribe
  Drop it: a host takes the slots that it is given, as -H localhost:8.
mpirun: allow-run-as-root
  Drop it: root may start ranks.
mpirun: mca prtemca pmixmca gmca
  Open MPI reads such settings from variables: type -x OMPI_MCA_name=value.
mpirun: prefix
  Type --python PATH for the Python on the other hosts.
mpirun: tag-output prepend-rank
srun: l label
  Drop it: each line begins with its rank; see --tag.
mpirun: timestamp-output
  Type --tag time.
torchrun: r redirects duplicate-stdout-filters duplicate-stderr-filters
mpirun: output outfile-pattern errfile-pattern
srun: o e error
deepspeed: enable-each-rank-log
  Type --log-dir DIR for files of all output, --only RANKS for what is shown.
mpirun: report-bindings display display-map display-allocation do-not-launch
  Type --dry-run.
mpirun: get-stack-traces report-state-on-timeout
  Drop it: --timeout TIME shows the stacks of all ranks.
mpirun: genv genvlist envlist
srun: export
  Type -x NAME=VALUE or -x NAME.
mpirun: genvall envall genvnone envnone
  Type -x NAME for what is missing.
mpirun: print-all-exitcodes
  Drop it: type --error-file FILE for all codes.
srun: w nodelist
srun or deepspeed: exclude
  Type -H HOSTS with those that the ranks may use.
srun: time
  Type --timeout TIME.
srun: c cpus-per-task
  Type --bind core, or -x OMP_NUM_THREADS=N for the threads of a rank.
srun or deepspeed: G gpus gpus-per-node num-gpus num-accelerators
  Type --nproc-per-node N, one rank a GPU.
srun: A J q partition account job-name qos mem exclusive
  Give it to salloc or sbatch, and type ronde run inside the allocation.
deepspeed: include
  Type -H HOSTS, or write gpus=0,2 behind a host in a host file.
deepspeed: launcher-args
  Type --ssh-args ARGS.
deepspeed: elastic-training min-elastic-nodes max-elastic-nodes
  Type --nodes A:B --nproc-per-node N.
srun: K kill-on-bad-exit wait W u unbuffered overlap
deepspeed: no-local-rank force-multi no-ssh-check save-pid
  Drop it: it changes nothing here.
accelerate: main-process-port
  Type --master-port PORT.
accelerate: gpu-ids
  Set CUDA_VISIBLE_DEVICES before ronde run.
accelerate: num-cpu-threads-per-process
  Type -x OMP_NUM_THREADS=N.
accelerate: multi-gpu cpu tpu
  Drop it: the program chooses its device.
accelerate: mixed-precision use-fsdp use-deepspeed dynamo-backend
  It has no equivalent here: the program sets that itself.
"""


def advise(word: str) -> str:
    """Return advice about another launcher's option; empty if it is unknown."""
    name, _, value = word.partition("=")
    if name.startswith("-N"):
        number = value or name[2:] or "N"
        return (
            "-N is ranks per host to mpirun and hosts to srun. Type --nproc-per-node "
            f"{number} or --nnodes {number}."
        )
    is_short = len(name) == 2
    bare = name[1:] if is_short else name.lstrip("-").replace("_", "-")
    launcher = ""
    for line in _TABLE.splitlines():
        if not line.startswith(" "):
            source, names = line.split(": ")
            launcher = source if bare in names.split() else launcher
        elif launcher:
            return f"{name} is an option of {launcher}. {line.strip()}"
    return ""
