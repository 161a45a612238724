"""Rules on what names elements, and on what kind they are."""

from collections import Counter
from collections.abc import Iterator

from ronde.topology.findings import Finding, Severity
from ronde.topology.lint.host_view import HostView
from ronde.topology.lint.rule import Rule


def _remarks(view: HostView) -> Iterator[Finding]:
    for remark in view.host.remarks:
        yield Finding(
            rule="odd-source",
            severity=Severity.NOTE,
            element="source",
            what=remark,
            consequence="It was read all the same; what is told here may not be what "
            "the source meant.",
            remedy="Correct the source, or make it anew.",
        )


def _repeated_ranks(view: HostView) -> Iterator[Finding]:
    counts = Counter(gpu.rank for gpu in view.host.gpus if gpu.rank >= 0)
    for gpu in view.host.gpus:
        if counts[gpu.rank] > 1:
            yield Finding(
                rule="repeated-rank",
                severity=Severity.ERROR,
                element=gpu.name,
                what=f"Rank {gpu.rank} is told for {counts[gpu.rank]} GPUs.",
                consequence="NCCL refuses duplicate GPUs, or loses one of them.",
                remedy="Give each GPU its own rank, or write the file anew with "
                "NCCL_TOPO_DUMP_FILE.",
            )


def _mixed_gpus(view: HostView) -> Iterator[Finding]:
    kinds = Counter((gpu.gcn, gpu.sm) for gpu in view.host.gpus if gpu.sm > 0)
    if len(kinds) < 2:
        return
    usual = kinds.most_common(1)[0][0]
    for gpu in view.host.gpus:
        kind = (gpu.gcn, gpu.sm)
        if gpu.sm > 0 and kind != usual:
            yield Finding(
                rule="mixed-gpus",
                severity=Severity.NOTE,
                element=gpu.name,
                what=f"It is {_kind(*kind)}, and most GPUs of the host are "
                f"{_kind(*usual)}.",
                consequence="A job over all runs at the slowest GPU's rate.",
                remedy="Leave it out with CUDA_VISIBLE_DEVICES where that matters.",
            )


def _kind(gcn: str, sm: int) -> str:
    return f"gfx{gcn}" if gcn else f"sm {sm}"


RULES = (
    Rule("odd-source", "what was odd in a source, or contradicts another", _remarks),
    Rule("repeated-rank", "several GPUs with one rank", _repeated_ranks),
    Rule("mixed-gpus", "GPUs of several kinds in one host", _mixed_gpus),
)
