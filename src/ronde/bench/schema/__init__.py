"""The JSON schema of what ``ronde bench -J`` writes."""

import json
from importlib.resources import files
from typing import Any


def load_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12) of a result's JSON."""
    text = files(__name__).joinpath("bench-result.json").read_text(encoding="utf-8")
    return json.loads(text)
