"""The topology of hosts: elements, links and paths, faults, and rank placement."""

from ronde.lazy_exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "comparison": "ComparedHost compare_hosts",
        "cpu_sets": "format_list members parse_list parse_mask",
        "graph": (
            "Diagnostic GpuDevice HostTopology Interface Level Link LinkKind "
            "NVSWITCH NetPort NetworkSwitch NumaNode PciDevice Relation Topology "
            "UNKNOWN read_topology write_topology"
        ),
        "limits": (
            "Bound COLLECTIVES Islands KnownRates Limit LimitWorld RankLayout Rate "
            "bound_of gpu_bound memory_bound network_bound with_gpus "
            "world_of"
        ),
        "lint": "lint_fleet lint_host lint_switches unseen_facts",
        "lint_rules": "CATALOGUE",
        "machine": (
            "Core Gpu Machine RankResources UNKNOWN_NODE count_cores count_slots "
            "read_cpu_limit usable_cores"
        ),
        "nccl_log": "NcclJob NcclLog is_nccl_log lint_nccl_log read_nccl_log",
        "nccl_log.rules": "RULES",
        "nccl_log.log": "ChannelCounts",
        "nccl_log.messages": "MessageReader NcclMessage",
        "paths.classes": "classify",
        "paths.network": (
            "Path PathKind PathNetwork Paths VertexKind find_paths join_switches"
        ),
        "paths.speeds": (
            "LOCAL_GB_PER_S link_gb_per_s max_nvlinks nvlink_gb_per_s pci_gb_per_s "
            "pci_theory_gb_per_s port_gb_per_s smp_gb_per_s"
        ),
        "pci": "compute_capability",
        "placement.binding": (
            "BindMode GpuView PlacementRequest assign_gpus bind choose_gpus "
            "nearest_ports place_ranks"
        ),
        "placement.placing": (
            "ANY AlignmentRequest Hint Inventory NOWHERE NearDevice Nearness "
            "PlacementError Policy RankPlacement Scope best_count compare "
            "counted_hints decide merge place"
        ),
        "placement.plan": "HostPlan plan_host",
        "probes.base": "Probe Saved untag",
        "probes.hwloc": "HWLOC",
        "probes.lspci": "LSPCI",
        "probes.nccl": "MAX_REMARKS NCCL_TOPOLOGY",
        "probes.nvidia_smi": "NVIDIA_SMI",
        "probes.nvml": (
            "GpuAnswers NoNvmlError Remote graph_of open_nvml payload_gb_per_s "
            "read_nvml"
        ),
        "probes.slurm": "SLURM_TOPOLOGY",
        "probes.sysfs": "read_host",
        "sources": "Detected detect_host read_file read_saved",
        "sysfs": "read_machine",
    },
)
