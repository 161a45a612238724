"""Report the machine and the missing modules: ``facts.py FILE``.

Runs in the environment of the tests. Appends a record to FILE; exits with 1 where a
module is missing.
"""

import importlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.gpu_machine.packing import WANTED

MODULES = ("torch", *WANTED.values(), "ronde", "ronde.torch")
COMMANDS = (
    ("nvidia-smi",),
    ("nvidia-smi", "topo", "-m"),
    ("nvidia-smi", "--query-gpu=name,driver_version,pci.bus_id,pstate", "--format=csv"),
    ("df", "-h", "/dev/shm", "/tmp"),  # noqa: S108
)


def main(path: str) -> int:
    """Look at everything; return the exit code."""
    for command in COMMANDS:
        _show(command)
    missing: dict[str, str] = {}
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  a library may raise anything
            missing[name] = f"{type(error).__name__}: {error}"
        else:
            print(f"{name:16}{getattr(module, '__file__', '')}")
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "num_cores": len(os.sched_getaffinity(0)),
        "gpus": [],
        "missing": missing,
    }
    if "torch" not in missing:
        facts |= _torch_facts()
    print(json.dumps(facts, indent=1))
    with Path(path).open("a") as file:
        file.write(json.dumps({"kind": "facts", "values": facts}) + "\n")
    if missing:
        print("modules are missing: " + ", ".join(missing))
    return 1 if missing else 0


def _torch_facts() -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if not torch.cuda.is_available():
        return facts
    gpus = [
        torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())
    ]
    facts["gpus"] = [
        {"name": gpu.name, "memory_gib": round(gpu.total_memory / (1 << 30), 1)}
        for gpu in gpus
    ]
    facts["sum_on_gpu"] = float(torch.ones(3, device="cuda").sum())  # that it works
    facts["driver"] = _ask(
        "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
    )
    facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    facts["cudnn"] = torch.backends.cudnn.version()
    return facts


def _ask(*command: str) -> str:
    """Return the first line that a command prints; empty without."""
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout.partition("\n")[0]


def _show(command: tuple[str, ...]) -> None:
    print("$", *command, flush=True)
    try:
        subprocess.run(command, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
