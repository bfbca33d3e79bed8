"""Task folders, read as Harbor reads them; unsupported fields are refused by name."""

import pytest

from glm5_jax.envs.terminal import TaskError, TaskLimits, find_tasks, load_task
from tests.envs.terminal.folders import SHIPPED, TOML, make_task, write_shipped

OLD = """
version = "1.0"
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 900
env = {A = "${HOST:-7}", B = "x"}
[agent]
timeout_sec = 60
user = 1000
[solution]
env = {KEY = "1"}
[environment]
build_timeout_sec = 30
docker_image = "debian:12"
cpus = 2
memory = "2G"
storage = "512M"
gpus = 0
allow_internet = true
workdir = "/srv/work/"
mcp_servers = []
"""


def test_reads_old_and_new_fields(tmp_path):
    folder = make_task(tmp_path, toml=OLD)
    task = load_task(folder)
    assert (task.name, task.folder, task.instruction) == ("own", folder, "Do it.\n")
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.build_timeout_s) == (
        60.0,
        900.0,
        30.0,
    )
    assert (task.memory_bytes, task.disk_bytes, task.cpus) == (2 << 30, 512 << 20, 2.0)
    assert task.verifier_env == {"A": "7", "B": "x"} and task.solution_env == {"KEY": "1"}
    assert (task.user, task.workdir, task.docker_image) == ("1000", "/srv/work", "debian:12")
    new = load_task(
        make_task(tmp_path, "new", toml='schema_version = "1.4"\n[environment]\nmemory_mb = 64\n')
    )
    assert (new.memory_bytes, new.disk_bytes, new.agent_timeout_s) == (64 << 20, 10 << 30, 600.0)
    both = load_task(
        make_task(tmp_path, "both", toml='[environment]\nmemory = "1G"\nmemory_mb = 1024\n')
    )
    assert both.memory_bytes == 1 << 30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = [", "task.toml: "),
        ('version = "2.0"', "schema_version is '2.0'; known is 1.x"),
        ("verifier = 3", "verifier must be a table"),
        ("[environment]\ngpus = 1", "environment.gpus = 1: not supported; it can be 0"),
        ('[environment]\ngpu_types = ["H100"]', "environment.gpu_types = ['H100']: not supported"),
        ("[[environment.mcp_servers]]\nname = 'x'", "environment.mcp_servers = "),
        ("[environment.healthcheck]\nretries = 2", "environment.healthcheck = {'retries': 2}: it has no command"),
        ("[environment.healthcheck]\ncommand = 'x'\nretries = 0", "environment.healthcheck.retries = 0: it must be"),
        ("[environment.healthcheck]\ncommand = 'x'\nport = 1", "environment.healthcheck.port is unknown or not supported"),
        ('[environment]\nhealthcheck = "x"', "environment.healthcheck = 'x': it must be a table"),
        ('[environment]\nskills_dir = "/x"', "environment.skills_dir is unknown or not supported"),
        ('[environment]\nos = "windows"', "environment.os = 'windows': not supported; it can be 'linux'"),
        ('[environment]\nnetwork_mode = "allowlist"', "environment.network_mode = 'allowlist': not supported"),
        ('[environment]\nallowed_hosts = ["a.org"]', "environment.allowed_hosts = ['a.org']: not supported"),
        ('[agent]\nnetwork_mode = "allowlist"', "agent.network_mode = 'allowlist'"),
        ('[verifier]\nuser = "nobody"', "verifier.user = 'nobody': not supported; it can be 'root' or 0"),
        ("[verifier.environment]\ncpus = 1", "artifacts is empty, so nothing would be graded"),
        ("[verifier.environment.tpu]\ntype = 'v5e'", "verifier.environment.tpu is unknown or not supported"),
        ("[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]\ncpus = 1", "contradicts verifier.environment"),
        ("[solution]\nuser = 'x'", "solution.user is unknown or not supported"),
        ("[environment.tpu]\ntype = 'v5e'", "environment.tpu is unknown or not supported"),
        ('artifacts = [{source = "/x", exclude = ["a"]}]', "exclude is not supported"),
        ('[[verifier.collect]]\ncommand = "x"', "verifier.collect = "),
        ("[[steps]]\nname = 'a'", "steps: tasks of several steps are not supported"),
        ("[agent]\ntimeout = 3", "agent.timeout is unknown or"),
        ("colour = 3", "colour is unknown or"),
        ("[agent]\ntimeout_sec = 0", "agent.timeout_sec = 0: it must be a number above 0"),
        ("[agent]\ntimeout_sec = true", "agent.timeout_sec = True: it must be a number"),
        ('[environment]\nmemory = "2X"', "environment.memory = '2X': it must be a size such as 512M or 2G"),
        ('[environment]\nmemory = "2G"\nmemory_mb = 5', "environment.memory_mb differs from"),
        ('[environment]\nworkdir = "/"', "environment.workdir = '/': the folder '/' cannot be"),
        ('[environment]\nworkdir = "/tests/x"', "cannot be the work folder that is graded"),
        ('[environment]\nworkdir = "/app/../etc"', "cannot be the work folder"),
        ('artifacts = ["/etc/passwd"]', "the artifact '/etc/passwd' cannot be"),
        ('artifacts = [{source = "/x", service = "db"}]', "service is not supported"),
        ('[environment.env]\nA = "${TOKEN}"', "${TOKEN} refers to a variable of the host"),
        ("[environment.env]\nA = 3", "environment.env = {'A': 3}: it must be a table of texts"),
    ],
)  # fmt: skip
def test_names_task_and_refused_field(tmp_path, text, message):
    with pytest.raises(TaskError) as error:
        load_task(make_task(tmp_path, toml=text))
    assert str(error.value).startswith("task own: ") and message in str(error.value)


