"""Schemas of Kubernetes and of the controllers, to validate manifests strictly."""

import functools
import gzip
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

VERSIONS = [f"1.{minor}" for minor in range(31, 38)]
CRDS = Path(__file__).parents[3] / "shared" / "crds"
# Of libyaml where PyYAML has it: it reads a definition in 0.2 s instead of 3 s.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def list_mistakes(document: dict[str, Any], version: str) -> list[str]:
    """Return what is wrong with an object, of Kubernetes or of a controller.

    Args:
        version: Of Kubernetes, as ``1.37``; it does not count for controllers' objects.
    """
    group = document["apiVersion"].rpartition("/")[0]
    is_custom = group.partition(".")[2] and not group.endswith("networking.k8s.io")
    validator = (
        _custom_validator(document["kind"])
        if is_custom
        else _validator(document["apiVersion"], document["kind"], version)
    )
    errors = validator.iter_errors(document)
    return [f"{error.json_path}: {error.message[:200]}" for error in errors]


@functools.cache
def _folder() -> zipfile.Path:
    # Not installed: its schemas, 17,000 files, are all that tests need.
    wheels = sorted(Path(sys.prefix, "schemas").glob("kubernetes_validate-*.whl"))
    if not wheels:
        pytest.skip("the schemas of Kubernetes are not here: scripts/test fetches them")
    return zipfile.Path(wheels[-1]) / "kubernetes_validate" / "kubernetes-json-schema"


@functools.cache
def _validator(api: str, kind: str, version: str) -> Draft202012Validator:
    folder = _folder() / f"v{version}.0-local-strict"
    name = f"{kind}-{api.replace('.k8s.io/', '-').replace('/', '-')}.json"
    schema = json.loads((folder / name.lower()).read_text())
    return Draft202012Validator(schema, registry=_definitions(version))


@functools.cache
def _definitions(version: str) -> "Registry[Any]":
    folder = _folder() / f"v{version}.0-local-strict"
    contents = json.loads((folder / "_definitions.json").read_text())
    return Resource.from_contents(contents) @ Registry()


@functools.cache
def _custom_validator(kind: str) -> Draft202012Validator:
    found = list(CRDS.glob(f"{kind.lower()}-v*.yaml.gz"))
    if not found:
        pytest.skip(f"the definition of {kind} is not in {CRDS}")
    definition = yaml.load(gzip.decompress(found[0].read_bytes()), LOADER)  # noqa: S506
    [version] = definition["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    for part in _structures(schema):
        part["additionalProperties"] = False
    return Draft202012Validator(schema)


def _structures(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the schemas of objects with a fixed set of fields."""
    if isinstance(schema, list):
        for item in schema:
            yield from _structures(item)
    elif isinstance(schema, dict):
        is_open = "x-kubernetes-preserve-unknown-fields" in schema
        if isinstance(schema.get("properties"), dict) and not is_open:
            yield schema
        for item in schema.values():
            yield from _structures(item)
