"""Terminal tasks as a task service, called as by the orchestrator: rewards, masks, and trained records."""

import contextlib

import pytest

from glm5_jax.envs.terminal import AttemptConfig, TaskError, load_task
from glm5_jax.envs.terminal.service import TerminalService, load_tasks
from glm5_jax.rl.orchestrator.client import OrchestratorClient
from glm5_jax.rl.orchestrator.server import Orchestrator
from glm5_jax.runtime.http_server import ApiError
from glm5_jax.text.tokenizer import Tokenizer
from tests.agents.scripted import ScriptedServer
from tests.envs.terminal.folders import TOML, make_task, needs_root, write_shipped
from tests.rl.fleet import Engine, gateway, orchestrator_config, rollout, service_config

pytestmark = [pytest.mark.usefixtures("isolation"), needs_root]
TOKENIZER = Tokenizer.load("bytes")
CONFIG = AttemptConfig(max_turns=4)
NOWHERE = "http://127.0.0.1:9"
PARTS = """echo '{"reward": 0.5, "speed": 2}' > /logs/verifier/reward.json"""
WRITES = ("bash", {"command": "echo 'Hello, world!' > hello.txt"})
BUILDS = "FROM nginx:1.25\n"


def service_of(tasks, held_out=(), orchestrator=NOWHERE, policy=CONFIG, **options):
    options = {"rollout_timeout_s": 1000.0, "max_inflight": 4} | options
    tasks, held_out = ([load_task(folder) for folder in part] for part in (tasks, held_out))
    return TerminalService(
        service_config(orchestrator, **options), tasks, held_out, TOKENIZER, policy
    )


# Replies, held out, reward, a part of its error, and of its metrics.
CASES = {
    "solved": ([[WRITES], "Done."], False, 1.0, "", "ended_answer"),
    "nothing": (["Done."], False, 0.0, "", "ended_answer"),
    "turns": ([[WRITES]] * 9, False, 1.0, "ended after 4 replies (max_turns)", "ended_max_turns"),
    "parts": (["Done."], True, 0.5, "", "ended_answer"),
    "down": (
        [[WRITES], ApiError("no engine answers", 502)],
        False,
        None,
        "no engine answers",
        None,
    ),
    "refused": ([ApiError("temperature is 2", 400)], False, None, "temperature is 2", None),
}


