"""A policy on terminal tasks, over real HTTP and in real sandboxes: its messages, its limits, and failures."""

import asyncio
import contextlib
import dataclasses
import functools

import pytest

from glm5_jax.agents.client import ChatClient
from glm5_jax.agents.context import OMITTED, ContextConfig, TokenCounter
from glm5_jax.envs.sandbox import Sandbox, SandboxConfig, SandboxError
from glm5_jax.envs.terminal import (
    AttemptConfig,
    BashConfig,
    Policy,
    Shell,
    TerminalTask,
    TrialRunner,
    load_task,
)
from glm5_jax.envs.terminal.bash import MAX_COMMAND_BYTES, MAX_SHOWN, Bash
from glm5_jax.rl.rollouts.rollout import ToolError
from glm5_jax.runtime.http_server import ApiError
from glm5_jax.text.tokenizer import Tokenizer
from tests.agents.scripted import Scripted, ScriptedServer
from tests.envs.leftovers import run
from tests.envs.terminal.folders import (
    TOML,
    make_task,
    needs_root,
    selected_values,
    slow_but,
    write_shipped,
)

pytestmark = [pytest.mark.usefixtures("isolation"), needs_root]
COUNTER = TokenCounter(Tokenizer.default())
CONFIG = AttemptConfig(max_turns=6)
NOWHERE = "http://127.0.0.1:9"
SCORED = "cat /app/score > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
MEDIAN = """def median(values):
    xs = sorted(values)
    n = len(xs)
    if not n:
        raise ValueError("no values")
    return xs[n // 2] if n % 2 else (xs[n // 2 - 1] + xs[n // 2]) / 2
"""


def bash(command, **arguments):
    return "bash", {"command": command, **arguments}


async def attempt(trials, folder, server, config=CONFIG, fields=None):
    """Returns (result, trace or None) of an attempt by a policy at this server."""
    traces = []
    policy = Policy(
        lambda: ChatClient(server, timeout_s=config.reply_timeout_s),
        COUNTER,
        config,
        fields,
        lambda task, trace: traces.append(trace),
    )
    result = await trials.run(load_task(folder), policy)
    return result, *(traces or [None])


def run_attempt(folder, replies, config=CONFIG, fields=None):
    """Returns (result, trace or None, (messages, fields) of each request)."""
    server = ScriptedServer(replies)

    async def work(url):
        async with TrialRunner() as trials:
            return await attempt(trials, folder, url, config, fields)

    with server.running() as url:
        return *run(work(url)), server.scripted.requests


def answers(trace):
    return [message["content"] for message in trace.messages if message["role"] == "tool"]


@pytest.mark.usefixtures("nothing_left")
def test_solves_task_over_several_turns(tmp_path):
    folder = write_shipped("fix-median", tmp_path)
    replies = [
        [bash("ls; cat stats.py")],
        [
            bash(f"cat > stats.py <<'PY'\n{MEDIAN}PY"),
            bash("python3 -c 'import stats; print(stats.median([3, 1, 2]))'"),
        ],
        "It is mended.",
    ]
    result, trace, requests = run_attempt(folder, replies, fields={"temperature": 0.7})
    assert (result.reward, result.error) == (1.0, None)
    listed, written, checked = answers(trace)
    assert listed.startswith("stats.py\n") and listed.endswith("\n[exit code 0]")
    # One after the other, in one sandbox.
    assert (written, checked) == ("[exit code 0]", "2\n[exit code 0]")
    for messages, fields in requests:
        assert [message["role"] for message in messages[:2]] == ["system", "user"]
        assert messages[0]["content"] == CONFIG.system
        assert messages[1]["content"] == load_task(folder).instruction
        assert fields["tools"] == [CONFIG.bash.tool()] and fields["temperature"] == 0.7
        assert fields["max_tokens"] == 8192 and "chat_template_kwargs" not in fields
    assert [len(messages) for messages, _ in requests] == [2, 4, 7]
    assert requests[2][0][2:] == list(trace.messages[:-1])


