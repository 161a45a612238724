"""Checks that hosts are ready for training, based on facts collected from each host."""

from ronde.lazy_exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "burn": (
            "COPIES MAX_SIZE NUM_IN_ROUND PRODUCTS Rounds address_of burn_host "
            "gpu_pair_speed make_factor measure_copies measure_gpu measure_pairs "
            "multiply staying_near sum_up"
        ),
        "catalogue": "PROBES all_checks all_steps plan_for",
        "check": "Check FAIL Family Finding Problem Severity WARN name_pair",
        "cluster": "PACE estimate_offset spin",
        "collect": "Collected choose_addresses",
        "expected": "read_expected",
        "fleet": "Fleet HostFacts Value",
        "gpu.links": "read_acs read_direct_rdma read_is_virtual",
        "gpu.nvml": (
            "ALL_ANSWERS GPU_QUESTIONS HOST_QUESTIONS NvmlDriver "
            "RefusedError ask_driver ask_gpu store_answers"
        ),
        "gpu.presence": "opened_files",
        "gpu.smi": "read_smi",
        "gpu.xids": "read_xids",
        "history": "Change Changes SavedRun compare load_last save",
        "hosts": "HostSet NodeContext Reply",
        "judging": "Judgement Unread decide fit_together judge",
        "limits": "UNLIMITED parse_limit",
        "majority": "differing find_low",
        "node": "main",
        "network.bandwidth": (
            "Streams bench busbw_of hold_rendezvous judge_logs judge_pairs rounds"
        ),
        "network.interfaces": "chooses look_up_own_name",
        "network.path_mtu": "measure_mtu",
        "network.pci": "adapter_pcie",
        "network.rdma": "RDMA_ERRORS read_errors",
        "network.reach": (
            "FRAME LARGE_BYTES NUM_STREAMS REACH better blame listen lost_pairs "
            "plan_partners reach receive_exactly stream"
        ),
        "path_tasks": "NUM_SAMPLES SAMPLE_BYTES WHOLE_BYTES digest run_tasks",
        "probing": (
            "FAILED FactReader ProbeEntry UnreadableError read_facts run_probes"
        ),
        "reading": "read_saved_facts",
        "software": (
            "ABSENT find_nccl read_driver read_module read_packages read_torch "
            "select_environment"
        ),
        "storage": "digest_files find_shared read_mounts try_path",
        "torch_import": "find_error",
    },
)
