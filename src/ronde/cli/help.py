"""The help of ``ronde`` and ``ronde run``, and options that several commands have.

The lines of options are their declarations, too: see ``ronde.arguments``. Nothing is
imported here, so that help is shown at once.
"""

HELP = """\
usage: ronde VERB ...

ronde runs one training program on every GPU or CPU slot and keeps the copies in step.

verbs:
  run    start a program once for every slot of one host or of many
  ps     list the jobs that run here, and what their ranks do now
  bench  measure collectives and training steps; read others' results
  trace  show which rank waited for which, from a job's timeline
  check  show which hosts are ready, what is wrong on the others, and how to fix it
  topo   show how a machine's GPUs, adapters and cores are connected, and how fast
  plan   show what a layout of ranks needs in memory and traffic, before a start
  alias  let every Python of this environment import ronde as horovod
  horovodrun  run, with horovodrun's options

ronde VERB --help shows more about a verb; ronde --version shows the version.
"""

HOST_OPTIONS = """\
hosts:
  -H, --hosts HOSTS     hosts and their slots, as a:4,b:4 or gpu[01-16]:8;
                        without a number one slot per GPU, else one, or one
                        per core of the only host (default: Slurm's
                        allocation, else this machine)
  --hostfile, -hostfile FILE
                        file with one host per line, as a slots=4; the formats
                        of Horovod, Open MPI, MPICH and DeepSpeed work too
  --host-discovery WHAT
                        command that prints such lines, or file that holds
                        them; ronde run follows its changes
  --host-discovery-script WHAT
                        the same, as horovodrun has it
  --slots, --slots-per-host N
                        slots of each host that has no number of its own
"""

SSH_OPTIONS = """\
other hosts:
  --launcher NAME       how to start programs on other hosts: ssh, slurm
                        (srun) or auto: slurm for the hosts of its
                        allocation, else ssh (default: auto)
  --ssh-args ARGS ...   arguments for ssh in one word, as '-F my_config -J
                        gate'; they take precedence over ronde's own
  --python PATH         Python on the other hosts (default: the same path as
                        here)
"""

