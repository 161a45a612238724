"""Each exit code, of real pods of a printed manifest, decides what a Job does."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.containers.job_controller import JobController, run_job
from tests.containers.manifests import Manifest, print_manifest
from tests.containers.pods import ROOT, Pod, PodNetwork
from tests.limits import until

pytestmark = pytest.mark.soak

FIRST_TIME = "test $RANK != 1 || test -e /shared/tried || { >/shared/tried; exit 42; }"
STAY = """
test -e /shared/$RANK || { >/shared/$RANK; echo $RANK is up; exec sleep 1000; }
"""


class Case(NamedTuple):
    """A run of a Job of 3 pods that may start again twice."""

    script: str
    outcome: str
    codes: list[list[int]]
    failures: list[int]  # counted, of any index
    disturb: Callable[[list[Pod]], Collection[int]] = lambda _: ()
    option: str = ""


def await_all(pods: list[Pod]) -> None:
    for rank in range(3):
        pods[0].await_line(f"{rank} is up")


def evict(pods: list[Pod]) -> Collection[int]:
    await_all(pods)
    pods[2].terminate()
    return [2]


def kill(pods: list[Pod]) -> Collection[int]:
    await_all(pods)
    pods[1].kill()
    return []


DONE, TWICE = "Complete SuccessPolicy", [1, 1, 1]
ALL_ENDED = [0, 0, 0]
CASES = {
    "0": Case("true", DONE, [ALL_ENDED], []),
    "42 once": Case(FIRST_TIME, DONE, [[42] * 3, ALL_ENDED], TWICE),
    "typo": Case(
        "true", "Failed PodFailurePolicy rule at index 0", [[64]], [], option="--lisen"
    ),
    "deleted": Case(STAY, DONE, [[143] * 3, ALL_ENDED], [], evict),
    "killed": Case(STAY, DONE, [[69, 137, 69], ALL_ENDED], TWICE, kill),
    "always 7": Case(
        "exit 7", "Failed MaxFailedIndexesExceeded", [[7] * 3] * 3, [2, 2, 3]
    ),
}


RARE = ("0", "always 7")  # not in the sample of scripts/soak


def without_preflight(manifest: Manifest) -> Manifest:
    """Leave out what imports torch: ``test_one_world`` has it."""
    [container] = manifest.job["template"]["spec"]["containers"]
    container["command"].remove("--preflight")
    return manifest


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if name in RARE else name
        for name in CASES
    ],
)
def test_codes_decide(network: PodNetwork, name: str) -> None:
    case = CASES[name]
    words = ("--nodes", "3", "--restarts", "2")
    program = ("--", "sh", "-c", case.script)
    manifest = without_preflight(print_manifest("job", *words, program=program))
    if case.option:
        [container] = manifest.job["template"]["spec"]["containers"]
        container["command"].insert(2, case.option)
    shared = network.folder / f"shared-{len(network.pods)}"
    shared.mkdir()
    shared.chmod(0o777)
    specs = manifest.pods(network.folder)
    specs = [s._replace(folders={**s.folders, "/shared": shared}) for s in specs]
    end = run_job(network, manifest, specs, case.disturb)
    told = [pod.describe() for pod in end.pods]
    assert end.outcome == case.outcome, told
    assert sorted(end.failures.values()) == case.failures, told
    if case.option:
        assert 64 in end.codes[0], told
        assert set(end.codes[0]) <= {64, 143}, told
    elif "Success" in case.outcome:
        assert end.codes[:-1] == case.codes[:-1], told
        assert end.codes[-1][0] == 0, told
        assert set(end.codes[-1]) <= {0, 143}, told
    else:
        assert end.codes == case.codes, told


EAT = """
import os, time
from ronde.memory import nearest_limit
eaten, most = [], {"all": 2.0, "most": 0.97}[os.environ.get("EATS", "none")]
used, limit = nearest_limit()
assert limit == 256 << 20, limit  # else all of the machine's
while nearest_limit()[0] < most * limit:
    eaten.append(b"x" * (1 << 20))
time.sleep(1000)
"""


@pytest.mark.parametrize("eats", ["all", "most"])
def test_a_pod_that_runs_out_of_memory_is_named(network: PodNetwork, eats: str) -> None:
    """Kill a rank by its limit, and a whole container as Kubernetes does."""
    only_one = f'test $RANK != 1 || EATS={eats} exec python -c "$0"; exec sleep 1000'
    words = ("--nodes", "3", "--memory", "256Mi", "--shm", "64Mi")
    program = ("--", "sh", "-c", only_one, EAT)
    manifest = without_preflight(print_manifest("job", *words, program=program))
    head, *others = (network.start(spec) for spec in manifest.pods(network.folder))
    if eats == "most":
        head.await_line("ronde: train-1: uses ")
        others[0].kill()
    codes = [pod.wait() for pod in (head, *others)]
    told = head.describe()
    if eats == "most":
        assert codes == [69, 137, 69], told
        line = next(line for line in told.splitlines() if "was lost first" in line)
        assert "train-1 was lost first" in line
        assert "of 256MiB of memory, and a container is killed at its limit" in line
    else:
        assert codes == [137] * 3, told
        assert "rank 1 failed first" in told
        assert "for lack of memory (OOM)" in told
        assert "on train-1" in told


@pytest.mark.long  # it imports torch in each pod
def test_an_elastic_job_grows_and_goes_on_with_a_gap_in_its_numbers(
    network: PodNetwork,
) -> None:
    shared = network.folder / "elastic"
    shared.mkdir()
    shared.chmod(0o777)
    program = (str(ROOT / "tests/cluster/elastic_training_rank.py"), "/shared")
    manifest = print_manifest("job", "--nodes", "2:4", program=program)
    controller = JobController(without_preflight(manifest).job)
    specs = [
        spec._replace(folders={**spec.folders, "/shared": shared})
        for spec in manifest.pods(network.folder)
    ]
    pods = [network.start(spec) for spec in specs[:3]]
    view = await_view(shared, pods)
    pods.append(network.start(specs[3]))
    view = await_view(shared, pods, view)
    pods[2].kill()
    controller.on_end(2, pods[2].wait(), is_disrupted=False)
    pods[0].await_line("train-2 was lost")
    await_view(shared, [pods[0], pods[1], pods[3]], view)
    (shared / "finish").touch()
    codes = [pod.wait() for pod in pods]
    assert codes == [0, 0, 137, 0], [pod.describe() for pod in pods]
    controller.on_end(0, codes[0], is_disrupted=False)
    assert (controller.outcome, controller.failures) == (DONE, {2: 1})


def await_view(folder: Path, pods: list[Pod], after: int = -1) -> int:
    """Wait until all of these train together in a later view; return its number."""
    newest: list[int] = []

    def is_so() -> bool:
        newest.clear()
        for pod in pods:
            files = folder.glob(f"applied-{pod.spec.name}-*")
            lines = [ln for f in files for ln in f.read_text().split("\n")[:-1]]
            newest.append(max((int(ln.split()[1]) for ln in lines), default=-1))
        return len(set(newest)) == 1 and newest[0] > after

    until(is_so, lambda: [pod.describe() for pod in pods])
    return newest[0]
