"""Which variables travel, which stay, and which are shown to nobody."""

import pytest
from hypothesis import given, strategies as st

from ronde.errors import UsageError
from ronde.launch import (
    base_environment,
    is_rank_variable,
    names_secret,
    read_assignments,
    redacted,
    select_forwarded,
)

OWN = {
    "PATH": "/bin",
    "PYTHONPATH": "/work",
    "CONDA_PREFIX": "/conda",
    "NCCL_DEBUG": "INFO",
    "HOROVOD_FUSION_THRESHOLD": "1",
    "HOROVOD_RANK": "3",
    "RONDE_ENGINE": "gloo",
    "RONDE_COOKIE": "c",
    "LC_ALL": "C",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCH_HOME": "/t",
    "CUDA_VISIBLE_DEVICES": "1",
    "CUDA_HOME": "/cuda",
    "HOME": "/root",
    "HF_TOKEN": "hf",
    "WANDB_API_KEY": "k",
    "WANDB_MODE": "offline",
    "RONDE_TOKEN_FILE": "/t",
    "OMPI_COMM_WORLD_RANK": "1",
    "SLURM_STEP_NODELIST": "n",
    "SLURM_JOB_ID": "7",
    "SSH_CONNECTION": "a b",
    "SSH_AUTH_SOCK": "/s",
    "SUDO_USER": "ada",
    "LD_PRELOAD": "x.so",
}
NAMES = st.one_of(st.sampled_from(sorted(OWN)), st.text(min_size=1, max_size=12))
ENVIRONS = st.dictionaries(NAMES, st.text(max_size=5))


def test_only_variables_for_training_are_forwarded():
    assert set(select_forwarded(OWN)) == {
        "PATH",
        "PYTHONPATH",
        "CONDA_PREFIX",
        "NCCL_DEBUG",
        "HOROVOD_FUSION_THRESHOLD",
        "RONDE_ENGINE",
        "LC_ALL",
        "TORCH_HOME",
        "CUDA_HOME",
    }


def test_named_variables_are_always_forwarded():
    words = ["HF_TOKEN", "CUDA_VISIBLE_DEVICES", "A=b=c", "PATH=/other", "E="]
    assert read_assignments(words, OWN) == {
        "HF_TOKEN": "hf",
        "CUDA_VISIBLE_DEVICES": "1",
        "A": "b=c",
        "PATH": "/other",
        "E": "",
    }


def test_a_pattern_takes_no_secret_along():
    assert read_assignments(["WANDB_*"], OWN) == {"WANDB_MODE": "offline"}
    assert read_assignments(["NOTHING_*"], OWN) == {}
    everything = read_assignments(["*"], OWN)
    assert "HOME" in everything
    assert not {"HF_TOKEN", "SSH_AUTH_SOCK", "RONDE_COOKIE"} & everything.keys()


@pytest.mark.parametrize("word", ["", "=x", "NOT_SET", "A*=b"])
def test_a_word_that_says_nothing_is_refused(word):
    with pytest.raises(UsageError, match="-x must be NAME=VALUE") as refused:
        read_assignments([word], OWN)
    assert repr(word) in str(refused.value)


@given(environ=ENVIRONS, pattern=st.sampled_from(["*", "A*", "*_*"]))
def test_nothing_unnamed_that_travels_is_secret_or_anothers_place(environ, pattern):
    travels = select_forwarded(environ) | read_assignments([pattern], environ)
    assert travels.items() <= environ.items()
    assert not any(names_secret(name) or is_rank_variable(name) for name in travels)


def test_ranks_get_their_agents_environment_without_what_led_to_it():
    kept = base_environment(OWN)
    gone = {"RONDE_COOKIE", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK"}
    gone |= {"SLURM_STEP_NODELIST", "SSH_CONNECTION", "SUDO_USER"}
    assert set(OWN) - set(kept) == gone
    assert kept.items() <= OWN.items()


@pytest.mark.parametrize(
    ("name", "value", "is_shown"),
    [
        ("NCCL_DEBUG", "INFO", True),
        ("hf_token", "hf", False),
        ("AWS_SECRET_ACCESS", "s", False),
        ("DB_PASSWORD", "p", False),
        ("http_proxy", "http://proxy:3128", True),
        ("http_proxy", "http://ada:pw@proxy:3128/a", False),
        ("REPO", "git@example.org:a/b", True),
        ("DATABASE", "postgres://ada:p@ss@db", False),
        *((name, "x", False) for name in ("AUTH", "SMTP_PWD", "PGPASS", "COOKIE")),
        *((name, "x", False) for name in ("DbPwd", "PROXY_AUTH2", "SMTP_PASS")),
        *((name, "/a", True) for name in ("PWD", "OLDPWD", "GIT_AUTHOR", "TF_COMPAT")),
        *((name, "1", True) for name in ("NCCL_BYPASS", "PATH", "DISPATCH")),
        ("PIP_INDEX_URL", "https://ghp_1@example.org/simple", False),
        ("ORIGIN", "ssh://git@example.org/a/b", True),
        ("ODBC", "Server=db;Uid=ada;Pwd=x;", False),
        ("HEADERS", "X-A: Basic YWRh", False),
        ("ARGS", "basic", True),
    ],
)
def test_probable_secrets_are_hidden(name, value, is_shown):
    shown = redacted({name: value})
    assert shown == {name: value if is_shown else "<hidden>"}
