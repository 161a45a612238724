"""``ronde kubernetes``: print the manifests of a job."""

import argparse
import re
import secrets
import sys
from collections.abc import Sequence
from functools import partial
from math import ceil
from posixpath import normpath

from ronde.arguments import CommandParser, attribute_of, read_nodes, whole_number
from ronde.cli.hosts import DISCOVERIES
from ronde.cli.run import make_run_parser, read_request
from ronde.errors import UsageError
from ronde.render.manifests import OWN_FOLDERS, KubernetesJob, draw_manifests
from ronde.units import parse_size_bytes

_HELP = """\
usage: ronde kubernetes job|jobset|trainjob|mpijob --name NAME --image IMAGE --nodes N
                        [options] -- [options of ronde run] program [arguments]

Print manifests for Kubernetes 1.31 and newer, for kubectl apply -f -. In each pod,
ronde run gets the words after --, as user 1000 and without rights. The program's path
is one in the image. Other kinds of pods: docs/how-to/kubernetes.md.

options:
  --name NAME       name of all objects
  --image IMAGE     image with ronde and the program
  --nodes N         number of pods, or A:B: an elastic job of A to B pods
  --gpus N          GPUs of each pod (nvidia.com/gpu)
  --cpu CORES       cores of each pod, as 64 or 500m
  --memory SIZE     memory of each pod, as 512Gi
  --shm SIZE        size of /dev/shm, a part of that memory (default: 8Gi, or all)
  --resource NAME=N ...
                    other devices of each pod, as rdma/hca=1
  --volume CLAIM:DIR ...
                    persistent volume claims of all pods, as data:/data
  --queue NAME      local queue of Kueue
  --topology LABEL  with --queue or --gang: use nodes with one value of this label
  --restarts N      how often all start again after a failure (default: 3)
  --secret NAME     existing Secret with the key token (default: make a new one)
  --gang            start all pods or none (Kubernetes 1.37, gate WorkloadWithJob)
  -h, --help        show this help and exit
"""
_CURE = "Type: ronde kubernetes job --name train --image IMAGE --nodes 3 -- train.py"
_KINDS = ("job", "jobset", "trainjob", "mpijob")
_FORMS = {
    "NAME": ("[a-z]([a-z0-9-]*[a-z0-9])?", "a-z, 0-9 and -, from a letter on"),
    "IMAGE": (r"[\w.:/@-]+", "the name of an image"),
    "CORES": ("[1-9][0-9]*m?", "a number of cores as 64 or 500m"),
    "SIZE": ("[1-9][0-9]*([KMGTP]i|[kMGTP])?", "a size as 512Gi or 500M"),
    "NAME=N": (r"[a-z0-9.-]+/[\w.-]+=[1-9][0-9]{0,8}", "a device as rdma/hca=1"),
    "CLAIM:DIR": (
        r"[a-z0-9][a-z0-9.-]*:/\w[\w./-]*",
        "a claim and a folder as data:/data",
    ),
    "LABEL": (r"([a-z0-9.-]+/)?\w([\w.-]{0,61}\w)?", "the name of a label"),
}
_PLACING = ("--nodes", "--standalone", "--listen", "--agent", "--hosts", "--hostfile")


def run(words: Sequence[str]) -> int:
    at = words.index("--") if "--" in words else len(words)
    if at == len(words) and not {"-h", "--help"} & {*words}:
        raise UsageError(f"the program must follow --. {_CURE}")
    types = {name: partial(_read, *form) for name, form in _FORMS.items()}
    types |= {"N": whole_number(1), "--restarts": whole_number(), "--nodes": str}
    parser = CommandParser(
        "ronde kubernetes", _HELP, types=types, positionals={"kind": None}
    )
    parser.set_defaults(restarts=3)
    for name in ("--name", "--image", "--nodes"):
        parser.options[name].required = True
    if options := parser.read(words[:at]):
        text = draw_manifests(_read_job(options, words[at + 1 :]))
        print(text, end="")
        if not sys.stdout.isatty():  # kubectl reads it: show what comes next
            notes = re.findall("^# .*\n", text, re.MULTILINE)
            print("".join(notes), end="", file=sys.stderr)
    return 0


