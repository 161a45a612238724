"""``images/Dockerfile`` keeps its rules, and ``images/ronde.def`` does the same."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "images"
ENVIRONMENT = {
    "PATH": "/opt/ronde/bin:$PATH",
    "HOME": "/tmp",  # noqa: S108 - a path in the image
    "USER": "ronde",
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
}


def read_instructions() -> list[list[str]]:
    """Return the instructions of each stage of the Dockerfile, a line each."""
    text = (FOLDER / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    lines = [" ".join(line.split()) for line in text.splitlines() if line]
    starts = [i for i, line in enumerate(lines) if line.startswith("FROM ")]
    ends = [*starts[1:], len(lines)]
    return [
        lines[: starts[0]],
        *(lines[i:j] for i, j in zip(starts, ends, strict=True)),
    ]


def read_definition() -> dict[str, list[str]]:
    """Return the lines of each section of ``ronde.def``."""
    header, *sections = re.split(
        r"^%", (FOLDER / "ronde.def").read_text(), flags=re.MULTILINE
    )
    found = {"": header.splitlines()}
    for section in sections:
        name, *lines = section.splitlines()
        found[name] = [" ".join(line.split()) for line in lines if line.strip()]
    return found


def arguments(lines: list[str]) -> dict[str, str]:
    """Return the names and defaults of the ARG instructions among lines."""
    pattern = r'([A-Z_]+)(?:=("[^"]*"|\S*))?(?=\s|$)'
    return {
        name: value.strip('"')
        for line in lines
        if line.startswith("ARG ")
        for name, value in re.findall(pattern, line.removeprefix("ARG "))
    }


def variables(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split()[1:])


def test_the_script_is_bash() -> None:
    subprocess.run(["/bin/bash", "-n", ROOT / "scripts" / "images"], check=True)


def test_the_image_runs_as_a_number_and_ronde_is_its_last_layer() -> None:
    _, _, image = read_instructions()
    words = [line.split()[0] for line in image]
    assert not {"ENTRYPOINT", "CMD", "ONBUILD", "VOLUME"} & set(words)
    assert image[-1] == "COPY --from=build /new/opt/ronde /opt/ronde"
    # Metadata after the last COPY would be harmless, a layer would not.
    assert words == ["FROM", "ARG", "USER", "COPY", "RUN", "ENV", "USER", "COPY"]
    assert [line for line in image if line.startswith("USER")] == [
        "USER root",
        "USER 1000:1000",
    ]
    (environment,) = (line for line in image if line.startswith("ENV"))
    assert variables(environment) == ENVIRONMENT
    (run,) = (line for line in image if line.startswith("RUN"))
    assert "ronde:x:1000:1000::/tmp:/bin/sh" in run
    assert "rm -rf /var/lib/apt/lists/* /var/cache/apt/* /etc/ssh/ssh_host_*" in run
    assert re.findall(r"StrictHostKeyChecking \S+", run) == [
        "StrictHostKeyChecking accept-new'"
    ]
    # Neither ssh nor a compiler is there by default.
    assert 'packages="$TOOLS ${SSH:+openssh-server}"' in run
    assert arguments(image) == {"TOOLS": "", "SSH": ""}


def test_dependencies_are_built_before_the_source_is_there() -> None:
    _, build, _ = read_instructions()
    copies = [line for line in build if line.startswith(("COPY", "RUN"))]
    assert copies[0] == "COPY pyproject.toml constraints.txt ./"
    assert (
        "pip install --no-cache-dir $TORCH --requirement requirements.txt" in copies[1]
    )
    assert copies[-2] == "COPY src src"
    assert copies[-1] == "RUN /opt/ronde/bin/pip install --no-deps --root /new ."
    assert "--no-compile" not in " ".join(build)


def test_apptainers_definition_agrees() -> None:
    first, build, image = read_instructions()
    definition = read_definition()
    same = arguments([*first, *build, *image])
    for only_docker in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "SSH"):
        del same[only_docker]
    assert dict(line.split("=", 1) for line in definition["arguments"]) == same
    assert "From: {{ BASE }}" in definition[""]
    post = definition["post"]
    # Every step but those for another user, as Apptainer runs programs as the caller.
    for line in (*build, *image):
        for step in (
            line.removeprefix("RUN ").split(" && ") if line.startswith("RUN") else ()
        ):
            if "/etc/passwd" not in step and "--root /new" not in step:
                assert step.replace("$TORCH", "{{ TORCH }}") in post
    assert "/opt/ronde/bin/pip install --no-deps ." in post
    (install,) = re.findall(r"apt-get install .*?;", " ".join(image))
    assert install in " ".join(post)
    (export,) = (
        line for line in definition["environment"] if line.startswith("export")
    )
    assert variables(export) == {
        name: value
        for name, value in ENVIRONMENT.items()
        if name not in ("HOME", "USER")
    }
    copied = " ".join(line for line in build if line.startswith("COPY")).split()
    files = [line.split() for line in definition["files"]]
    assert all(folder == "/source/" for _, folder in files)
    assert {file for file, _ in files} == set(copied) - {"COPY", "./"}
