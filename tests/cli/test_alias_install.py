"""``ronde alias``: ``horovod`` for every Python of an environment."""

import os
import subprocess
from pathlib import Path

import pytest
from tests.launchers import launcher_environment, launcher_words
from tests.limits import HANG_S
from tests.virtual_environments import make_environment

ROOT = Path(__file__).parents[2]
ALIAS = ROOT / "src" / "ronde" / "horovod" / "alias"
SHOW = "import horovod; print(horovod.__file__)"
OURS = f"{ROOT}/src/ronde/horovod/__init__.py\n"
FIND = """
import horovod
print(f"{horovod.__file__}\\n", end="")
"""
RANK = """
import horovod.torch as hvd, torch
hvd.init()
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum)
print(f"{hvd.__name__} {hvd.size()} {total.item():g}\\n", end="")
"""


@pytest.fixture
def environment(tmp_path):
    return make_environment(tmp_path / "environment")


def files(environment):
    bin_directory = environment.python.parent
    return {*environment.packages.iterdir(), *bin_directory.iterdir()}


def test_it_is_installed_shown_and_removed(environment) -> None:
    before = files(environment)
    path_file = environment.packages / "ronde-horovod.pth"
    show = (str(environment.python), "-c", SHOW)
    assert environment.run(*show)[0] == 1
    steps = [
        ("", "not installed. Type: ronde alias --install"),
        ("--remove", f"the alias is not installed: there is no {path_file}"),
        ("--install", "installed: import horovod finds ronde"),
        ("--install", f"the alias is installed already: {path_file} and"),
        ("", f"installed: import horovod finds ronde, by {path_file}"),
    ]
    for option, expected in steps:
        code, out, err = environment.ronde("alias", *filter(None, [option]))
        assert (code, err) == (0, ""), option
        assert out.startswith(expected), option
    assert files(environment) - before == {path_file, environment.horovodrun}
    # Whatever a program makes of the path of its children.
    for path in ("", "/nowhere"):
        assert environment.run(*show, PYTHONPATH=path) == (0, OURS, "")
    code, out, err = environment.ronde("alias", "--remove")
    removed = f"removed: {path_file} and {environment.horovodrun}\n"
    assert (code, out, err) == (0, removed, "")
    assert files(environment) == before
    assert environment.run(*show)[0] == 1


def test_one_that_leads_elsewhere_is_shown_and_replaced(environment) -> None:
    path_file = environment.packages / "ronde-horovod.pth"
    path_file.write_text("/where/ronde/was\n")
    shown = f"{path_file} leads to /where/ronde/was. Type: ronde alias --install\n"
    assert environment.ronde("alias") == (0, shown, "")
    assert environment.ronde("alias", "--install")[0] == 0
    assert path_file.read_text() == f"{ALIAS}\n"


@pytest.mark.parametrize(
    ("launcher", "size"),
    [("python", 1), ("torchrun", 2), ("mpirun", 3), ("ronde", 2)],
)
def test_ranks_find_it(environment, tmp_path, launcher, size) -> None:
    """And train by it; of what starts ranks in another way that is tested elsewhere."""
    assert environment.ronde("alias", "--install")[0] == 0
    is_ours = launcher == "ronde"
    script = tmp_path / "train.py"
    script.write_text(RANK if is_ours else FIND)
    words = launcher_words(launcher, size, str(environment.python))
    env = launcher_environment(tmp_path, PYTHONPATH="/nowhere")
    done = subprocess.run(
        [*words, str(script)],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == size * ("ronde.torch 2 3\n" if is_ours else OURS), done.stderr


def test_it_is_refused_beside_horovod_itself(environment) -> None:
    environment.add_horovod()
    before = files(environment)
    command = environment.horovodrun.read_bytes()
    code, out, err = environment.ronde("alias", "--install")
    assert (code, out) == (64, "")
    assert err == (
        "ronde: the alias cannot be installed, as this environment has the package "
        f"{environment.packages}/horovod. Type: pip uninstall horovod, or use the "
        "alias for one job: ronde run --horovod-alias\n"
    )
    code, out, err = environment.ronde("alias", "--remove")
    assert (code, err) == (0, "")
    assert out.startswith("the alias is not installed")
    assert environment.ronde("alias")[1].startswith("not installed, and cannot be")
    assert files(environment) == before
    assert environment.horovodrun.read_bytes() == command


def test_another_horovodrun_is_neither_replaced_nor_removed(environment) -> None:
    environment.horovodrun.write_text("#!/bin/sh\n")
    before = files(environment)
    code, _, err = environment.ronde("alias", "--install")
    assert code == 64
    assert f"{environment.horovodrun} exists and was not written by ronde" in err
    assert files(environment) == before
    environment.horovodrun.unlink()
    assert environment.ronde("alias", "--install")[0] == 0
    # As pip does, when Horovod is installed later.
    environment.horovodrun.write_text("#!/bin/sh\n")
    assert environment.ronde("alias", "--remove")[0] == 0
    assert files(environment) == before


@pytest.mark.parametrize("closed", ["packages", "bin"])
def test_a_read_only_environment(environment, closed) -> None:
    is_bin = closed == "bin"
    directory = environment.python.parent if is_bin else environment.packages
    before = files(environment)
    directory.chmod(0o555)
    # Root may write there all the same, but for this.
    no_right = ("setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override")
    run = () if os.getuid() else no_right
    code, out, err = environment.ronde("alias", "--install", before=run)
    directory.chmod(0o755)
    assert (code, out) == (64, "")
    assert ": Permission denied. Use a virtual environment" in err
    assert files(environment) == before


WARNING = "ronde: Horovod is installed beside ronde, in {}, and is what the ranks"


def test_a_start_with_both_warns_and_can_be_forced(environment) -> None:
    environment.add_horovod()
    real = environment.packages / "horovod"
    program = ("-n", "1", "--no-prefix", str(environment.python), "-c", SHOW)
    code, out, err = environment.ronde("run", *program)
    assert (code, out) == (0, f"{real}/__init__.py\n")
    assert err.startswith(WARNING.format(real))
    assert err.count("\n") == 1
    forced = environment.ronde("run", "--horovod-alias", *program)
    assert forced == (0, OURS, "")
    off = environment.ronde("run", "--no-horovod-alias", *program)
    assert off == (0, f"{real}/__init__.py\n", "")
