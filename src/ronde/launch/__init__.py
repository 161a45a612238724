"""Start a program once per slot, and supervise the processes until they exit.

A *controller* (``ronde run``) exchanges frames with one *agent* per node, over the
agent's standard input and output. The agent owns that node's ranks. Its parent, the
*reaper*, kills the processes that a dead agent left behind.

Nothing is imported here: an agent starts with the standard library and a few modules.
"""

from ronde.lazy_exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "agent.diagnostics": "KernelDiagnostics StackTaker core_file",
        "agent.ranks": "inherited_binding",
        "agent.relay": "MAX_LINE_BYTES",
        "elastic_options": "DiscoverySpec ElasticOptions NO_LIMIT",
        "environments": (
            "JobFacts NodeFacts base_environment is_rank_variable names_secret "
            "own_environment rank_environment read_assignments redacted "
            "select_forwarded"
        ),
        "host": "Host HostShare SLOTS_OPEN allocate hosts_to_ask is_here limit_slots",
        "bootstrap": "start_local_agent",
        "hosts.discovery": "HostChanges discover open_discovery",
        "hosts.join_client": "JoinRequest join_head",
        "hosts.join_server": "JoinConfig wait_for_nodes",
        "hosts.node": (
            "AgentNode AgentStarter HostLoss ProcessTransport start_remote_agent"
        ),
        "hosts.ray_nodes": "plan_bundles",
        "hosts.slurm": "SlurmSpawner",
        "hosts.sources": "parse_hostfile parse_hosts read_allocation",
        "hosts.spawner": "HelloReader MAX_HELLO_BYTES MAX_NOISE_BYTES last_line",
        "hosts.ssh": "SshSpawner",
        "hosts.ssh_path": "measure_ssh_path",
        "job.connector": "AgentConnector",
        "job.controller": "Controller",
        "job.event_loop": "EventLoop Handler StartProgress StoreService",
        "job.failure": "JobResult LostHost RankEnd Tail find_awaited judge",
        "job.job_files": "ErrorFile RankLogs",
        "job.output": "Attempt NoOutput attempt_dir",
        "job.plan": "JobPlan JobSpec make_facts",
        "job.programs": "Answer",
        "job.status": "StatusService",
        "limits": "ELASTIC EXIT_INTERNAL Timeouts",
        "network": (
            "HostNetwork Rendezvous choose_rendezvous "
            "find_candidates hold_port locate require_answers"
        ),
        "program": "resolve_program",
        "signals": "InterruptedStartError caught_signals wait_for",
        "status": "HostAnswer JobConnection find_sockets list_jobs watch",
        "wire.messages": (
            "Credit Exited FROM_AGENT Finished Forward Hello MAX_FRAME_BYTES "
            "MessageDecoder MessageWriter NodeJob Notice Output Ping PipeTransport "
            "Pong ProcessStack Ready Relayed SendToWorkers SignalWorker Start "
            "StartWorkers Started StatusText Statuses StopWorkers Stream TO_AGENT "
            "WorkerEnding WorkerSpec WorkerStopped WorkerText WorkerTexts "
            "decode_message encode encode_message"
        ),
        "wire.tls": (
            "MAGIC MIN_CHARACTERS NodeInfo authenticate_head decode_node_info "
            "host_name make_head_tls make_node_context parse_endpoint read_token "
            "release with_port"
        ),
    },
)
