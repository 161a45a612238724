"""The help of ``ronde`` and ``ronde run``, and the options that commands share.

The help's lines also declare the options: see ``ronde.arguments``. This module imports
nothing, so that help appears at once.
"""

HELP = """\
usage: ronde VERB ...

ronde runs one training program on every GPU or CPU slot and keeps the copies in step.

verbs:
  run    start a program once for every slot of one or more hosts
  ps     list running jobs and the status of their ranks
  top    show a job live: its time, its ranks, its hosts and GPUs
  why    say which ranks hold up a job, at which line, and why
  profile  show where the time of a job's ranks goes, line by line
  bench  measure collectives, training steps and servers; read others' results
  trace  show which rank waited for which, from a job's timeline
  check  show which hosts are ready, and how to fix the others
  topo   show how the GPUs, adapters and cores of a machine are connected
  plan   predict the speed, memory and traffic of a training on more ranks
  serve  serve a model on several ranks, with OpenAI's API
  kubernetes  print manifests of a job for Kubernetes
  alias  make import horovod find ronde in this environment
  horovodrun  run a program with horovodrun's options
  completion  complete command lines in bash, zsh or fish

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
  --host-discovery SOURCE
                        command that prints such lines, or file of them;
                        ronde run follows its changes
  --host-discovery-script SOURCE
                        the same, under horovodrun's name
  --slots, --slots-per-host N
                        slots of each host without a number of its own
"""

SSH_OPTIONS = """\
other hosts:
  --launcher {auto,ssh,slurm,ray}
                        starts programs on other hosts: ssh, slurm (srun), for
                        ronde run also ray (the nodes of a Ray cluster); auto
                        is slurm for hosts of its allocation, else ssh
                        (default: auto)
  --ssh-args ARGS ...   arguments for ssh in one word, as '-F my_config -J
                        gate'; they take precedence over ronde's own
  --python PATH         Python on the other hosts (default: the same path as
                        here)
"""

RUN_HELP = f"""\
usage: ronde run [-n N] [options] [--] program [arguments]

Start a program once for every slot of one or more hosts.

options:
  -h, --help            show this help and exit

ranks:
  -n, -np, --num-proc N
                        number of ranks (default: auto, one per slot: a GPU,
                        else a core)
  --nproc-per-node N    ranks per host: a number, gpu or cpu; with -n, the
                        limit of each host
  -m, --module          program is a Python module, as for python -m

{HOST_OPTIONS}\
  --nodes, --nnodes N   use only the first N hosts; with --listen: number of
                        nodes, this one included; A:B is --min-ranks and
                        --max-ranks, with --nproc-per-node or --listen
  --standalone          use only this machine

start:
  --chdir DIR           working directory of the ranks
  -x, --env NAME[=VALUE] ...
                        set or forward a variable for all ranks: NAME=VALUE,
                        NAME or 'PREFIX*'
  --interface NAMES     network interfaces for the ranks, as ib0,eth0
                        (default: by routes)
  --master-port PORT    MASTER_PORT, for programs that call
                        init_process_group() (default: a free port)
  --dry-run             query all hosts and show the plan; start nothing
  --preflight           check every host first; start nothing if one is unfit
  --nested              start a separate world inside a rank of another
  --[no-]horovod-alias  make import horovod find ronde even if Horovod is
                        installed; with --no-, never (default: if Horovod is
                        not installed)
  --replace-gloo        use ronde in torch.distributed's process groups of
                        Gloo
  --no-malloc-tuning    let CPU ranks return freed memory to the kernel at
                        once, as C's allocator does by default

{SSH_OPTIONS}
end:
  --timeout TIME        show the stacks of all ranks and end the job after
                        TIME, as 30m or 2h; exit code 124
  --hang-timeout TIME   end the job once a collective has waited for TIME, and say
                        which rank it waits for, and why; exit code 124
  --grace TIME          time from SIGTERM to SIGKILL, as 500ms, 5s or 2m
                        (default: 15s)
  --max-restarts R      start all ranks again up to R times when one fails or
                        a host is lost, or --hang-timeout ends them
  --no-restart-codes CODES
                        exit codes that cause no restart (default: 93,64)

elastic jobs (hvd.elastic):
  --min-ranks N         continue without lost ranks as long as N are left; wait
                        when there are fewer (default: -n, else 1)
  --max-ranks N         use hosts and slots that are added, up to N ranks
                        (default: -n, else no limit)
  --discover-every TIME
                        interval of --host-discovery (default: 1s)
  --spares N            extra processes, ready to replace lost ranks (default:
                        0)
  --failure-domain {{slot,host}}
                        host: a failed rank's whole host is left out at once;
                        slot: after three failures in ten minutes (default:
                        slot; host with horovodrun's options or --nodes A:B)
  --cooldown LO,HI      time for which a host is left out: LO at first, doubled
                        each time, up to HI (default: 30s,1h)
  --elastic-timeout TIME
                        end the job after TIME with fewer than --min-ranks
                        (default: 10m)
  --reform-timeout TIME
                        limit for a rank to stop its work when ranks change;
                        then show its stacks and kill it (default: 30s)
  --reset-limit N       end the job at change N + 1 (default: no limit)
  --notice NAMES        leave a host before it is taken away: at the notice of
                        aws, gcp, azure, slurm (a minute before the job's time
                        limit) or file:PATH (when it exists there); several as
                        aws,slurm (default: signal, SIGTERM to the host's
                        agent, which always counts)

output:
  --top                 show the job's time, and the ranks that others wait for,
                        below the output in the terminal, as ronde top does
  --tag TAG             prefix of each line: rank ([3]), host ([node2:3]) or
                        none; with ,time also the time of day (default: rank,
                        with several hosts host)
  -v, --verbose         show the time of each step of the start, and the cause
                        of a delay
  --no-prefix           the same as --tag none
  --only RANKS          show only these ranks, as 0,4-7 or 0-63:8; files get
                        all
  --log-dir DIR         also write each rank's output to files under DIR on
                        this host
  --error-file FILE     write the result and failures of the job to FILE, as
                        JSON

binding:
  --bind {{none,core,numa,auto}}
                        bind each rank to: core (own cores near its GPU, else
                        an equal share of all), numa (the memory node near its
                        GPU) or auto (chosen for each host; default: none)
  --bind-policy {{best-effort,restricted,single-numa-node}}
                        if a rank's cores and GPU are not near the same
                        memory: best-effort starts it anyway, restricted
                        starts nothing unless its cores need several memory
                        nodes, single-numa-node starts nothing (default:
                        best-effort)
  --gpu-view {{all,one}}  GPUs that a rank sees: all, its own as number
                        LOCAL_RANK, or one, its own (default: all)

tensors:
  --engine NAME         engine that moves the tensors: auto, shared_memory,
                        gloo, nccl, scheduled, hierarchical (default: auto)
  --algorithm NAME      schedule of the engines scheduled and hierarchical:
                        ring, tree, halving_doubling
  --timeline FILE       write a trace of all ranks to FILE, for Perfetto and
                        ronde trace; gzipped if it ends in .gz
  --timeline-limit SIZE
                        largest size of that file; the oldest entries go first
                        (default: 32MiB)

nodes that join:
  --listen [ADDR:]PORT  wait there until --nodes nodes have joined; elastic jobs
                        and those with --max-restarts: let nodes in until the end
  --agent HEAD:PORT     join the run that listens there, with this node's own
                        --slots
  --token-file FILE     file with the secret of all nodes; - is standard input
                        (default: $RONDE_TOKEN_FILE, /etc/ronde/token)
  --join-timeout TIME   time for which head and nodes wait for each other
                        (default: 5m)

In a pod of Kubernetes, Volcano or SkyPilot, variables of the controller have the effect
of --listen, --agent and --nodes: see docs/how-to/kubernetes.md.

Ranks get RANK, WORLD_SIZE, LOCAL_RANK and so on, as under torchrun. The first rank to
fail ends the job: the others get SIGTERM, and after --grace every process of the job is
killed. Ctrl-\\ shows the stacks of all ranks.

exit code: 0 if all ranks ended with 0, else the code of the rank that failed first (128
plus the number of a signal); 130 after Ctrl-C, 143 after SIGTERM, 124 after a timeout;
64 for a bad command line; 69 if a host cannot be used or was lost; 70 if the launcher
itself failed.

Options of horovodrun, and common ones of torchrun and mpirun, work too: see
docs/launching.md. import horovod finds ronde if Horovod is not installed.

examples:
  ronde run train.py --epochs 3
  ronde run -n 4 --log-dir logs -m mypackage.train
  ronde run -H node1:8,node2:8 train.py
"""