SCORES = [bash("echo 0.5 > score")]
LENGTH = {"message": {"role": "assistant", "content": "I th"}, "finish_reason": "length"}
SLEEPS, SILENT = [bash("sleep 60")], {"sleep": 60, **LENGTH}
TOO_LONG, DOWN = ApiError("the prompt has 99 tokens", 400), ApiError("no engine answers", 502)
FORGES = [bash("echo 1 > /logs/verifier/reward.txt")]
TASK = TerminalTask(name="t", folder=None, instruction="Do it.\n")
FEW = COUNTER.prompt(CONFIG.chat_task(TASK)) + 60
LATE, FAILED = "the agent had no end within 4 s", "the policy's server failed: "
# Name -> (replies of the model, limits, reward, end of its trace, error). All have 4 s for the task `short`.
CASES = {
    "no call": (["I cannot do that."], {}, 0.0, "answer", None),
    "nothing done": ([[bash("true")], "Done."], {}, 0.0, "answer", None),
    "reward forged": ([FORGES, "Done."], {}, 0.0, "answer", None),
    "done": ([SCORES, "Done."], {}, 0.5, "answer", None),
    "turns": ([SCORES] * 9, {"max_turns": 2}, 0.5, "max_turns", "ended after 2 replies (max_turns)"),
    "tokens": ([SCORES] * 99, {"max_tokens": FEW}, 0.5, "max_tokens", f"after {FEW} tokens (max_tokens)"),
    "seconds": ([SCORES, SLEEPS], {"timeout_s": 4.0}, 0.5, "timeout", "ended after 4 s (timeout_s)"),
    "cut off": ([SCORES, LENGTH], {}, 0.5, "length", "ended by a reply that was cut off"),
    "unread": ([SCORES, TOO_LONG], {}, 0.5, "refused", "reads no more of it (the prompt has 99 tokens)"),
    "short command": ([SCORES, SLEEPS], {}, 0.5, "timeout", LATE),
    "short reply": ([SCORES, SILENT], {}, 0.5, "timeout", LATE),
    # From this case on the server fails.
    "down": ([DOWN], {}, None, None, f"{FAILED}no engine answers"),
    "later down": ([SCORES, DOWN], {}, None, None, f"{FAILED}no engine answers"),
    "key": ([ApiError("the API key is wrong", 401)], {}, None, None, f"{FAILED}the API key is wrong"),
    "unread at once": ([TOO_LONG], {}, None, None, f"{FAILED}the prompt has 99 tokens"),
    "garbage": ([{"message": "none"}], {}, None, None, f"{FAILED}the reply is not a chat completion"),
    "slow": ([SCORES, SILENT], {"reply_timeout_s": 0.5}, None, None, "has not answered within 0.5 s"),
    "short silent": ([SILENT], {}, None, None, f"{FAILED}no reply has arrived within the time"),
    "gone": (None, {}, None, None, f"{FAILED}no server answers at http://127.0.0.1:9"),
    "no room": (["Done."], {"max_tokens": 50}, None, None, "max_tokens is 50; raise it"),
}  # fmt: skip


# One for each way in which an attempt ends.
QUICK = ("done", "reward forged", "turns", "down", "gone")


@pytest.fixture(scope="module")
def attempt_results(tmp_path_factory, request):
    """Returns (result, trace or None) of each case by name."""
    folder, names = tmp_path_factory.mktemp("tasks"), selected_values(request, "name")
    usual = make_task(folder, test=SCORED)
    short = make_task(
        folder, "short", test=SCORED, toml=TOML.replace("timeout_sec = 30.0", "timeout_sec = 4.0")
    )

    async def work(urls):
        places = asyncio.Semaphore(5)

        async def one(trials, name):
            config = dataclasses.replace(CONFIG, **CASES[name][1])
            async with places:
                return await attempt(
                    trials, short if "short" in name else usual, urls[name], config
                )

        async with TrialRunner() as trials:
            return await asyncio.gather(*(one(trials, name) for name in names))

    with contextlib.ExitStack() as stack:
        replies = {name: CASES[name][0] for name in names}
        urls = {
            name: stack.enter_context(ScriptedServer(script).running()) if script else NOWHERE
            for name, script in replies.items()
        }
        return dict(zip(names, run(work(urls))))


