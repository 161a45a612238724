"""Manifests of a job for Kubernetes 1.31 and newer, as YAML."""

import json
import re
from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

_Data = dict[str, Any]
# Other words are quoted, also those that some reader takes for a boolean or null.
_INDEX = "batch.kubernetes.io/job-completion-index"
_GRACE = "terminationGracePeriodSeconds"
OWN_FOLDERS: Sequence[str] = ("/dev/shm", "/tmp", "/etc/ronde")  # noqa: S108 - of each pod
_PLAIN = re.compile(
    r"(?!(?i:true|false|yes|no|on|off|y|n|null)$)"
    r"(--)?[A-Za-z/][A-Za-z0-9_./-]*([:=][A-Za-z0-9_./-]+)*"
)


class KubernetesJob(NamedTuple):
    """A job of ``ronde run`` in pods; all values are valid."""

    kind: str
    name: str
    image: str
    nodes: str  # 3, or 2:8 for an elastic job
    shm: str
    volume: Sequence[str]  # claims and folders, as data:/data
    queue: str | None
    topology: str | None
    restarts: int
    gang: bool
    secret: str | None  # an existing one, in place of token
    token: str
    least: int
    most: int
    resources: _Data
    words: Sequence[str]  # options of ronde run, and the program
    slots: int | None
    grace_s: int
    final_codes: Sequence[int]  # ascending; they end the job for good
    is_open: bool  # pods that come back join the running job


def draw_manifests(job: KubernetesJob) -> str:
    """Return the job's objects as YAML, and commands for later as comments."""
    version, kind, spec = {
        "job": ("batch/v1", "Job", _job),
        "jobset": ("jobset.x-k8s.io/v1alpha2", "JobSet", _jobset),
        "trainjob": ("trainer.kubeflow.org/v1alpha1", "TrainJob", _trainjob),
        "mpijob": ("kubeflow.org/v2beta1", "MPIJob", _mpijob),
    }[job.kind]
    own = {"ronde/job": job.name}
    pods: _Data = {"podSelector": {"matchLabels": own}}
    rules = {"policyTypes": ["Ingress"], "ingress": [{"from": [pods]}]}
    names = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": own}
    queue = {"kueue.x-k8s.io/queue-name": job.queue}
    # Immutable, so that pods that come back have the others' token.
    token: _Data = {"immutable": True, "stringData": {"token": job.token}}
    objects = (
        ("v1", "Secret", own, token),
        ("v1", "Service", own, {"spec": names}),
        ("networking.k8s.io/v1", "NetworkPolicy", own, {"spec": pods | rules}),
        (version, kind, own | queue, {"spec": spec(job)}),
    )
    text = ""
    for v, k, labels, data in compress(objects, (not job.secret, kind == "Job", 1, 1)):
        metadata = {"name": job.name, "labels": labels}
        head = {"apiVersion": v, "kind": k, "metadata": metadata}
        text += f"---{write_yaml(head | data)}\n"
    log = f"--tail=-1 -l ronde/job={job.name},{_INDEX}=0"
    log = f"job/{job.name}-launcher" if kind == "MPIJob" else log
    size = '{"spec":{"parallelism":N,"completions":N}}'
    grow = f"# N pods: kubectl patch job {job.name} -p '{size}'\n"
    grow = grow if kind == "Job" and ":" in job.nodes else ""
    kinds = f"secret,svc,netpol,{job.kind}"
    delete = f"# delete: kubectl delete {kinds} -l ronde/job={job.name}\n"
    return f"{text}# log: kubectl logs -f {log}\n{grow}{delete}"


def _job(job: KubernetesJob, lost: str = "Ignore") -> _Data:
    """Return the spec of an Indexed Job; ``lost`` is the action for evicted pods."""
    codes: _Data = {"containerName": "node", "operator": "In"}
    final, ended = codes | {"values": job.final_codes}, codes | {"values": [143]}
    near = {"topology": [{"key": job.topology}]} if job.topology else None
    gang = {"schedulingPolicy": {"gang": {"minCount": job.least}}}
    each = {"backoffLimitPerIndex": job.restarts, "maxFailedIndexes": 0}
    return {
        "completionMode": "Indexed",
        "completions": job.most, "parallelism": job.most,
        **({"backoffLimit": 0} if lost == "FailJob" else each),
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": [
            {"action": "FailJob", "onExitCodes": final},
            {"action": lost,
             "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": lost, "onExitCodes": ended},  # the job's other pods
        ]},
        # Without it, a pod lost in the last second fails a job that is done.
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "scheduling": {**gang, "schedulingConstraints": near} if job.gang else None,
        "template": _pod(job, "--preflight", *job.words),
    }  # fmt: skip


def _jobset(job: KubernetesJob) -> _Data:
    # Unless lost pods come back alone, their Job fails and the JobSet makes a new one.
    spec = _job(job, "Ignore" if job.is_open else "FailJob")
    actions = {"0": "FailJobSet", "[12]": "RestartJobSetAndIgnoreMaxRestarts"}
    # The patterns match the end of the Job controller's message.
    rules = [
        {"name": action, "action": action, "onJobFailureReasons": ["PodFailurePolicy"],
         "onJobFailureMessagePatterns": [f"FailJob rule at index {index}"]}
        for index, action in actions.items()
    ]  # fmt: skip
    policy = {"maxRestarts": 0 if job.is_open else job.restarts, "rules": rules}
    jobs = [{"name": "node", "replicas": 1, "template": {"spec": spec}}]
    return {"failurePolicy": policy, "replicatedJobs": jobs}