BENCH_SERVE_HELP = """\
usage: ronde bench serve URL|MODEL [options] [-- OPTIONS]

Load an HTTP server that has OpenAI's completions with requests at random times.

options:
  --requests N          number of requests (default: 100)
  --rate RATE           mean arrivals a second, of a Poisson process; 0 or max: all
                        at once (default: max)
  --prompt-len LENGTH   tokens of prompts: 128, 64-256 (each as likely) or exp:128
                        (exponential with this mean) (default: 32-128)
  --output-len LENGTH   tokens of answers (default: 64)
  --share-prefix N      tokens at the begin of all prompts, besides their own
                        (default: 0)
  --seed N              of prompts, lengths and times (default: 0)
  --warmup N            requests before the run, all at once and not counted
                        (default: 0)
  --rounds N            runs, each with other requests; medians are shown
                        (default: 1)
  --timeout TIME        limit of an answer (default: 10m)
  --model NAME          (default: the first that the server lists)
  --vocabulary N        token ids of prompts are below N (default: 256; of a MODEL
                        all)
  --text                send words; also done if the server refuses token ids
  --api-key-file FILE   file with the server's key
  --json FILE           append a record to FILE
  --static              compare the policies guaranteed_no_evict and static_batch
                        of two servers, in turn
  --check [MODEL]       compare each answer with that of transformers' generate in
                        float64
  -h, --help            show this help and exit

The server is at a URL, or the folder MODEL is served for the run by ronde serve, with
the OPTIONS after --; with --check in float64.

Requests start at their times, however slow the server is; all times count from there.
ttft: time to the first token; itl: time between tokens, each gap of each answer; e2e:
time to the last token. A percentile is linear between the two nearest of the sorted
values. Rates and times are of whole answers. client late: delays of this program, of
each start and of a timer every 10 ms; they are part of the times above.

exit code: 0; 6 if it cannot be measured as asked; 7 if no answer came, or one differs.

examples:
  ronde bench serve http://127.0.0.1:8000 --rate 6 --output-len exp:48
  ronde bench serve ./model --static --rate 6 --rounds 5 -- -n 2
"""