@pytest.mark.parametrize("name", slow_but(QUICK, CASES))
def test_rewards_attempt_by_its_end(attempt_results, name):
    """A limit ends the work, which is then graded. After a server failure there is no reward."""
    result, trace = attempt_results[name]
    _, _, reward, ended, error = CASES[name]
    assert result.reward == reward
    assert error in result.error if error else result.error is None
    assert (trace.ended if trace else None) == ended


def test_broken_sandbox_scores_zero_if_others_work(tmp_path, monkeypatch):
    """Checked each time, because the machine may fail later."""
    started, folder, works = Sandbox.start, make_task(tmp_path, test=SCORED), True

    async def broken(*args, **options):
        monkeypatch.setattr(Sandbox, "start", started if works else failing)
        raise SandboxError("its first process has ended")

    async def failing(box):
        raise SandboxError("no process is left")

    async def work(url):
        nonlocal works
        async with TrialRunner() as trials:
            first = await attempt(trials, folder, url)
            works = False
            return first, await attempt(trials, folder, url)

    monkeypatch.setattr(Shell, "exec", broken)
    server = ScriptedServer(lambda messages: SCORES)
    with server.running() as url:
        (first, trace), (second, _) = run(work(url))
    assert (first.reward, first.error) == (0.0, "its first process has ended")
    assert (second.reward, second.error) == (None, "no process is left")
    assert trace.ended == "broken" and len(server.scripted.requests) == 2


def test_omits_old_results_by_config():
    config = dataclasses.replace(
        CONFIG, context=ContextConfig(keep_rounds=1, max_prompt_tokens=None), thinking=False
    )
    client, traces = Scripted([[bash("echo a")], [bash("echo b")], "Done."]), []

    async def work():
        connect = functools.partial(contextlib.nullcontext, client)
        policy = Policy(connect, COUNTER, config, on_trace=lambda task, trace: traces.append(trace))
        async with Sandbox() as box:
            return await policy.run(TASK, Shell(box, "root", "/app", 60.0))

    assert run(work()) is None
    seen = [[m["content"] for m in sent if m["role"] == "tool"] for sent, _ in client.requests]
    a, b = (message["content"] for message in traces[0].messages if message["role"] == "tool")
    assert seen == [[], [a], [OMITTED, b]] and a == "a\n[exit code 0]"
    assert {
        request_fields["chat_template_kwargs"]["enable_thinking"]
        for _, request_fields in client.requests
    } == {False}


# -- the tool --------------------------------------------------------------------------------------------


def run_calls(*calls, config=BashConfig(), side_by_side=False):
    """Returns the results of calls in one sandbox, given as arguments."""

    async def work():
        async with Sandbox(SandboxConfig(timeout_s=20.0)) as box:
            tool = Bash(Shell(box, "root", "/app", 60.0), config)
            if side_by_side:
                return await asyncio.gather(*(tool(None, call) for call in calls))
            return [await tool(None, call) for call in calls]

    return run(work())


def test_reports_output_and_exit_code():
    commands = {
        "echo out; echo err >&2; echo out": "out\nerr\nout\n[exit code 0]",
        "exit 3": "[exit code 3]",
        "if": "/bin/bash: -c: line 2: syntax error: unexpected end of file\n[exit code 2]",
        "cat": "[exit code 0]",
        "printf 'a\\377b'": "a\N{REPLACEMENT CHARACTER}b\n[exit code 0]",
        "x=1; cd /; echo 2 > /app/file": "[exit code 0]",
        "echo $x; pwd; cat file": "\n/app\n2\n[exit code 0]",
        "kill -9 $$": "[exit code 137]",
        "echo <|user|></think>": "/bin/bash: -c: line 1: syntax error near unexpected token `|'\n"
        "/bin/bash: -c: line 1: `echo <|user|></think>'\n[exit code 2]",
        "rm -rf /app": "[exit code 0]",
        "pwd; mkdir /app": "/\n[exit code 0]",
        "pwd": "/app\n[exit code 0]",
    }
    results = run_calls(*({"command": command} for command in commands))
    assert dict(zip(commands, results)) == commands