def _trainjob(job: KubernetesJob) -> _Data:
    pod = _pod(job, "--preflight", *job.words)
    spec, [container] = pod["spec"], pod["spec"]["containers"]
    # All that a TrainJob can change in the pods of a runtime.
    names = ("name", "securityContext", "volumeMounts")
    parts = {"containers": [{name: container[name] for name in names}]}
    names = ("securityContext", "tolerations", "volumes", _GRACE)
    pod["spec"] = {name: spec[name] for name in names} | parts
    jobs = [{"name": "node", "template": {"spec": {"template": pod}}}]
    patch = {"template": {"spec": {"replicatedJobs": jobs}}}
    return {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": {name: container[name] for name in ("image", "command", "env")}
        | {"numNodes": job.most, "numProcPerNode": job.slots or 1}
        | {"resourcesPerNode": container["resources"]},
        "runtimePatches": [{"manager": "ronde/run", "trainingRuntimeSpec": patch}],
    }


def _mpijob(job: KubernetesJob) -> _Data:
    listen = ["--nodes", job.nodes, "--listen", "29400", "--preflight", *job.words]
    agent = ["--agent", f"{job.name}-launcher.{job.name}:29400"]
    agent += ["--slots", str(job.slots)] if job.slots else []
    roles = {"Launcher": (1, listen), "Worker": (job.most - 1, agent)}
    return {
        "slotsPerWorker": job.slots or 1,
        "runLauncherAsWorker": True,
        # A failed worker is not made again: a second launcher would wait in vain.
        "runPolicy": {"backoffLimit": 0, "cleanPodPolicy": "Running"},
        "mpiReplicaSpecs": {
            role: {"replicas": n, "restartPolicy": "Never"}
            | {"template": _pod(job, *words)}
            for role, (n, words) in roles.items()
        },
    }


def _pod(job: KubernetesJob, *words: str) -> _Data:
    token = {"secretName": job.secret or job.name, "defaultMode": 0o440}
    nodes = [{"name": "RONDE_NODES", "value": job.nodes}]
    shm = {"medium": "Memory", "sizeLimit": job.shm}
    own: list[_Data] = [
        {"name": "shm", "emptyDir": shm},
        {"name": "tmp", "emptyDir": {}},
        {"name": "token", "secret": token},
    ]
    volumes = dict(zip(OWN_FOLDERS, own, strict=True))
    for claim, _, folder in (text.partition(":") for text in job.volume):
        name = {"name": f"volume-{len(volumes)}"}
        volumes[folder] = name | {"persistentVolumeClaim": {"claimName": claim}}
    container = {
        "name": "node", "image": job.image,
        # Kubernetes would replace $(NAME).
        "command": ["ronde", "run", "--join-timeout", "30m",
                    *(word.replace("$", "$$") for word in words)],
        # Not where options name the place.
        "env": None if job.kind == "mpijob" else nodes,
        # Both the same, so that cores and memory are the pod's own.
        "resources": {"requests": job.resources, "limits": job.resources},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {"allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": volume["name"], "mountPath": path}
                         for path, volume in volumes.items()],
    }  # fmt: skip
    spec = {
        "restartPolicy": "Never", "subdomain": job.name if job.kind == "job" else None,
        "enableServiceLinks": False, "automountServiceAccountToken": False,
        _GRACE: job.grace_s + 30,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000,
            "fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"}},
        "tolerations": [
            {"key": f"node.kubernetes.io/{state}", "operator": "Exists",
             "effect": "NoExecute", "tolerationSeconds": 30}
            for state in ("not-ready", "unreachable")],
        "containers": [container], "volumes": list(volumes.values()),
    }  # fmt: skip
    annotations = {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
        "kueue.x-k8s.io/podset-required-topology": job.topology if job.queue else None,
    }
    labels = {"ronde/job": job.name, "sidecar.istio.io/inject": "false"}
    return {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}


def write_yaml(data: _Data | Sequence[Any] | str | int, indent: str = "") -> str:
    """Return a block that follows a key, in ASCII; None leaves an entry out."""
    deeper = f"{indent}  "
    if data and isinstance(data, dict):
        pairs = [(write_yaml(k).strip(), v) for k, v in data.items() if v is not None]
        return "".join(f"\n{indent}{k}:{write_yaml(v, deeper)}" for k, v in pairs)
    if data and isinstance(data, list | tuple):
        items = [write_yaml(item, deeper).lstrip() for item in data]
        return "".join(f"\n{indent}- {item}" for item in items)
    if not isinstance(data, str):
        return f" {json.dumps(data)}"
    quoted = data.encode("unicode_escape").decode().replace('"', '\\"')
    return f" {data}" if _PLAIN.fullmatch(data) else f' "{quoted}"'
