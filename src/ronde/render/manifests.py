"""Manifests of a job for Kubernetes 1.31 and newer, as YAML."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_Data = dict[str, Any]
# All other words are quoted, also those that some reader takes for a boolean or null.
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
    resources: Mapping[str, str | int]  # of each pod
    shm: str
    queue: str | None
    topology: str | None
    restarts: int
    gang: bool
    secret: str | None  # an existing one, in place of token
    token: str
    words: Sequence[str]  # options of ronde run, and the program
    slots: int | None
    grace_s: int
    final_codes: Sequence[int]  # ascending; they end the job for good
    is_open: bool  # pods that come back join the running job

    @property
    def max_pods(self) -> int:
        return int(self.nodes.rpartition(":")[2])


def draw_manifests(job: KubernetesJob) -> str:
    """Return the job's objects as YAML, and commands for later as comments."""
    kind, spec = {
        "job": ("batch/v1 Job", _job),
        "jobset": ("jobset.x-k8s.io/v1alpha2 JobSet", _jobset),
        "trainjob": ("trainer.kubeflow.org/v1alpha1 TrainJob", _trainjob),
        "mpijob": ("kubeflow.org/v2beta1 MPIJob", _mpijob),
    }[job.kind]
    own = {"ronde/job": job.name}
    pods = {"podSelector": {"matchLabels": own}}
    rules = {"policyTypes": ["Ingress"], "ingress": [{"from": [pods]}]}
    names = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": own}
    objects: dict[str, _Data] = {
        # Immutable, so that pods that come back have the others' token.
        "v1 Secret": {"immutable": True, "stringData": {"token": job.token}},
        "networking.k8s.io/v1 NetworkPolicy": {"spec": pods | rules},
        "v1 Service": {"spec": names},
        kind: {"spec": spec(job)},
    }
    left_out = {job.secret and "v1 Secret", job.kind != "job" and "v1 Service"}
    text = ""
    for version, word in map(str.split, objects.keys() - left_out):
        queue = job.queue if word == kind.split()[1] else None
        labels = own | {"kueue.x-k8s.io/queue-name": queue}
        head = {"apiVersion": version, "kind": word}
        head |= {"metadata": {"name": job.name, "labels": labels}}
        text += f"---{write_yaml(head | objects[f'{version} {word}'])}\n"
    log = f"-l ronde/job={job.name},batch.kubernetes.io/job-completion-index=0 --tail=-1"
    if job.kind == "mpijob":
        log = f"job/{job.name}-launcher"
    text += f"# log: kubectl logs -f {log}\n"
    if job.kind == "job" and ":" in job.nodes:
        patch = '{"spec":{"parallelism":N,"completions":N}}'
        text += f"# N pods: kubectl patch job {job.name} -p '{patch}'\n"
    kinds = f"secret,netpol,svc,{job.kind}"
    return f"{text}# delete: kubectl delete {kinds} -l ronde/job={job.name}\n"


def _job(job: KubernetesJob, lost: str = "Ignore") -> _Data:
    """Return the spec of an Indexed Job; ``lost`` is the action for evicted pods."""
    codes = {"containerName": "node", "operator": "In"}
    target = {"type": "DisruptionTarget", "status": "True"}
    near = {"topology": [{"key": job.topology}]} if job.topology else None
    gang = {"gang": {"minCount": int(job.nodes.partition(":")[0])}}
    scheduling = {"schedulingPolicy": gang, "schedulingConstraints": near}
    each = {"backoffLimitPerIndex": job.restarts, "maxFailedIndexes": 0}
    return {
        "completionMode": "Indexed",
        "completions": job.max_pods,
        "parallelism": job.max_pods,
        **({"backoffLimit": 0} if lost == "FailJob" else each),
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": [
            {"action": "FailJob", "onExitCodes": codes | {"values": job.final_codes}},
            {"action": lost, "onPodConditions": [target]},
            # The other pods of the job, after SIGTERM.
            {"action": lost, "onExitCodes": codes | {"values": [143]}},
        ]},
        # Without it, a pod lost in the last second fails a job that is done.
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "scheduling": scheduling if job.gang else None,
        "template": _pod(job, "--preflight", *job.words),
    }  # fmt: skip


def _jobset(job: KubernetesJob) -> _Data:
    actions = {"0": "FailJobSet", "[12]": "RestartJobSetAndIgnoreMaxRestarts"}
    rules = [
        {"name": action, "action": action, "onJobFailureReasons": ["PodFailurePolicy"]}
        # The end of the Job controller's message.
        | {"onJobFailureMessagePatterns": [f"FailJob rule at index {index}"]}
        for index, action in actions.items()
    ]
    # Unless lost pods come back alone, their Job fails and the JobSet makes a new one.
    spec = _job(job, "Ignore" if job.is_open else "FailJob")
    restarts = 0 if job.is_open else job.restarts
    return {
        "failurePolicy": {"maxRestarts": restarts, "rules": rules},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": spec}}],
    }


