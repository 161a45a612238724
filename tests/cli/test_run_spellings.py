"""Options as users of torchrun, mpirun, srun and others type them."""

import sys

import pytest

from ronde.cli import make_run_parser, read_run_request
from ronde.errors import UsageError

SIZE = ("/bin/sh", "-c", "echo $WORLD_SIZE")


def read(words):
    return read_run_request([*words.split(), "train.py"], {})


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--nproc_per_node 2", "--nproc-per-node 2"),
        ("-ppn 2 -n 2", "--nproc-per-node 2 -n 2"),
        ("--host localhost:1", "-H localhost:1"),
        ("--nproc_per_node auto", "--nproc-per-node auto"),
        ("--ntasks 2 --ntasks-per-node 2", "-n 2 --nproc-per-node 2"),
        ("-wdir /tmp", "--chdir /tmp"),
        ("--module", "-m"),
    ],
)
def test_options_as_others_spell_them(theirs, ours):
    assert read(theirs) == read(ours)


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ("--standalone --nnodes 1 --nproc-per-node 2 --no_python", 2),
        ("--nproc-per-node gpu", 3),
        ("-n auto", 3),
        ("--nnodes 1 -H localhost:2,n9:4", 2),
        ("-H localhost:4,n9:0 --nproc-per-node 3", 3),
    ],
)
def test_the_number_of_ranks(ronde, words, size):
    done = ronde(
        *("run", *words.split(), "--no-prefix", *SIZE),
        env={"CUDA_VISIBLE_DEVICES": "0,1,2"},
    )
    assert done.stdout.decode() == f"{size}\n" * size, done.stderr


def test_standalone_is_this_machine_alone_in_an_allocation_of_several(ronde):
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_NNODES": "3"}
    words = ("--standalone", "--nproc_per_node=2", "--no-prefix", *SIZE)
    assert ronde("run", *words, env=env).stdout == b"2\n2\n"


def test_a_module_is_run_with_the_python_of_scripts(ronde, tmp_path):
    package = tmp_path / "own"
    package.mkdir()
    said = "import sys; print(sys.executable, __package__, *sys.argv[1:])"
    (package / "train.py").write_text(said)
    words = ("-n", "1", "-m", "own.train", "-m", "--lr", "3")
    done = ronde("run", *words, cwd=tmp_path)
    expected = f"[0] {sys.executable} own -m --lr 3\n"
    assert done.stdout.decode() == expected, done.stderr


def test_tee_writes_files_where_log_dir_says(ronde, tmp_path):
    program = ("/bin/sh", "-c", "echo out; echo err >&2")
    done = ronde("run", "-n1", "-t", "3", "--log_dir", str(tmp_path), *program)
    assert (done.stdout, done.stderr) == (b"[0] out\n", b"[0] err\n")
    assert len(list(tmp_path.glob("*/attempt_0/0/std*.log"))) == 2
    done = ronde("run", "-n1", "--tee", "0:3,1:1", "/bin/true")
    assert done.stderr == b"ronde: --tee writes no files without --log-dir DIR.\n"


def test_every_option_has_its_twin_with_underscores():
    names = make_run_parser().options
    for name, action in names.items():
        twin = name[:2] + name[2:].replace("-", "_")
        assert names[twin] is action


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--grase 3s", "unknown option --grase. Did you mean --grace?"),
        ("--log_dri x", "unknown option --log_dri. Did you mean --log-dir?"),
        ("-Z", "unknown option -Z. Type: ronde run --help"),
        # torchrun
        ("--rdzv_endpoint n1:29400", "nodes join with --listen"),
        ("--master_addr n1", "--master_addr is an option of torchrun. Drop it"),
        ("-r 3", "Type --log-dir DIR"),
        # mpirun
        ("-N 2", "ranks per host to mpirun and hosts to srun"),
        ("-N2", "Type --nproc-per-node 2 or --nnodes 2"),
        ("--bind-to core", "Type --bind core"),
        ("--mca btl tcp", "Open MPI"),
        ("-genv A 1", "Type -x NAME=VALUE"),
        # srun
        ("-w n1", "Type -H HOSTS"),
        ("-l", "each line begins with its rank"),
        # deepspeed, accelerate
        ("--num_gpus 2", "Type --nproc-per-node N"),
        ("--mixed_precision bf16", "no equivalent"),
        ("--multi_gpu", "Drop it"),
    ],
)
def test_an_unknown_option_gets_one_sentence_with_its_equivalent(words, said):
    with pytest.raises(UsageError) as refused:
        read(words)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--nproc-per-node gpu", "--nproc-per-node gpu needs a GPU on each host, but "),
        ("--nproc-per-node tpu", "must be auto, gpu, cpu or a whole number"),
        ("--standalone -H 192.0.2.1", "--standalone and horovod.run() start"),
        ("--nnodes 2 -H localhost:1", "--nodes must be at most 1, the number"),
        ("--nnodes 1:4", "--nodes 1:4 needs a number of ranks for each host"),
        ("--tee 4", "--tee must be 0, 1, 2 or 3, or one of these"),
        ("-n", "-n must have a value"),
        ("--dry-run=yes", "--dry-run must have no value, got 'yes'"),
        ("-m", "a program is required"),
        ("-n 3 -ppn 2", "Requested more processes (3)"),
    ],
)
def test_what_does_not_fit_is_refused(ronde_here, words, said):
    program = () if words in ("-n", "-m") else ("/bin/true",)
    done = ronde_here("run", *words.split(), *program, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 64, done.stderr
    assert said in done.stderr.decode()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("rum", "Did you mean ronde run?"),
        ("chekc", "Did you mean ronde check?"),
        ("train.py", "Type: ronde run train.py"),
        ("check --jsno", "unknown option --jsno. Did you mean --json?"),
        ("topo place -n 2 --jsno", "Did you mean --json?"),
        ("trace shwo x", "Did you mean ronde trace show?"),
    ],
)
def test_other_verbs_say_what_was_meant(ronde_here, words, said):
    done = ronde_here(*words.split())
    assert done.returncode == 64, done.stderr
    assert said in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1
