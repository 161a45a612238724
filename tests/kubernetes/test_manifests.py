"""``ronde kubernetes`` prints manifests that are valid, and mean what they should."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings, strategies as st
from tests.commands import refusal
from tests.kubernetes.job_rules import action, broken_rules
from tests.kubernetes.schemas import LOADER, VERSIONS, list_mistakes

from ronde.cli import main
from ronde.render import write_yaml

Documents = dict[str, dict[str, Any]]
Show = Callable[..., Documents]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
KINDS = {"job": "Job", "jobset": "JobSet", "trainjob": "TrainJob", "mpijob": "MPIJob"}
NEEDED = ("--name", "train", "--image", "registry.example/train:1")
THREE = (*NEEDED, "--nodes", "3")
VARIANTS = {
    "cpu": ("--nodes", "3"),
    "gpu": (
        *("--nodes", "3", "--gpus", "8", "--cpu", "64"),
        *("--memory", "512Gi", "--shm", "64Gi"),
    ),
    "rdma": ("--nodes", "3", "--gpus", "8", "--resource", "rdma/hca=1"),
    "elastic": ("--nodes", "2:8"),
    "queue": ("--nodes", "3", "--queue", "team", "--topology", "cloud.example/rack"),
    "secret": ("--nodes", "3", "--secret", "mine"),
    "volume": ("--nodes", "3", "--volume", "data:/data", "--volume", "data:/out"),
}


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    def read(*words: str, program: tuple[str, ...] = ("train.py",)) -> Documents:
        assert main(["kubernetes", *words, "--", *program]) == 0
        documents = yaml.safe_load_all(capsys.readouterr().out)
        return {document["kind"]: document for document in documents}

    return read


def pod_of(documents: Documents, role: str = "Launcher") -> dict[str, Any]:
    """Return the template of the pods."""
    *_, (kind, last) = documents.items()
    spec = last["spec"]
    if kind == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    elif kind == "MPIJob":
        spec = spec["mpiReplicaSpecs"][role]
    elif kind == "TrainJob":
        [patch] = spec["runtimePatches"]
        [node] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        spec = node["template"]["spec"]
    return spec["template"]


def job_of(documents: Documents) -> dict[str, Any]:
    """Return the spec of the Job, which a JobSet contains."""
    if "JobSet" in documents:
        spec = documents["JobSet"]["spec"]
        return spec["replicatedJobs"][0]["template"]["spec"]
    return documents["Job"]["spec"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_all_objects_are_valid(show: Show, kind: str, variant: str) -> None:
    documents = show(kind, *NEEDED, *VARIANTS[variant])
    own = [] if variant == "secret" else ["Secret"]
    service = ["Service"] if kind == "job" else []
    assert list(documents) == [*own, *service, "NetworkPolicy", KINDS[kind]]
    for document in documents.values():
        assert document["metadata"]["name"] == "train"
        assert document["metadata"]["labels"]["ronde/job"] == "train"
        for version in VERSIONS:
            assert list_mistakes(document, version) == []
    if kind in ("job", "jobset"):
        name = "train" if kind == "job" else "train-node-0"
        assert list(broken_rules(name, job_of(documents))) == []


def test_a_gang_needs_kubernetes_1_37(show: Show) -> None:
    words = ("--gang", "--topology", "cloud.example/rack")
    job = show("job", *NEEDED, "--nodes", "2:8", *words)["Job"]
    assert job["spec"]["scheduling"]["schedulingPolicy"]["gang"]["minCount"] == 2
    assert list_mistakes(job, "1.37") == []
    assert list_mistakes(job, "1.36") != []


def test_the_schemas_are_strict(show: Show) -> None:
    for kind, name in KINDS.items():
        document = show(kind, *THREE)[name]
        document["spec"]["typo"] = 1
        assert any("typo" in text for text in list_mistakes(document, "1.34"))


def change(spec: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    changed = part = copy.deepcopy(spec)
    *names, last = (int(n) if n.isdecimal() else n for n in path.split("/"))
    for name in names:
        part = part[name]
    part[last] = value
    return changed


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("template/spec/restartPolicy", "OnFailure"),
        ("podReplacementPolicy", "TerminatingOrFailed"),
        ("podFailurePolicy/rules/0/onExitCodes/values", [93, 64]),
        ("podFailurePolicy/rules/0/onExitCodes/values", [0, 64]),
        ("podFailurePolicy/rules/0/onExitCodes/values", [64, 300]),
        ("podFailurePolicy/rules/0/onExitCodes/containerName", "main"),
        ("completionMode", "NonIndexed"),
        ("parallelism", 2),
        ("maxFailedIndexes", 4),
        ("successPolicy/rules/0/succeededIndexes", "3"),
        ("template/spec/volumes/0/emptyDir/sizeLimit", "2Ti"),
        ("template/spec/securityContext/runAsUser", 0),
    ],
)
def test_the_rules_find_each_mistake(show: Show, path: str, value: object) -> None:
    spec = show("job", *THREE, "--memory", "1Ti")["Job"]["spec"]
    assert list(broken_rules("train", spec)) == []
    assert list(broken_rules("train", change(spec, path, value)))


def test_every_pod_has_what_training_needs(show: Show) -> None:
    words = ("--gpus", "2", "--queue", "q", "--topology", "rack")
    for kind in KINDS:
        documents = show(kind, *THREE, *words, program=("--grace", "59.5s", "a.py"))
        pod = pod_of(documents)
        [container] = pod["spec"]["containers"]
        mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
        assert [*mounts.values()] == ["/dev/shm", "/tmp", "/etc/ronde"]  # noqa: S108
        shm, tmp, token = pod["spec"]["volumes"]
        assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
        assert tmp["emptyDir"] == {}
        assert token["secret"] == {"secretName": "train", "defaultMode": 0o440}
        rights = container["securityContext"]
        assert rights["capabilities"] == {"drop": ["ALL"]}
        assert rights["readOnlyRootFilesystem"]
        assert not rights["allowPrivilegeEscalation"]
        user = pod["spec"]["securityContext"]
        assert (user["runAsUser"], user["fsGroup"], user["runAsNonRoot"]) == (
            *(1000, 1000),
            True,
        )
        assert pod["spec"]["terminationGracePeriodSeconds"] == 90
        assert {t["tolerationSeconds"] for t in pod["spec"]["tolerations"]} == {30}
        labels = pod["metadata"]["labels"]
        assert labels == {"ronde/job": "train", "sidecar.istio.io/inject": "false"}
        annotations = pod["metadata"]["annotations"]
        assert annotations["kueue.x-k8s.io/podset-required-topology"] == "rack"
        assert annotations["karpenter.sh/do-not-disrupt"] == "true"
        queue = documents[KINDS[kind]]["metadata"]["labels"]
        assert queue["kueue.x-k8s.io/queue-name"] == "q"
        if kind != "trainjob":
            assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
            assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
            assert not pod["spec"]["automountServiceAccountToken"]
            assert not pod["spec"]["enableServiceLinks"]


def test_shared_memory_is_at_most_all_memory(show: Show) -> None:
    pod = pod_of(show("job", *THREE, "--memory", "4Gi"))
    assert pod["spec"]["volumes"][0]["emptyDir"]["sizeLimit"] == "4Gi"


def test_only_own_pods_reach_a_pod_and_know_its_name(show: Show) -> None:
    documents = show("job", *THREE)
    own = {"matchLabels": {"ronde/job": "train"}}
    assert documents["NetworkPolicy"]["spec"] == {
        "podSelector": own,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": own}]}],
    }
    service = documents["Service"]["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"]
    assert service["selector"] == own["matchLabels"]
    assert (
        pod_of(documents)["spec"]["subdomain"]
        == documents["Service"]["metadata"]["name"]
    )


def test_tokens_are_fresh_secret_and_stay(show: Show) -> None:
    first, second = (show("job", *THREE)["Secret"] for _ in range(2))
    assert first["immutable"]
    tokens = {secret["stringData"]["token"] for secret in (first, second)}
    assert len(tokens) == 2
    assert all(re.fullmatch("[0-9a-f]{64}", token) for token in tokens)
    named = pod_of(show("job", *THREE, "--secret", "mine"))
    assert named["spec"]["volumes"][2]["secret"]["secretName"] == "mine"


def words_of(pod: dict[str, Any]) -> str:
    return " ".join(pod["spec"]["containers"][0]["command"])


def test_each_kind_says_where_a_pod_belongs(show: Show) -> None:
    program = ("--slots", "4", "train.py")
    start = "ronde run --join-timeout 30m"
    given = "--preflight --slots 4 train.py"
    for kind in ("job", "jobset"):
        documents = show(kind, *NEEDED, "--nodes", "2:8", program=program)
        [container] = pod_of(documents)["spec"]["containers"]
        assert container["env"] == [{"name": "RONDE_NODES", "value": "2:8"}]
        assert words_of(pod_of(documents)) == f"{start} {given}"
        assert job_of(documents)["completions"] == 8
    trainer = show("trainjob", *NEEDED, "--nodes", "2:8", program=program)["TrainJob"][
        "spec"
    ]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (8, 4)
    assert trainer["env"] == [{"name": "RONDE_NODES", "value": "2:8"}]
    assert " ".join(trainer["command"]) == f"{start} {given}"
    documents = show("mpijob", *NEEDED, "--nodes", "2:8", program=program)
    spec = documents["MPIJob"]["spec"]
    assert (spec["slotsPerWorker"], spec["runLauncherAsWorker"]) == (4, True)
    assert spec["mpiReplicaSpecs"]["Worker"]["replicas"] == 7
    head = pod_of(documents)
    assert words_of(head) == f"{start} --nodes 2:8 --listen 29400 {given}"
    worker = words_of(pod_of(documents, "Worker"))
    assert worker == f"{start} --agent train-launcher.train:29400 --slots 4"


def test_exit_codes_decide_what_a_job_does(show: Show) -> None:
    final = ("--no-restart-codes", "42,7", "train.py")
    spec = show("job", *THREE, "--restarts", "5", program=final)["Job"]["spec"]
    assert [action(spec, code) for code in (64, 7, 42)] == ["FailJob"] * 3
    # A drain: the pod itself, and the others.
    assert action(spec, 137, is_disrupted=True) == "Ignore"
    assert action(spec, 143) == "Ignore"
    assert [action(spec, code) for code in (1, 69, 70, 93, 124, 137)] == ["Count"] * 6
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (5, 0)
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}


# The Job controller's sentences, of pkg/controller/job/pod_failure_policy.go.
CODE = "Container node for pod ns/train-node-0-1-x failed with exit code {} matching "
CONDITION = "Pod ns/train-node-0-1-x has condition DisruptionTarget matching "


def test_a_jobset_starts_again_as_a_whole(show: Show) -> None:
    documents = show("jobset", *THREE, "--restarts", "5")
    inner, policy = job_of(documents), documents["JobSet"]["spec"]["failurePolicy"]
    assert inner["backoffLimit"] == 0
    assert policy["maxRestarts"] == 5

    def decide(message: str) -> str:
        for rule in policy["rules"]:
            patterns = rule["onJobFailureMessagePatterns"]
            if any(re.search(pattern, message) for pattern in patterns):
                return rule["action"]
        return "RestartJobSet"

    uncounted = "RestartJobSetAndIgnoreMaxRestarts"
    assert action(inner, 64) == action(inner, 143) == "FailJob"
    assert decide(CODE.format(64) + "FailJob rule at index 0") == "FailJobSet"
    assert decide(CONDITION + "FailJob rule at index 1") == uncounted
    assert decide(CODE.format(143) + "FailJob rule at index 2") == uncounted
    assert decide("Job has reached the specified backoff limit") == "RestartJobSet"


@pytest.mark.parametrize(
    ("nodes", "program"),
    [("2:8", ()), ("3", ("--max-restarts", "2")), ("3", ("--min-ranks", "2"))],
)
def test_pods_that_may_come_back_do_not_end_a_jobset(
    show: Show, nodes: str, program: tuple[str, ...]
) -> None:
    words = (*NEEDED, "--nodes", nodes, "--restarts", "5")
    documents = show("jobset", *words, program=(*program, "train.py"))
    inner = job_of(documents)
    assert action(inner, 143) == action(inner, 1, is_disrupted=True) == "Ignore"
    assert action(inner, 64) == "FailJob"
    assert inner["backoffLimitPerIndex"] == 5
    assert documents["JobSet"]["spec"]["failurePolicy"]["maxRestarts"] == 0


def test_comments_at_the_end_say_what_comes_next(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for kind in KINDS:
        for nodes in ("3", "2:8"):
            main(["kubernetes", kind, *NEEDED, "--nodes", nodes, "--", "a.py"])
            shown = capsys.readouterr()
            lines = shown.out.splitlines()
            comments = [line for line in lines if line.startswith("#")]
            assert lines[-len(comments) :] == comments == shown.err.splitlines()
            patch = "# N pods: kubectl patch job train"
            is_elastic = kind == "job" and ":" in nodes
            assert any(line.startswith(patch) for line in comments) == is_elastic
            assert f",{kind} -l ronde/job=train" in comments[-1]
            if kind == "job":
                assert f"\n{comments[0].removeprefix('# log: ')}\n" in PAGE
            if is_elastic:
                command = comments[1].removeprefix("# N pods: ")
                assert f"\n{command.replace('N', '5')}\n" in PAGE


REFUSED = {
    "no kind": ([], "--name, --image, --nodes, KIND are required"),
    "kind": (
        ["pod", *THREE],
        "kind must be job, jobset, trainjob or mpijob, got 'pod'. Type: ronde",
    ),
    "no name": (["job"], "--name, --image, --nodes are required. Type: ronde"),
    "capitals": (["job", *THREE, "--name", "Train"], "--name must be a-z, 0-9 and -"),
    "dot": (["job", *THREE, "--name", "a.b"], "--name must be"),
    "digit": (["job", *THREE, "--name", "1a"], "--name must be"),
    "long": (["job", *THREE, "--name", "a" * 62], "--name must have at most 61 char"),
    "longer": (
        ["job", *NEEDED, "--nodes", "11", "--name", "a" * 61],
        "--name must have at most 60 characters, got 61",
    ),
    "jobset": (["jobset", *THREE, "--name", "a" * 49], "at most 48 characters"),
    "trainjob": (["trainjob", *THREE, "--name", "a" * 49], "at most 48 characters"),
    "mpijob": (["mpijob", *THREE, "--name", "a" * 55], "at most 54 characters"),
    "one pod": (["job", *THREE, "--nodes", "1"], "--nodes must be at least 2, got 1."),
    "no pod": (["job", *THREE, "--nodes", "0"], "--nodes must be a whole number"),
    "backwards": (["job", *THREE, "--nodes", "3:2"], "must begin with the smaller"),
    "words": (["job", *THREE, "--nodes", "all"], "--nodes must be a whole number"),
    "unit": (["job", *THREE, "--memory", "512gi"], "--memory must be a size as 512Gi"),
    "milli": (["job", *THREE, "--memory", "512m"], "--memory must be a size"),
    "shm": (
        ["job", *THREE, "--memory", "1000M", "--shm", "1Gi"],
        "--shm must be at most --memory, 1000M, got 1Gi",
    ),
    "cores": (["job", *THREE, "--cpu", "0"], "--cpu must be a number of cores"),
    "gpus": (["job", *THREE, "--gpus", "0"], "--gpus must be a whole number"),
    "device": (["job", *THREE, "--resource", "hca=1"], "--resource must be a device"),
    "devices": (
        ["job", *THREE, "--gpus", "8", "--resource", "nvidia.com/gpu=4"],
        "--resource must name each device once, beside --gpus",
    ),
    "volume": (["job", *THREE, "--volume", "data"], "--volume must be a claim and"),
    "volumes": (
        ["job", *THREE, "--volume", "a:/data", "--volume", "b:/data"],
        "--volume must name each folder once",
    ),
    "own volume": (
        ["job", *THREE, "--volume", "data:/tmp/"],
        "and none of /dev/shm, /tmp, /etc/ronde, got /tmp.",
    ),
    "image": (["job", *THREE, "--image", "a b"], "--image must be the name of an"),
    "gang": (["jobset", *THREE, "--gang"], "--gang must be left out, got jobset"),
    "topology": (["job", *THREE, "--topology", "rack"], "--topology has no effect"),
    "restarts": (["mpijob", *THREE, "--restarts", "1"], "--restarts must be left out"),
    "queue": (["job", *THREE, "--queue", "My"], "--queue must be"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_refused(capsys: pytest.CaptureFixture[str], case: str) -> None:
    words, reason = REFUSED[case]
    text = refusal(capsys, "kubernetes", *words, "--", "train.py")
    assert reason in text
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("", "a program is required"),
        ("ronde run a.py", "ronde run must be left out after --"),
        ("--no-restart-codes 93,300 a.py", "must be codes from 1 to 255, got [300]"),
        ("--no-restart-codes 0 a.py", "must be codes from 1 to 255, got [0]"),
        ("--lisen 1 a.py", "Did you mean --listen?"),
        ("--nodes 3 a.py", "--nodes must be left out after --"),
        ("--standalone a.py", "--standalone must be left out after --"),
        ("--listen 29400 a.py", "--listen must be left out after --"),
        ("-H a,b a.py", "must be left out after --"),
        ("--min-ranks 4 --max-ranks 2 a.py", "--m"),
    ],
)
def test_options_of_ronde_run_are_checked_here(
    capsys: pytest.CaptureFixture[str], words: str, reason: str
) -> None:
    assert reason in refusal(capsys, "kubernetes", "job", *THREE, "--", *words.split())


def test_the_program_follows_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    text = refusal(capsys, "kubernetes", "job", *THREE, "train.py")
    assert "the program must follow --. Type: ronde kubernetes job --name" in text


def test_words_arrive_as_they_were_typed(show: Show) -> None:
    words = ("a b.py", "$(HOME)", "$$", "{x: 1}", "yes", "1e3", "", "é", "# no", "a\nb")
    command = pod_of(show("job", *THREE, program=words))["spec"]["containers"][0]
    # Kubernetes: $$ is $.
    assert [w.replace("$$", "$") for w in command["command"][5:]] == list(words)


NASTY = (
    *("yes", "No", "NULL", "~", "y", "on", "1e3", "0123", "0x1f", "0o17", "1_000"),
    *(
        "1:30",
        ".inf",
        "-.NaN",
        "null",
        "2026-11-30",
        "=",
        "<<",
        "-",
        "--",
        "---",
        "...",
    ),
    *("", " a", "a ", "a: b", "a:", "a #b", "#", "- a", "? a", "[", "{}", "*a", "&a"),
    *("!a", "|", ">", "%a", "@a", "`a", "'", '"', "\\", "\\n", "a\nb", "\t", "\r\n"),
    *("\x00", "\x7f", "\x85", "\xa0", "\u2028", "\ufeff", "é", "日本", "\U0001f600"),
)
TEXTS = st.text() | st.sampled_from(NASTY)
# A reader of YAML looks for a colon in the next 1,024 characters.
NAMES = st.text(max_size=40) | st.sampled_from(NASTY)
DATA = st.recursive(
    TEXTS | st.integers() | st.booleans(),
    lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner),
    max_leaves=10,
)


@settings(max_examples=15, deadline=None, database=None)
@given(st.dictionaries(NAMES, DATA))
@example({text: [text, {text: text}] for text in NASTY})
def test_yaml_is_read_back_as_it_was(data: dict[str, Any]) -> None:
    text = write_yaml({"data": data})
    assert text.isascii()
    assert yaml.load(text, LOADER) == {"data": data}  # noqa: S506


def test_the_commands_of_the_page_print_valid_manifests(show: Show) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    text = "\n".join(blocks).replace("\\\n", "")
    commands = re.findall(r"^ronde kubernetes (.*?) \| kubectl", text, re.MULTILINE)
    assert len(commands) >= 2
    for command in commands:
        words, _, program = command.partition(" -- ")
        for document in show(*words.split(), program=(*program.split(),)).values():
            assert list_mistakes(document, "1.37") == []
