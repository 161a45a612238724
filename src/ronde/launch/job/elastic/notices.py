"""Notice that hosts of an elastic job are about to be taken by their cloud."""

from collections.abc import Callable
from math import inf

from ronde.launch.hosts.node import AgentNode
from ronde.membership.events import HostLeaves
from ronde.membership.view import View
from ronde.units import list_first

_TOGETHER_S = 1.0
_SAVE_EVERY_S = 10.0


class HostNotices:
    """Hosts that are about to be taken, until their ranks can leave.

    Notices that come at the same time count together, as when Slurm's time limit ends
    an allocation: where all hosts of the view will end, no rank leaves until there is
    another host, and ``save`` is called now and then.
    """

    def __init__(
        self,
        min_ranks: int,
        notice: Callable[[str], None],
        save: Callable[[View], None],
    ) -> None:
        self._min_ranks = min_ranks
        self._notice, self._save = notice, save
        self._save_at_s = -inf
        self._reasons: dict[AgentNode, str] = {}
        self._reported: set[AgentNode] = set()
        self.due_s = inf  # when to call ``on_due``

    def add(self, node: AgentNode, reason: str, now_s: float) -> None:
        self._reasons[node] = reason
        self.due_s = min(self.due_s, now_s + _TOGETHER_S)

    def on_due(self, view: View, now_s: float) -> list[HostLeaves]:
        """Return the hosts to leave now."""
        if now_s < self.due_s:
            return []
        self._reasons = {n: r for n, r in self._reasons.items() if not n.is_over}
        names = {node.name for node in self._reasons}
        num_others = sum(worker.host not in names for worker in view.members)
        if view.members and num_others < self._min_ranks:
            self._report_staying(view)
        if not num_others:
            self.due_s = now_s + _TOGETHER_S if self._reasons else inf
            if self._reasons and view.members and now_s >= self._save_at_s:
                self._save_at_s = now_s + _SAVE_EVERY_S
                self._save(view)
            return []
        leaving = self._reasons
        self._reasons, self.due_s = {}, inf
        return [HostLeaves(n.name, f"{n.name}: {why}") for n, why in leaving.items()]

    def _report_staying(self, view: View) -> None:
        hosts = {worker.host for worker in view.members}
        staying = [node for node in self._reasons if node.name in hosts]
        nodes = [node for node in staying if node not in self._reported]
        self._reported.update(nodes)
        if nodes:
            first, *others = nodes
            more = list_first([node.name for node in others])
            self._notice(
                f"{first.name}: {self._reasons[first]}{more and f' ({more} too)'}; its "
                "ranks stay until the others can do without them"
            )
