"""A model of Kubernetes' Job controller: what becomes of a Job by its pods' codes."""

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from tests.containers.manifests import Manifest
from tests.containers.pods import Pod, PodNetwork, PodSpec
from tests.limits import until

Data = dict[str, Any]


class JobController:
    """The state of an Indexed Job.

    Attributes:
        failures: Counted failures, by index.
        outcome: Condition and reason; empty while the Job goes on.
    """

    def __init__(self, spec: Data) -> None:
        self._spec = spec
        self.failures: Counter[int] = Counter()
        self.succeeded: set[int] = set()
        self.outcome = ""

    def on_end(self, index: int, code: int, *, is_disrupted: bool) -> None:
        """Decide after a pod has ended."""
        if code == 0:
            self.succeeded.add(index)
            rules = self._spec.get("successPolicy", {}).get("rules", [])
            wanted = [set(map(int, r["succeededIndexes"].split(","))) for r in rules]
            if any(indexes <= self.succeeded for indexes in wanted):
                self.outcome = "Complete SuccessPolicy"
            return
        action, number = self._action(code, is_disrupted=is_disrupted)
        if action == "FailJob":
            self.outcome = f"Failed PodFailurePolicy rule at index {number}"
        elif action != "Ignore":
            self.failures[index] += 1
            self._check_limits()

    def _action(self, code: int, *, is_disrupted: bool) -> tuple[str, int]:
        [container] = self._spec["template"]["spec"]["containers"]
        for number, rule in enumerate(self._spec["podFailurePolicy"]["rules"]):
            codes = rule.get("onExitCodes")
            is_ours = codes and codes["containerName"] == container["name"]
            if is_ours and (code in codes["values"]) == (codes["operator"] == "In"):
                return rule["action"], number
            for condition in rule.get("onPodConditions", ()):
                if is_disrupted and condition["type"] == "DisruptionTarget":
                    return rule["action"], number
        return "Count", -1

    def _check_limits(self) -> None:
        each = self._spec.get("backoffLimitPerIndex")
        if each is None:
            if self.failures.total() > self._spec.get("backoffLimit", 6):
                self.outcome = "Failed BackoffLimitExceeded"
            return
        failed = [n for n in self.failures.values() if n > each]
        if len(failed) > self._spec.get("maxFailedIndexes", self._spec["completions"]):
            self.outcome = "Failed MaxFailedIndexesExceeded"


class JobEnd(NamedTuple):
    """All that became of a Job."""

    outcome: str
    codes: list[list[int]]  # of all pods by index, for each time they started
    failures: dict[int, int]  # counted ones, by index
    pods: list[Pod]


Disturb = Callable[[list[Pod]], Collection[int]]


def run_job(
    network: PodNetwork,
    manifest: Manifest,
    specs: list[PodSpec],
    disturb: Disturb = lambda _: (),
) -> JobEnd:
    """Run the pods of a Job to its end, and start them again as its controller does.

    It starts them once all have ended, in place of a back-off of 10 s. ``disturb`` is
    called with the first pods and returns the indexes that were evicted.
    """
    controller, codes = JobController(manifest.job), list[list[int]]()
    pods: list[Pod] = []
    while not controller.outcome:
        started = [network.start(spec) for spec in specs]
        evicted = disturb(started) if not codes else ()
        pods += started
        running = dict(enumerate(started))
        while running and not controller.outcome:
            _await_end(running.values())
            for index, pod in sorted(running.items()):
                if pod.exit_code is not None and not controller.outcome:
                    is_disrupted = index in evicted
                    del running[index]
                    controller.on_end(index, pod.wait(), is_disrupted=is_disrupted)
        for pod in running.values():
            pod.terminate()
        codes.append([pod.wait() for pod in started])
    return JobEnd(controller.outcome, codes, dict(controller.failures), pods)


def _await_end(pods: Collection[Pod]) -> None:
    until(
        lambda: any(pod.exit_code is not None for pod in pods),
        lambda: [pod.describe() for pod in pods],
    )
