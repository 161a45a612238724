"""Who takes part: numbered views of a job's processes, and what decides on them."""

from ronde.lazy_exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "events": (
            "Barred BeginView Connect Dismiss EndView Event FinishAll HostGone "
            "HostLeaves HostReady HostsFound Kill MemberDone MemberLost MemberSettled "
            "Order PauseView Release StartProcess Stop Tick"
        ),
        "member": "Member own_member",
        "policy": "Membership RESET_LIMIT_EXCEEDED_MESSAGE Rules ViewPhase",
        "robust_mutex": "lock_new_mutex",
        "view": (
            "AskStep AtStep Done Entered FROM_RANK Failed Finish Leave NEW NO_VIEW "
            "Place Save Settled StopAfter TO_RANK ToRank View ViewBegins ViewEnded "
            "decode_text encode_text order_ranks"
        ),
    },
)