def _trainjob(job: KubernetesJob) -> _Data:
    pod = _pod(job, "--preflight", *job.words)
    container = pod["spec"]["containers"][0]
    # All that a TrainJob can change in the pods of a runtime.
    names = "securityContext tolerations volumes terminationGracePeriodSeconds"
    parts = [_only(container, "name securityContext volumeMounts")]
    pod["spec"] = _only(pod["spec"], names) | {"containers": parts}
    jobs = [{"name": "node", "template": {"spec": {"template": pod}}}]
    patch = {"template": {"spec": {"replicatedJobs": jobs}}}
    patches = [{"manager": "ronde/kubernetes", "trainingRuntimeSpec": patch}]
    trainer = _only(container, "image command env")
    trainer |= {"numNodes": job.max_pods, "numProcPerNode": _slots(job)}
    trainer |= {"resourcesPerNode": container["resources"]}
    runtime = {"name": "torch-distributed"}
    return {"runtimeRef": runtime, "trainer": trainer, "runtimePatches": patches}


def _mpijob(job: KubernetesJob) -> _Data:
    listen = ["--nodes", job.nodes, "--listen", "29400", "--preflight", *job.words]
    agent = ["--agent", f"{job.name}-launcher.{job.name}:29400"]
    agent += ["--slots", str(job.slots)] if job.slots else []
    roles = {"Launcher": (1, listen), "Worker": (job.max_pods - 1, agent)}
    replicas = {
        role: {"replicas": number, "restartPolicy": "Never"}
        | {"template": _pod(job, *words)}
        for role, (number, words) in roles.items()
    }
    # A failed worker is not made again: a second launcher would wait in vain.
    policy = {"backoffLimit": 0, "cleanPodPolicy": "Running"}
    spec = {"slotsPerWorker": _slots(job), "runLauncherAsWorker": True}
    return spec | {"runPolicy": policy, "mpiReplicaSpecs": replicas}


def _slots(job: KubernetesJob) -> int:
    return job.slots or int(job.resources.get("nvidia.com/gpu", 1))


def _only(data: _Data, names: str) -> _Data:
    return {name: data[name] for name in names.split()}


def _pod(job: KubernetesJob, *words: str) -> _Data:
    token = {"secretName": job.secret or job.name, "defaultMode": 0o440}
    shm = {"medium": "Memory", "sizeLimit": job.shm}
    volumes = [
        ({"name": "shm", "emptyDir": shm}, "/dev/shm"),  # noqa: S108
        ({"name": "tmp", "emptyDir": {}}, "/tmp"),  # noqa: S108
        ({"name": "token", "secret": token}, "/etc/ronde"),
    ]
    near = job.topology if job.queue else None
    return {
        "metadata": {
            "labels": {"ronde/job": job.name, "sidecar.istio.io/inject": "false"},
            "annotations": {
                "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
                "karpenter.sh/do-not-disrupt": "true",
                "kueue.x-k8s.io/podset-required-topology": near,
            },
        },
        "spec": {
            "restartPolicy": "Never",
            "subdomain": job.name if job.kind == "job" else None,
            "enableServiceLinks": False, "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": job.grace_s + 30,
            "securityContext": {
                "runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000,
                "fsGroup": 1000, "seccompProfile": {"type": "RuntimeDefault"},
            },
            "tolerations": [
                {"key": f"node.kubernetes.io/{state}", "operator": "Exists",
                 "effect": "NoExecute", "tolerationSeconds": 30}
                for state in ("not-ready", "unreachable")
            ],
            "containers": [{
                "name": "node", "image": job.image,
                "command": ["ronde", "run", "--join-timeout", "30m", *words],
                "env": [{"name": "RONDE_NODES", "value": job.nodes}],
                # Both the same: then cores and memory are the pod's own.
                "resources": {"requests": job.resources, "limits": job.resources},
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "securityContext": {
                    "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [
                    {"name": v["name"], "mountPath": path} for v, path in volumes
                ],
            }],
            "volumes": [volume for volume, _ in volumes],
        },
    }  # fmt: skip


def write_yaml(data: Any, indent: str = "") -> str:
    """Return a block that follows a key, in ASCII; None leaves an entry out."""
    deeper = f"{indent}  "
    if data and isinstance(data, dict):
        return "".join(
            f"\n{indent}{write_yaml(name).strip()}:{write_yaml(value, deeper)}"
            for name, value in data.items()
            if value is not None
        )
    if data and isinstance(data, list | tuple):
        items = (write_yaml(item, deeper).lstrip() for item in data)
        return "".join(f"\n{indent}- {item}" for item in items)
    if not isinstance(data, str):
        return f" {json.dumps(data)}"
    quoted = data.encode("unicode_escape").decode().replace('"', '\\"')
    return f" {data}" if _PLAIN.fullmatch(data) else f' "{quoted}"'
