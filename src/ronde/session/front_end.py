"""The names that are the same in every front end."""

from ronde.errors import CollectiveError as HorovodInternalError
from ronde.session import session
from ronde.session.lifetime import start_timeline, stop_timeline
from ronde.session.operations import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    barrier,
    join,
)
from ronde.session.process_sets import add_process_set, remove_process_set
from ronde.session.session import *  # noqa: F403
from ronde.session.session import ProcessSet, global_process_set

__all__: list[str] = ["Adasum", "Average", "HorovodInternalError", "Max", "Min"]
__all__ += ["ProcessSet", "Product", "Sum", "add_process_set", "barrier"]
__all__ += ["global_process_set", "join", "remove_process_set", "start_timeline"]
__all__ += ["stop_timeline"]
__all__ += session.__all__