@pytest.mark.usefixtures("nothing_left")
def test_rollouts_have_rewards_of_evaluation(tmp_path):
    tasks = [write_shipped("hello-file", tmp_path)]
    held_out = [
        make_task(tmp_path, "parts", test=PARTS),
        make_task(tmp_path, "built", dockerfile=BUILDS),
    ]
    outcomes = {}
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(service_of(tasks, held_out).running())
        for number, (name, (replies, other, *_)) in enumerate(CASES.items()):
            model = ScriptedServer(replies)
            base_url = stack.enter_context(model.running()) + f"/sessions/{number}"
            place = {"number": 0, "rollout_id": name, "held_out": other, "base_url": base_url}
            outcomes[name] = rollout(url, **place), model
        fails = rollout(url, 1, held_out=True, base_url=base_url)
        gone = rollout(url, 2, base_url=NOWHERE)
    for name, (_, _, reward, error, metric) in CASES.items():
        outcome, model = outcomes[name]
        assert outcome["reward"]["value"] == reward and error in outcome["reward"]["error"], (
            name,
            outcome,
        )
        assert bool(outcome["reward"]["error"]) == bool(error)
        assert (metric in outcome["metrics"]) == (metric is not None)
        assert set(model.paths) == {f"/sessions/{list(CASES).index(name)}/v1/chat/completions"}
        # The gateway sets the sampling options.
        assert all("temperature" not in fields for _, fields in model.scripted.requests)
    roles = [message["role"] for message in outcomes["solved"][0]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert outcomes["solved"][0]["metrics"]["replies"] == 2
    assert outcomes["parts"][0]["reward"]["parts"] == {"reward": 0.5, "speed": 2.0}
    assert [outcome["reward"]["value"] for outcome in (fails, gone)] == [None, None]
    assert "image nginx:1.25 is not on this machine" in fails["reward"]["error"]
    assert "no server answers" in gone["reward"]["error"]


class Shellful(Engine):
    """Engine that runs a command which solves the task or, by chance, does not; then it stops."""

    def reply(self, prompt, draw):
        text = "</think>Done.<|user|>"
        if TOKENIZER.encode("<|observation|>", parse_special=True)[0] not in prompt:
            score = draw.choice(("0", "1"))
            text = f"I write {score}.</think><tool_call>bash<arg_key>command</arg_key><arg_value>echo {score} > score"
            text += "</arg_value></tool_call><|observation|>"
        return TOKENIZER.encode(text, parse_special=True)


@pytest.mark.slow
def test_records_of_terminal_tasks_equal_those_of_gateway(tmp_path):
    """With an orchestrator, the real gateway, and an engine that writes tokens of calls."""
    task = make_task(tmp_path, test="cat /app/score > /logs/verifier/reward.txt")
    with contextlib.ExitStack() as stack:
        gate = stack.enter_context(gateway(stack.enter_context(Shellful().running())))
        config = orchestrator_config(gate, batch_groups=2, max_running=4)
        url = stack.enter_context(Orchestrator(config).running())
        stack.enter_context(service_of([task], orchestrator=url, name="terminal").running())
        client = OrchestratorClient(url, patience_s=10.0)
        client.begin(0, 0)
        groups = client.take(0, 100)
    members = [member for group in groups for member in group.members]
    assert {member.reward.value for member in members} == {0.0, 1.0}
    for member in members:
        [record] = member.records
        trained_text = TOKENIZER.decode(record.token_ids[record.loss_mask > 0].tolist())
        score = f"{member.reward.value:g}"
        assert (
            trained_text.startswith(f"I write {score}.</think><tool_call>bash")
            and "Done." in trained_text
        )
        everything = TOKENIZER.decode(record.token_ids.tolist())
        assert "<tool_response>[exit code 0]</tool_response>" in everything
        assert "[exit code 0]" not in trained_text and "Do it." in everything


def test_splits_tasks_of_folder(tmp_path):
    for number in range(20):
        make_task(tmp_path, f"task-{number:02}", **{"instruction.md": f"Do {number}.\n"})
    tasks, held_out = load_tasks(tmp_path, 0.3)
    names = [task.name for task in (*tasks, *held_out)]
    assert sorted(names) == [f"task-{number:02}" for number in range(20)]
    assert 0 < len(held_out) < 15 and held_out == load_tasks(tmp_path, 0.3)[1]
    assert all(task in load_tasks(tmp_path, 0.6)[1] for task in held_out)
    assert load_tasks(tmp_path)[1] == []
    make_task(tmp_path, "wrong", toml="[[steps]]\n")
    with pytest.raises(TaskError, match="task wrong: steps"):
        load_tasks(tmp_path)


def test_warns_of_tests_that_can_be_forged(tmp_path, caplog):
    forgeable = make_task(tmp_path, "copies", test="cat /app/score > /logs/verifier/reward.txt")
    service_of([make_task(tmp_path, "sound"), forgeable])
    [warning] = caplog.messages
    assert warning.startswith("task copies: its reward can be forged: tests/test.sh: copy")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"rollout_timeout_s": 660.0},
            r"task 'own' may take 690 s .* a rollout has 660 s; raise rollout_timeout_s",
        ),
        (
            {"policy": AttemptConfig(max_tokens=300)},
            "task 'own' has .* max_tokens is 300; raise it",
        ),
    ],
)
def test_rejects_limits_without_time_for_grading(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        service_of([make_task(tmp_path, toml=TOML)], **options)
    with pytest.raises(ValueError, match="0 tasks"):
        service_of([])
    # With less time for the policy, the same rollouts end in time.
    service_of(
        [make_task(tmp_path, toml=TOML)],
        rollout_timeout_s=670.0,
        policy=AttemptConfig(timeout_s=5.0),
    )
