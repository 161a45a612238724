"""Who takes part: numbered views of a job's processes, and what decides on them."""

from ronde.lazy_exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "member": "Member own_member",
        "policy": "Event Membership Order Rules ViewPhase",
        "view": (
            "AskStep AtStep Done Entered FROM_RANK Failed Finish Leave NEW NO_VIEW "
            "Place Save Settled StopAfter TO_RANK ToRank View ViewBegins ViewEnded "
            "decode_text encode_text order_ranks"
        ),
    },
)
