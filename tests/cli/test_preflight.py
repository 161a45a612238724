"""``ronde run --preflight`` makes the checks of ``ronde check`` before a job."""

FAULT = {"GLOO_SOCKET_IFNAME": "nosuch"}


def test_a_job_starts_where_hosts_are_ready(ronde):
    done = ronde("run", "-n", "2", "--preflight", "echo", "there")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [b"[0] there", b"[1] there"]


def test_what_a_check_finds_ends_the_start(ronde):
    done = ronde("run", "-n", "2", "--preflight", "echo", env=FAULT)
    assert (done.returncode, done.stdout) == (69, b""), done.stderr
    assert b"GLOO_SOCKET_IFNAME=nosuch: there is no nosuch among" in done.stderr


def test_a_host_that_is_not_ready_starts_without_preflight(ronde):
    done = ronde("run", "-n", "1", "echo", env=FAULT)
    assert done.returncode == 0
