"""Each exit code, of real pods of a printed manifest, decides what a Job does.

The pods do without ``--preflight``, which imports torch: ``test_one_world`` has it.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple

import pytest
from tests.containers.job_controller import run_job
from tests.containers.manifests import Manifest, print_manifest
from tests.containers.pods import Pod, PodNetwork

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


def without_preflight(manifest: Manifest) -> Manifest:
    [container] = manifest.job["template"]["spec"]["containers"]
    container["command"].remove("--preflight")
    return manifest


@pytest.mark.parametrize("name", CASES)
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
