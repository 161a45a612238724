"""The loops of ``benchmarks`` that break jobs, as tests run them."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).parents[2] / "benchmarks"


def load_script(name: str) -> ModuleType:
    """Return a script as a module, with all faults that it knows."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run_loop(script: str, *words: str) -> dict[str, Any]:
    """Run a script, which must find nothing wrong; return its last line."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{script}.py"), *words],
        capture_output=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    return json.loads(done.stdout.splitlines()[-1])