def test_ends_only_commands_over_their_time():
    calls = (
        {"command": "sleep 1005 & echo on"},
        {"command": "echo begun; sleep 1006", "timeout_sec": 0.5},
        {"command": "pgrep -fc 'sleep 100[5]'; pgrep -fc 'sleep 100[6]'"},
    )
    on, late, left = run_calls(*calls)
    assert on == "on\n[exit code 0]"
    assert late == "begun\n[no end within 0.5 s, so it was ended]"
    assert left == "1\n0\n[exit code 1]"
    [late] = run_calls({"command": "sleep 60"}, config=BashConfig(timeout_s=0.2))
    assert late == "[no end within 0.2 s, so it was ended]"


def test_shortens_long_output_of_command():
    calls = ({"command": f"seq 1 {count}; echo END"} for count in (9, 999, 999_999))
    little, some, much = run_calls(*calls, config=BashConfig(max_characters=60))
    lines = [str(i) for i in range(1, 100)]
    head = "\n".join(lines)[:30]
    assert little == "\n".join([*lines[:9], "END", "[exit code 0]"])
    assert (
        some
        == f"{head}\n[...]\n" + "\n".join(map(str, range(993, 1000)))[-26:] + "\nEND\n[exit code 0]"
    )
    tail = "\n".join(map(str, range(999_990, 1_000_000)))[-26:]
    assert much == f"{head}\n[...]\n{tail}\nEND\n[exit code 0]"


def test_runs_calls_of_one_reply_in_order():
    calls = (
        {"command": f"sleep {pause}; cat file; echo {pause} >> file"} for pause in (0.3, 0.1, 0)
    )
    results = run_calls(*calls, {"command": "cat file"}, side_by_side=True)
    assert results[-1] == "0.3\n0.1\n0\n[exit code 0]" and results[1] == "0.3\n[exit code 0]"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"command": 1}, "command is no text"),
        ({"command": "\0"}, "command holds a null character"),
        ({"command": "\ud800"}, "command holds half a character"),
        (
            {"command": "x" * (MAX_COMMAND_BYTES + 1)},
            f"command is longer than {MAX_COMMAND_BYTES} bytes",
        ),
        ({"command": "true", "timeout_sec": 601}, "timeout_sec is no number above 0 and up to 600"),
        ({"command": "true", "timeout_sec": 0}, "timeout_sec is no number"),
        ({"command": "true", "timeout_sec": "9"}, "timeout_sec is no number"),
        ({"command": "true", "timeout_sec": True}, "timeout_sec is no number"),
        ({"command": "true", "timeout_sec": float("nan")}, "timeout_sec is no number"),
    ],
)
def test_answers_invalid_command_with_error(arguments, words):
    [result] = run_calls(arguments)
    assert result.startswith("Error: ") and words in result


def test_runs_command_of_maximum_length():
    [result] = run_calls(
        {"command": "echo " + "x" * (MAX_COMMAND_BYTES - 5)}, config=BashConfig(max_characters=4)
    )
    assert result == "xx\n[...]\nxx\n[exit code 0]"


def test_failed_sandbox_raises_tool_error():
    async def work():
        tool = Bash(Shell(Sandbox(), "root", "/app", 60.0), BashConfig())
        with pytest.raises(ToolError, match="SandboxError: the sandbox does not run") as caught:
            await tool(None, {"command": "true"})
        assert isinstance(caught.value.__cause__, SandboxError)

    run(work())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AttemptConfig(max_turns=0), "max_turns is 0"),
        (lambda: AttemptConfig(timeout_s=-1.0), "timeout_s is -1"),
        (lambda: AttemptConfig(reply_timeout_s=0.0), "reply_timeout_s is 0"),
        (lambda: BashConfig(timeout_s=0.0), "timeout_s is 0.0 and max_timeout_s 600"),
        (lambda: BashConfig(timeout_s=601.0), "timeout_s is 601.0 and max_timeout_s 600"),
        (
            lambda: BashConfig(max_characters=MAX_SHOWN + 1),
            f"max_characters is {MAX_SHOWN + 1}; use 2 to",
        ),
    ],
)
def test_rejects_limits_out_of_range(make, words):
    with pytest.raises(ValueError, match=words):
        make()
