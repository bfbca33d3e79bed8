"""Tests the server with programs of other projects: benchmarks and coding agents, in an environment of their own.

`bash launch/clients.sh` installs them; without it the tests are skipped. docs/clients.md has the same commands.
"""

import json
import os
import subprocess

import jax
import jax.numpy as jnp
import pytest

from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.server import Server, ServerConfig
from glm5_jax.text.tokenizer import Tokenizer
from tests.contracts.source_tree import ROOT
from tests.inference.conftest import long_model
from tests.inference.scripted_engine import calling, serving_script

CLIENTS = ROOT / ".venv-clients"
SUMS = [
    {"question": "7 + 8?", "choices": ["15", "16", "140"], "answer": 0},
    {"question": "2 + 3?", "choices": ["6", "5", "400"], "answer": 1},
]
LM_EVAL_TASKS = {
    "sums": """
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}]
""",
    "written_sums": """
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match}]
""",
}
INSPECT_TASK = """
from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.tool import bash


@task
def product():
    samples = [Sample(input="What is 6 * 7?", target="42")]
    return Task(dataset=samples, solver=react(tools=[bash()]), scorer=includes(), sandbox="local")
"""
CODEX_CONFIG = """
model = "scripted"
model_provider = "glm5"
web_search = "disabled"
agents = {{enabled = false}}

[model_providers.glm5]
name = "glm5"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
"""
WANDB_SCRIPT = """
import pathlib
from glm5_jax.metrics.sinks import RunInfo, open_sinks

run = RunInfo(name="sft:tiny", workdir=pathlib.Path.cwd(), config={"seed": 3})
[sink] = open_sinks(("wandb",), run)
for step in (1, 2):
    sink.write(step, {"loss/total": 1 / step, "load/01": 0.5})
sink.close()
"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(name, arguments, folder, **variables):
    """Runs a client in a folder, which is its home too, and returns its output. Skips if it is not installed."""
    places = [CLIENTS / "bin" / name, CLIENTS / "node_modules" / ".bin" / name]
    program = next((path for path in places if path.exists()), None)
    if program is None:
        pytest.skip(f"{name} is not installed in .venv-clients; run: bash launch/clients.sh")
    path = f"{program.parent}:{os.environ['PATH']}"
    inherited = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
    env = inherited | {"PATH": path, "HOME": str(folder), "OPENAI_API_KEY": "none"} | variables
    done = subprocess.run(
        [program, *arguments],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def play(*messages):
    """Returns a script that replies with one message after the other, by the number of tool results in the prompt."""
    return lambda prompt: messages[min(prompt.count("<|observation|>"), len(messages) - 1)]


@pytest.fixture(scope="module")
def model_server():
    """Runs a server of a one-layer model."""
    options = EngineConfig(
        page_size=128, max_num_seqs=4, prefill_chunk=512, min_prefill_bucket=512, max_length=512
    )
    engine = Engine(long_model(), Tokenizer.default(), options)
    server = Server(engine, Tokenizer.default(), ServerConfig(port=0, model="tiny"))
    with server.running() as server.url:
        yield server


def log_likelihood(context, continuation):
    """Returns the log-probability in nats that the model continues a context so, and whether greedily."""
    tokenizer = Tokenizer.default()
    prompt, ids = tokenizer.encode(context), tokenizer.encode(context + continuation)
    assert ids[: len(prompt)] == prompt
    logprobs = jax.nn.log_softmax(long_model()(jnp.asarray([ids]))[0].astype(jnp.float32))
    places = range(len(prompt), len(ids))
    total = sum(float(logprobs[i - 1, ids[i]]) for i in places)
    return total, all(int(logprobs[i - 1].argmax()) == ids[i] for i in places)


def test_lm_evaluation_harness_scores_and_generates(model_server, tmp_path):
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in SUMS))
    for name, fields in LM_EVAL_TASKS.items():
        head = f"task: {name}\ndataset_path: json\ntest_split: test\n"
        head += f"dataset_kwargs: {{data_files: {{test: {data}}}}}\ndoc_to_text: question\n"
        (tmp_path / f"{name}.yaml").write_text(head + fields)
    options = f"model=tiny,base_url={model_server.url}/v1/completions,max_length=512"
    arguments = f"run --model local-completions --model_args {options} --tasks sums,written_sums"
    arguments = [*arguments.split(), "--include_path", str(tmp_path), "--log_samples"]
    out = tmp_path / "out"
    run("lm_eval", [*arguments, "--output_path", str(out)], tmp_path, HF_HUB_OFFLINE="1")
    [sums] = out.rglob("samples_sums_*.jsonl")
    for sample, line in zip(map(json.loads, sums.read_text().splitlines()), SUMS):
        for (scored,), choice in zip(sample["resps"], line["choices"]):
            total, is_greedy = log_likelihood(line["question"], f" {choice}")
            assert float(scored[0]) == pytest.approx(total, abs=1e-3)
            assert str(scored[1]) == str(is_greedy)
    [written] = out.rglob("samples_written_sums_*.jsonl")
    assert len(written.read_text().splitlines()) == len(SUMS)


def test_inspect_agent_uses_tool_and_submits(tmp_path):
    (tmp_path / "product.py").write_text(INSPECT_TASK)
    script = play(calling("bash", command="expr 6 '*' 7"), calling("submit", answer="42"))
    with serving_script(script) as server:
        model = ["--model", "openai-api/glm5/scripted", "--display", "plain"]
        shown = run(
            "inspect",
            ["eval", "product.py", *model],
            tmp_path,
            GLM5_BASE_URL=f"{server.url}/v1",
            GLM5_API_KEY="none",
        )
    assert "accuracy  1.000" in shown
    assert "42" in server.engine.prompts[1].rpartition("<|observation|>")[2]


def test_mini_swe_agent_writes_file(tmp_path):
    script = play(
        calling("bash", command="printf '42\\n' >answer.txt; cat answer.txt"),
        calling("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat answer.txt"),
    )
    with serving_script(script) as server:
        task = ["--task", "Write 42 into answer.txt", "--yolo", "--exit-immediately"]
        run(
            "mini",
            ["--model", "openai/scripted", *task, "--output", "trajectory.json"],
            tmp_path,
            OPENAI_API_BASE=f"{server.url}/v1",
            MSWEA_CONFIGURED="true",
            MSWEA_COST_TRACKING="ignore_errors",
        )
    trajectory = json.loads((tmp_path / "trajectory.json").read_text())
    assert trajectory["info"]["exit_status"] == "Submitted"
    assert trajectory["info"]["submission"].strip() == "42"


def test_opencode_edits_file(tmp_path):
    script = play(
        calling("write", filePath="answer.txt", content="41\n"),
        calling("edit", filePath="answer.txt", oldString="41", newString="42"),
        calling("bash", command="cat answer.txt", description="Shows the answer"),
        {"content": "answer.txt holds 42"},
    )
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    with serving_script(script) as server:
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{server.url}/v1"},
            "models": {"scripted": {"limit": {"context": 200_000, "output": 4096}}},
        }
        models = {"model": "glm5/scripted", "small_model": "glm5/scripted"}
        config = {"provider": {"glm5": provider}, **models}
        (tmp_path / "opencode.json").write_text(json.dumps(config))
        shown = run(
            "opencode",
            ["run", "Write 42 into answer.txt"],
            tmp_path,
            OPENCODE_DISABLE_MODELS_FETCH="1",
            OPENCODE_DISABLE_AUTOUPDATE="1",
        )
    assert "answer.txt holds 42" in shown
    assert (tmp_path / "answer.txt").read_text() == "42\n"


def test_codex_runs_command_over_responses_api(tmp_path):
    script = play(
        calling("exec_command", cmd="printf '42\\n' >answer.txt; cat answer.txt"),
        {"content": "answer.txt holds 42"},
    )
    config = tmp_path / ".codex" / "config.toml"
    config.parent.mkdir()
    with serving_script(script) as server:
        config.write_text(CODEX_CONFIG.format(url=server.url))
        # The command is the script's, and the test's folder is temporary.
        flags = ["--skip-git-repo-check", "--sandbox", "danger-full-access"]
        shown = run("codex", ["exec", *flags, "Write 42 into answer.txt"], tmp_path)
    assert "answer.txt holds 42" in shown
    assert (tmp_path / "answer.txt").read_text() == "42\n"


def test_wandb_stores_run_offline(tmp_path):
    script = tmp_path / "log.py"
    script.write_text(WANDB_SCRIPT)
    run("python", [str(script)], tmp_path, WANDB_MODE="offline", PYTHONPATH=str(ROOT))
    [stored] = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    content = stored.read_bytes()
    identity = (tmp_path / "wandb_id").read_text()
    for text in ("loss/total", "sft:tiny", "load/01", identity):
        assert text.encode() in content
