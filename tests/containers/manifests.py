"""Pods of a printed manifest, as kubelet and the controllers would make them."""

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from tests.containers.pods import PodSpec
from tests.kubernetes.job_rules import quantity

from ronde.cli import main

Data = dict[str, Any]
_MPI = {
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_set_default_slots": "1",
}


class Manifest(NamedTuple):
    """The objects that ``ronde kubernetes`` prints."""

    kind: str
    objects: Mapping[str, Data]

    @property
    def job(self) -> Data:
        """The spec of the job, which may be changed."""
        *_, last = self.objects.values()
        return last["spec"]

    def templates(self) -> Iterator[tuple[str, Data, Data]]:
        """Yield the host name, the variables of the controller and the template."""
        job = self.job
        if self.kind == "mpijob":
            for role, part in job["mpiReplicaSpecs"].items():
                for i in range(part["replicas"]):
                    name = (
                        "train-launcher" if role == "Launcher" else f"train-worker-{i}"
                    )
                    own = {"K_MPI_JOB_ROLE": role.lower()}
                    own |= _MPI if role == "Launcher" else {}
                    yield name, own, part["template"]
            return
        if self.kind == "trainjob":
            trainer, template = job["trainer"], _patched(job)
            for i in range(trainer["numNodes"]):
                yield f"train-node-0-{i}", _torch(trainer, i), template
            return
        name, spec = "train", job
        if self.kind == "jobset":
            [part] = job["replicatedJobs"]
            name, spec = f"train-{part['name']}-0", part["template"]["spec"]
        for i in range(spec["completions"]):
            yield f"{name}-{i}", {"JOB_COMPLETION_INDEX": i}, spec["template"]

    def pods(self, folder: Path, **more: Any) -> list[PodSpec]:
        """Return all pods, in the order of their numbers; ``more`` is their image's.

        Args:
            folder: For their volumes.
        """
        return [self._pod(folder, *each)._replace(**more) for each in self.templates()]

    def _pod(self, folder: Path, name: str, variables: Data, template: Data) -> PodSpec:
        spec = template["spec"]
        [container] = spec["containers"]
        user, rights = spec["securityContext"], container["securityContext"]
        own = {each["name"]: each["value"] for each in container.get("env") or ()}
        memory = container["resources"]["limits"].get("memory")
        assert rights["capabilities"] == {"drop": ["ALL"]}
        pod = PodSpec(
            name,
            # As Kubernetes reads $(NAME) and $$.
            [word.replace("$$", "$") for word in container["command"]],
            environment={k: str(v) for k, v in (variables | own).items()},
            user=f"{user['runAsUser']}:{user['runAsGroup']}",
            is_read_only=rights["readOnlyRootFilesystem"],
            may_escalate=rights["allowPrivilegeEscalation"],
            memory_bytes=quantity(memory) if memory else None,
        )
        paths = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        for volume in spec["volumes"]:
            path, files = paths[volume["name"]], Path(tempfile.mkdtemp(dir=folder))
            if secret := volume.get("secret"):
                text = self.objects["Secret"]["stringData"]
                _write_secret(files, text, secret["defaultMode"], user["fsGroup"])
                pod = pod._replace(files={**pod.files, path: files})
            elif (directory := volume["emptyDir"]).get("medium") == "Memory":
                size = {path: quantity(directory["sizeLimit"])}
                pod = pod._replace(memory_folders={**pod.memory_folders, **size})
            else:
                files.chmod(0o2777)
                pod = pod._replace(folders={**pod.folders, path: files})
        return pod


def print_manifest(kind: str, *words: str, program: tuple[str, ...]) -> Manifest:
    """Return what ``ronde kubernetes`` prints for a job with the name ``train``."""
    named = ("--name", "train", "--image", "registry.example/train:1")
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert main(["kubernetes", kind, *named, *words, "--", *program]) == 0
    documents = yaml.safe_load_all(text.getvalue())
    return Manifest(kind, {document["kind"]: document for document in documents})


def _patched(job: Data) -> Data:
    """Return the runtime's pod with the changes of a TrainJob."""
    [patch] = job["runtimePatches"]
    [node] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    template = node["template"]["spec"]["template"]
    [container] = template["spec"]["containers"]
    trainer = job["trainer"]
    container |= {name: trainer[name] for name in ("command", "env")}
    container["resources"] = trainer["resourcesPerNode"]
    return template


def _torch(trainer: Data, number: int) -> Data:
    return {
        "JOB_COMPLETION_INDEX": number,
        "PET_NNODES": trainer["numNodes"],
        "PET_NPROC_PER_NODE": trainer["numProcPerNode"],
        "PET_NODE_RANK": number,
        "PET_MASTER_ADDR": "train-node-0-0.train",
        "PET_MASTER_PORT": 29500,
    }


def _write_secret(folder: Path, text: Mapping[str, str], mode: int, group: int) -> None:
    """Write a Secret as kubelet does: behind two symbolic links."""
    folder.chmod(0o755)
    (folder / "..2026_01").mkdir(mode=0o755)
    (folder / "..data").symlink_to("..2026_01")
    for name, value in text.items():
        path = folder / "..2026_01" / name
        path.write_text(value)
        os.chown(path, 0, group)
        path.chmod(mode)
        (folder / name).symlink_to(f"..data/{name}")