VERIFIER = """
artifacts = ["/app/out"]
[environment]
cpus = 2
memory_mb = 512
env = {A = "1"}
[environment.healthcheck]
command = "test -e /ready"
interval_sec = 0
[solution]
timeout_sec = 7
"""


def test_reads_environment_of_tests(tmp_path):
    task = load_task(make_task(tmp_path, toml=VERIFIER, **{"tests/Dockerfile": "FROM debian:12\n"}))
    assert task.verifier.dockerfile == task.folder / "tests/Dockerfile"
    assert (task.verifier.cpus, task.verifier.env, task.verifier.docker_image) == (2.0, {"A": "1"}, None)  # fmt: skip
    assert (task.health_check.command, task.health_check.interval_s) == ("test -e /ready", 0.0)
    assert task.health_check.retries == 3 and task.solution_timeout_s == 7.0
    # A separate section has the defaults of the fields that it does not set.
    own_section = VERIFIER + '[verifier.environment]\ncpus = 0.5\ndocker_image = "debian:12"\n'
    verifier = load_task(make_task(tmp_path, "two", toml=own_section)).verifier
    assert (verifier.cpus, verifier.memory_bytes, verifier.env) == (0.5, 2 << 30, {})
    assert (verifier.context, verifier.docker_image) == ("tests", "debian:12")
    # Without an image in the section, the tests run in the agent's image.
    verifier = load_task(make_task(tmp_path, "three", toml=VERIFIER + "[verifier.environment]\ncpus = 1\n")).verifier  # fmt: skip
    assert (verifier.context, verifier.cpus) == ("environment", 1.0)
    with pytest.raises(TaskError, match="tests/Dockerfile and verifier.environment.docker_image"):
        load_task(make_task(tmp_path, "four", toml=own_section, **{"tests/Dockerfile": "FROM debian:12\n"}))  # fmt: skip


def test_checks_limits_of_test_environment(tmp_path):
    text = VERIFIER + "[verifier.environment]\nmemory_mb = 4096\n"
    task = load_task(make_task(tmp_path, toml=text))
    with pytest.raises(TaskError, match="it asks for memory_bytes="):
        TaskLimits(memory_bytes=1 << 30).check(task)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("environment/docker-compose.yaml", "environment/docker-compose.yaml is not supported"),
        ("environment/.dockerignore", "environment/.dockerignore is not supported"),
        ("tests/.dockerignore", "tests/.dockerignore is not supported"),
        ("tests/docker-compose.yaml", "tests/docker-compose.yaml is not supported"),
        (".harborignore", ".harborignore is not supported"),
        ("tests/Dockerfile", ".*artifacts is empty"),
        ("steps/one/instruction.md", "steps: tasks of several steps"),
    ],
)
def test_refuses_unsupported_files(tmp_path, path, message):
    with pytest.raises(TaskError, match=f"task own: {message}"):
        load_task(make_task(tmp_path, **{path: ""}))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("task.toml", "it has no task.toml"),
        ("instruction.md", "it has no instruction.md"),
        ("tests/test.sh", "it has no tests/test.sh"),
        ("environment/Dockerfile", "it has neither environment/Dockerfile nor environment.docker_image"),
    ],
)  # fmt: skip
def test_names_missing_files(tmp_path, path, message):
    (make_task(tmp_path) / path).unlink()
    with pytest.raises(TaskError, match=f"task own: {message}"):
        load_task(tmp_path / "own")


def test_finds_folders_of_tasks(tmp_path):
    with pytest.raises(TaskError, match="no folder"):
        find_tasks(tmp_path / "none")
    (tmp_path / "other").mkdir()
    with pytest.raises(TaskError, match="none of its folders has a task.toml"):
        find_tasks(tmp_path)
    for name in SHIPPED:
        write_shipped(name, tmp_path)
    assert [path.name for path in find_tasks(tmp_path)] == SHIPPED
    assert find_tasks(tmp_path / SHIPPED[0]) == [tmp_path / SHIPPED[0]]
    assert TOML
