"""Results, plans and jobs as text."""

from ronde.lazy_exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "bench": "compared_line ending_lines heading_lines number row_line",
        "bench_tables": "draw_models draw_training",
        "check": (
            "checked_as_json draw_changes draw_findings draw_unread "
            "draw_verdict explain_check list_checks tabulate_hosts"
        ),
        "console": (
            "Console FILE_PROGRESS_S HELD_BYTES HELD_S LineAssembler RankLines "
            "SCREEN_PROGRESS_S Tag TagStyle newest_part parse_tag printable"
        ),
        "hosts": "fold_hosts write_hostfile",
        "job": "plan_text summarize tabulate_failures",
        "jobs": "draw_jobs",
        "manifests": "KubernetesJob draw_manifests write_yaml",
        "profile": "draw_profile",
        "profile_exports": "write_collapsed write_speedscope",
        "profile_page": "write_page",
        "text": "format_ranks format_runs parse_ranks",
        "top": "draw_brief draw_over draw_top",
        "topo_log": "count_findings draw_log draw_log_findings",
        "topo_tables": (
            "compare_with_limit draw_comparison tabulate_classes tabulate_plan "
            "tabulate_speeds"
        ),
        "topo_tree": "draw_tree",
        "trace": "draw_trace",
        "why": "draw_dumps draw_hang draw_slow draw_stacks",
    },
)
