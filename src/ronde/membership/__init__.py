"""Numbered views of a job's workers, and the policy that chooses their members."""

from ronde.lazy_exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "events": (
            "Blacklisted Connect Event HostGone HostLeaves HostReady HostsFound Kill "
            "Order Release StartWorker Stop Send TimerExpired WorkerLost WorkerReport"
        ),
        "member": "Member own_member",
        "policy": "Membership RESET_LIMIT_EXCEEDED_MESSAGE Rules ViewPhase name_worker",
        "robust_mutex": "lock_new_mutex",
        "view": (
            "AskStep AtStep Done Entered FROM_RANK Failed Finish FromRank Leave NEW "
            "NO_VIEW Save Settled StopAfter TO_RANK ToRank View ViewBegins ViewEnded "
            "Worker decode_text encode_text order_ranks"
        ),
    },
)