RUN_HELP = f"""\
usage: ronde run [-n N] [options] [--] program [arguments]

Start a program once for every slot of one host or of many.

options:
  -h, --help            show this help and exit

ranks:
  -n, -np, --num-proc N
                        ranks in all (default: auto, one per slot: a GPU, else
                        a core)
  --nproc-per-node N    ranks per host: a number, gpu or cpu; with -n, the
                        most that a host gets
  -m, --module          program is a Python module, run as python -m does

{HOST_OPTIONS}\
  --nodes, --nnodes N   use only the first N hosts; with --listen: number of
                        nodes, this one included; A:B with
                        --nproc-per-node is --min-ranks and --max-ranks
  --standalone          use only this machine

start:
  --chdir DIR           working directory of the ranks
  -x, --env NAME[=VALUE] ...
                        set or forward a variable for all ranks: NAME=VALUE,
                        NAME or 'PREFIX*'
  --interface NAMES     network interfaces for the ranks, as ib0,eth0
                        (default: by routes)
  --master-port PORT    MASTER_PORT, where programs that call
                        init_process_group() themselves meet (default: a free
                        one)
  --dry-run             query all hosts, show the whole plan, start nothing
  --preflight           check every host first; start nothing if one is unfit
  --nested              start a separate world inside a rank of another
  --[no-]horovod-alias  let import horovod find ronde even where Horovod is
                        installed; with --no-, never (default: where Horovod
                        is not installed)
  --replace-gloo        have ronde move the tensors of groups that
                        torch.distributed makes with Gloo
  --no-malloc-tuning    let CPU ranks return freed memory to the kernel at
                        once, as C's allocator does by default

{SSH_OPTIONS}
end:
  --timeout TIME        end the job after TIME, as 30m or 2h: shows the stacks
                        of all ranks; exit code 124
  --grace TIME          time from SIGTERM to SIGKILL, as 500ms, 5s or 2m
                        (default: 15s)
  --max-restarts R      start all ranks again up to R times when one fails or
                        a host is lost
  --no-restart-codes CODES
                        exit codes after which nothing is restarted (default:
                        93,64)

ranks that come and go (hvd.elastic):
  --min-ranks N         go on without lost ranks while N are left; fewer wait
                        (default: -n, else 1)
  --max-ranks N         take hosts and slots that are added, up to N ranks
                        (default: -n, else no limit)
  --discover-every TIME
                        time between two looks at --host-discovery (default:
                        1s)
  --spares N            further processes that wait to take a lost rank's
                        place (default: 0)
  --failure-domain WHAT
                        host: a failed rank's whole host is left out at once;
                        slot: after three failures in ten minutes (default:
                        slot; with horovodrun's options or --nodes A:B host)
  --cooldown LO,HI      for how long a host is left out: at first LO, then
                        twice as long each time, up to HI (default: 30s,1h)
  --elastic-timeout TIME
                        end the job after so long with fewer than --min-ranks
                        (default: 10m)
  --reform-timeout TIME
                        what a rank has to leave what it does when ranks
                        change; then its stacks are shown and it is killed
                        (default: 30s)
  --reset-limit N       end the job at change N + 1 (default: no limit)
  --notice NAMES        ranks leave a host before it is taken, by notice from
                        aws, gcp, azure, slurm (a minute before the job's time
                        limit) or file:PATH (it exists there); several as
                        aws,slurm (default: signal, SIGTERM to the host's
                        agent, which always counts)

output:
  --tag WHAT            prefix of each line: rank ([3]), host ([node2:3]) or
                        none; with ,time also the time of day (default: rank,
                        with several hosts host)
  -v, --verbose         show the time of each step of the start, and what a
                        slow one waits for
  --no-prefix           the same as --tag none
  --only RANKS          show only these ranks, as 0,4-7 or 0-63:8; files have
                        all
  --log-dir DIR         also write each rank's output to files under DIR on
                        this host
  --error-file FILE     write how the job ended to FILE, as JSON

binding:
  --bind HOW            bind each rank to: core (own cores near its GPU, else
                        an even part of all), numa (the memory node near its
                        GPU), auto (what helps there) or none (default: none)
  --bind-policy POLICY  when a rank's cores and GPU are not near the same
                        memory: best-effort starts it anyway, restricted
                        starts nothing unless its cores need several memory
                        nodes, single-numa-node starts nothing (default:
                        best-effort)
  --gpu-view WHICH      GPUs that a rank sees: all, its own being number
                        LOCAL_RANK, or one, its own (default: all)

tensors:
  --engine NAME         what moves the tensors: auto, shared_memory, gloo,
                        nccl, scheduled, hierarchical (default: auto)
  --algorithm NAME      schedule of the engines scheduled and hierarchical:
                        ring, tree, halving_doubling
  --timeline FILE       write a trace of all ranks to FILE, for Perfetto and
                        ronde trace; gzipped if it ends in .gz
  --timeline-limit SIZE
                        largest size of that file; the oldest entries go first
                        (default: 32MiB)

nodes that join by themselves:
  --listen [ADDR:]PORT  wait there until as many nodes have joined as --nodes
                        asks for
  --agent HEAD:PORT     join the run that listens there, with --slots of this
                        node's own
  --token-file FILE     file with the secret of all nodes; - is standard input
                        (default: $RONDE_TOKEN_FILE)
  --join-timeout TIME   how long head and nodes wait for each other (default:
                        5m)

Each rank finds its place in RANK, WORLD_SIZE, LOCAL_RANK and so on, as under torchrun.
The first rank to fail ends the job: the others get SIGTERM, and after --grace every
process of the job that is left is killed. Ctrl-\\ shows the stacks of all ranks.

exit code: 0 if all ranks ended with 0, else the code of the rank that failed first (128
plus the number of a signal); 130 after Ctrl-C, 143 after SIGTERM, 124 after --timeout;
64 if the job cannot start as asked; 69 if a host cannot take part or was lost; 70 if
the launcher itself failed.

Options of horovodrun, and common ones of torchrun and mpirun, work too: see
docs/launching.md. import horovod finds ronde unless Horovod is installed.

examples:
  ronde run train.py --epochs 3
  ronde run -n 4 --log-dir logs -m mypackage.train
  ronde run -H node1:8,node2:8 train.py
"""
