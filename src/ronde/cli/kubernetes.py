"""``ronde kubernetes``: print the manifests of a job."""

import argparse
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil

from ronde.arguments import CommandParser, refuse_verb, whole_number
from ronde.cli.run import make_run_parser, read_request
from ronde.errors import UsageError
from ronde.render.manifests import KubernetesJob, draw_manifests
from ronde.units import parse_size_bytes

_HELP = """\
usage: ronde kubernetes job|jobset|trainjob|mpijob --name NAME --image IMAGE --nodes N
                        [options] -- [options of ronde run] program [arguments]

Print manifests for Kubernetes 1.31 and newer: pipe them to kubectl apply -f -. Each pod
runs ronde run with the words after --, as user 1000 and without rights.

options:
  --name NAME      name of all objects
  --image IMAGE    image with ronde and the program
  --nodes N        number of pods, or A:B: an elastic job of A to B pods
  --gpus N         GPUs of each pod (nvidia.com/gpu)
  --cpu CORES      cores of each pod, as 64 or 500m
  --memory SIZE    memory of each pod, as 512Gi
  --shm SIZE       size of /dev/shm, a part of that memory (default: 1Gi)
  --resource NAME=N ...
                   other devices of each pod, as rdma/hca=1
  --queue NAME     local queue of Kueue
  --topology LABEL
                   with --queue or --gang: use nodes with one value of this label
  --restarts N     how often all start again after a failure (default: 3)
  --secret NAME    existing Secret with the key token (default: make a new one)
  --gang           start all pods or none (Kubernetes 1.37, gate WorkloadWithJob)
  -h, --help       show this help and exit
"""
_PLACING = "nodes standalone listen agent hosts hostfile host_discovery".split()
_KINDS = ("job", "jobset", "trainjob", "mpijob")
_SIZE = "[1-9][0-9]*([KMGTP]i|[kMGTP])?"
_FORMS = {
    "NAME": ("[a-z]([a-z0-9-]{0,61}[a-z0-9])?", "a-z, 0-9 and - as in train-1"),
    "--nodes": ("([1-9][0-9]{0,4}:)?[1-9][0-9]{0,4}", "a number or A:B"),
    "CORES": ("[1-9][0-9]*m?", "a number of cores as 64 or 500m"),
    "SIZE": (_SIZE, "a size as 512Gi or 500M"),
    "NAME=N": (r"[a-z0-9.-]+/[\w.-]+=[1-9][0-9]{0,8}", "a device as rdma/hca=1"),
    "LABEL": (r"([a-z0-9.-]+/)?\w([\w.-]{0,61}\w)?", "the name of a label"),
}


def run(words: Sequence[str]) -> int:
    at = words.index("--") if "--" in words else len(words)
    types = {name: partial(_read, *form) for name, form in _FORMS.items()}
    types |= {"N": whole_number(1), "--restarts": whole_number()}
    parser = CommandParser(
        "ronde kubernetes", _HELP, types=types, positionals={"kind": None}
    )
    for name in ("--name", "--image", "--nodes"):
        parser.options[name].required = True
    if options := parser.read(words[:at]):
        print(draw_manifests(_read_job(options, words[at + 1 :])), end="")
    return 0


def _read(pattern: str, rule: str, text: str) -> str:
    if not re.fullmatch(pattern, text, re.ASCII):
        raise UsageError(f"must be {rule}, got {text!r}")
    return text


def _read_job(options: argparse.Namespace, words: Sequence[str]) -> KubernetesJob:
    if options.kind not in _KINDS:
        refuse_verb(options.kind, _KINDS, "ronde kubernetes")
    parser = make_run_parser(words)
    own = parser.parse_args(words)
    read_request(own, {}, {})  # refuses what ronde run would refuse in the pods
    devices = dict(text.split("=") for text in options.resource)
    gpus = {"nvidia.com/gpu": options.gpus} if options.gpus else {}
    sizes = {"cpu": options.cpu, "memory": options.memory}
    job = KubernetesJob(
        kind=options.kind,
        name=options.name,
        image=options.image,
        nodes=options.nodes,
        resources={name: size for name, size in sizes.items() if size}
        | {name: int(number) for name, number in (devices | gpus).items()},
        shm=options.shm or "1Gi",
        queue=options.queue,
        topology=options.topology,
        restarts=3 if options.restarts is None else options.restarts,
        gang=options.gang,
        secret=options.secret,
        token=secrets.token_hex(32),
        words=words[words[:1] == ["--"] :],
        slots=own.slots,
        grace_s=ceil(own.grace),
        final_codes=sorted({64, *own.no_restart_codes}),
        is_open=bool(":" in options.nodes or own.max_restarts or own.min_ranks),
    )
    _refuse_mistakes(job, options.restarts, parser.given(own))
    return job


def _refuse_mistakes(
    job: KubernetesJob, restarts: int | None, given: Mapping[str, str]
) -> None:
    """Refuse what Kubernetes would refuse late, or accept and not run."""
    least, last = int(job.nodes.partition(":")[0]), job.max_pods - 1
    suffixes = {"job": f"-{last}", "mpijob": f"-worker-{last}"}
    suffix = suffixes.get(job.kind, f"-node-0-{last}-12345")
    room, memory = 63 - len(suffix), job.resources.get("memory")
    shares = [parse_size_bytes(f"{size}B") for size in (job.shm, memory or job.shm)]
    bad_codes = [code for code in job.final_codes if not 0 < code < 256]
    placed = [name for where, name in given.items() if where in _PLACING]
    mistakes = {
        f"--nodes must be at least 2, or A:B with A of at most B, got {job.nodes}. One "
        "pod needs no manifest of ronde's.": least > job.max_pods or last == 0,
        f"--name must have at most {room} characters, as {suffix} follows in the name "
        f"of a pod, got {len(job.name)}.": len(job.name) > room,
        f"--shm must be at most --memory, {memory}, got {job.shm}. It is a part of the "
        "pod's memory.": shares[0] > shares[1],
        "--no-restart-codes must be exit codes from 1 to 255, got "
        f"{bad_codes}.": bool(bad_codes),
        f"--gang must be left out for {job.kind}: only a Job has it. Use --queue.":
            job.gang and job.kind != "job",
        "--topology has no effect without --queue or --gang. Give one.":
            bool(job.topology and not (job.queue or job.gang)),
        f"--restarts must be left out for {job.kind}: its controller cannot start all "
        "pods again. Give --max-restarts to ronde run.":
            restarts is not None and job.kind in ("trainjob", "mpijob"),
        f"{', '.join(placed)} must be left out after --: the manifest places the pods.":
            bool(placed),
    }  # fmt: skip
    for text, is_mistake in mistakes.items():
        if is_mistake:
            raise UsageError(text)