def _read(pattern: str, rule: str, text: str) -> str:
    if not re.fullmatch(pattern, text, re.ASCII):
        raise UsageError(f"must be {rule}, got {text!r}")
    return text


def _read_job(options: argparse.Namespace, words: Sequence[str]) -> KubernetesJob:
    if options.kind not in _KINDS:
        names = f"{', '.join(_KINDS[:-1])} or {_KINDS[-1]}"
        raise UsageError(f"kind must be {names}, got {options.kind!r}. {_CURE}")
    own = make_run_parser(words).parse_args(words)
    if own.program[:2] == ["ronde", "run"]:
        raise UsageError("ronde run must be left out after --: each pod runs it.")
    placing = [n for n in (*_PLACING, *DISCOVERIES) if getattr(own, attribute_of(n))]
    if not placing:
        read_request(own, {}, {})  # refuses what ronde run would refuse in the pods
    least, most = read_nodes(options.nodes, cure=_CURE)
    sizes = {"cpu": options.cpu, "memory": options.memory}
    sizes |= {"nvidia.com/gpu": options.gpus}
    devices = [text.split("=") for text in options.resource]
    if len({name for name, _ in devices} - sizes.keys()) < len(devices):
        raise UsageError("--resource must name each device once, beside --gpus.")
    folders = [normpath(text.partition(":")[2]) for text in options.volume]
    if len({*folders, *OWN_FOLDERS}) < len(folders) + len(OWN_FOLDERS):
        raise UsageError(
            f"--volume must name each folder once, and none of {', '.join(OWN_FOLDERS)}"
            f", got {', '.join(folders)}."
        )
    options.shm = options.shm or min("8Gi", options.memory or "8Gi", key=_bytes)
    job = KubernetesJob(
        **{n: getattr(options, n) for n in KubernetesJob._fields if n in options},
        least=least,
        most=most,
        resources={name: size for name, size in sizes.items() if size}
        | {name: int(number) for name, number in devices},
        token=secrets.token_hex(32),
        words=words,
        slots=own.slots or options.gpus,
        grace_s=ceil(own.grace),
        final_codes=sorted({64, *own.no_restart_codes}),
        is_open=bool(least < most or own.max_restarts or own.min_ranks),
    )
    _refuse_mistakes(job, placing)
    return job


def _bytes(size: str) -> int:
    return parse_size_bytes(f"{size}B")


def _refuse_mistakes(job: KubernetesJob, placing: Sequence[str]) -> None:
    """Refuse mistakes that Kubernetes finds late, or accepts."""
    last = f"{job.most - 1}"
    suffixes = {"job": f"-{last}", "mpijob": f"-worker-{last}"}
    suffix = suffixes.get(job.kind, f"-node-0-{last}-12345")
    room, memory = 63 - len(suffix), job.resources.get("memory", job.shm)
    codes = [code for code in job.final_codes if not 0 < code < 256]
    mistakes = {
        f"{', '.join(placing)} must be left out after --: the pods know their places.":
            placing,
        f"--nodes must be at least 2, got {job.nodes}. One pod needs no other: give it "
        "the command ronde run train.py.": job.most == 1,
        f"--name must have at most {room} characters, got {len(job.name)}: a pod is "
        f"named {job.name}{suffix}.": len(job.name) > room,
        f"--shm must be at most --memory, {memory}, got {job.shm}.":
            _bytes(job.shm) > _bytes(memory),
        f"--no-restart-codes must be codes from 1 to 255, got {codes}.": codes,
        f"--gang must be left out, got {job.kind}: only a Job has it. Use --queue.":
            job.gang and job.kind != "job",
        "--topology has no effect without --queue or --gang. Give one.":
            job.topology and not (job.queue or job.gang),
        f"--restarts must be left out, got {job.kind}: its controller decides. Give "
        "--max-restarts to ronde run.":
            job.restarts != 3 and job.kind in ("trainjob", "mpijob"),
    }  # fmt: skip
    for text, is_mistake in mistakes.items():
        if is_mistake:
            raise UsageError(text)
