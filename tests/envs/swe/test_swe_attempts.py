"""Attempts at instances of a dataset: patches, a scripted model with its tools, failures, and the task service."""

import asyncio
import contextlib
import dataclasses
import io
import tarfile

import msgspec
import pytest

from glm5_jax.agents.context import TokenCounter
from glm5_jax.envs.sandbox import Sandbox, SandboxError
from glm5_jax.envs.swe.attempts import (
    AttemptRunner,
    PatchAgent,
    SweAttemptConfig,
    SwePolicy,
    warn_of_forgeable,
)
from glm5_jax.envs.swe.dataset import InstanceSource, SweDataset, add_archive, write_dataset
from glm5_jax.envs.swe.evaluation import evaluate_instances
from glm5_jax.envs.swe.grading import VARIANTS
from glm5_jax.envs.swe.instance import InstanceError, SweInstance
from glm5_jax.envs.swe.service import SweService, SweShare, reward_of
from glm5_jax.envs.swe.tools import EditTool
from glm5_jax.inference.client import ServerError
from glm5_jax.text.tokenizer import Tokenizer
from tests.agents.scripted import Scripted, ScriptedServer
from tests.envs.swe.tiny_project import BASE, FAIL_TO_PASS, PASS_TO_PASS
from tests.rl.fleet import rollout, service_config

NAME = "tiny-1"
NOWHERE = "http://127.0.0.1:9"
FIXES = [
    [
        (
            "edit",
            {"path": "calc/__init__.py", "old_text": "return a - b", "new_text": "return a + b"},
        )
    ],
    [("bash", {"command": "grep -n 'def double' -A1 calc/__init__.py"})],
    [
        (
            "edit",
            {
                "path": "calc/__init__.py",
                "old_text": "def double(x):\n    return x + 2",
                "new_text": "def double(x):\n    return 2 * x",
            },
        )
    ],  # fmt: skip
    [("run_tests", {})],
    "Both are correct now.",
]


@pytest.fixture(scope="module")
def dataset(tiny, tmp_path_factory) -> SweDataset:
    """Returns the dataset with the tiny project."""
    folder = tmp_path_factory.mktemp("dataset")
    archive = folder / "tiny.tar"
    with tarfile.open(archive, "w") as file:
        for path, entry in BASE.items():
            info = tarfile.TarInfo(f"tiny-1/{path}")
            info.size, info.mode = len(entry.content), 0o644
            file.addfile(info, io.BytesIO(entry.content))
    source = InstanceSource(
        instance_id=NAME,
        archive=add_archive(folder, archive),
        name="tiny.tar",
        focus=("tests/test_more.py",),
    )
    write_dataset(folder, [tiny.instance], [source])
    return SweDataset(folder)


@pytest.fixture(scope="module")
def runner(dataset, builder) -> AttemptRunner:
    return AttemptRunner(dataset, builder)


def policy_of(replies, traces=None):
    client = Scripted(replies)
    keep = traces.append if traces is not None else lambda trace: None
    return SwePolicy(
        lambda: contextlib.nullcontext(client),
        TokenCounter(Tokenizer.load("bytes")),
        SweAttemptConfig(max_turns=8),
        on_trace=lambda _, trace: keep(trace),
    )


def test_builds_environment_of_dataset_once(dataset, builder, tiny):
    layer = asyncio.run(dataset.layer(NAME, builder))

    assert layer.digest == tiny.instance.environment.layer


@pytest.mark.slow
def test_grades_patches_of_dataset(runner):
    gold = asyncio.run(runner.run(NAME, PatchAgent()))
    wrong = asyncio.run(runner.run(NAME, PatchAgent({NAME: "no patch"})))

    assert (gold.reward, gold.F2P.success) == (1.0, FAIL_TO_PASS)
    assert (wrong.reward, wrong.error) == (0.0, "the patch does not apply")


def test_grades_work_of_model_with_its_tools(runner):
    traces = []

    report = asyncio.run(runner.run(NAME, policy_of(FIXES, traces)))

    assert (report.reward, report.error) == (1.0, None)
    results = [m["content"] for m in traces[0].messages if m["role"] == "tool"]
    assert results[0] == "/testbed/calc/__init__.py is changed at line 2"
    assert "def double" in results[1] and "exit code 0" in results[1]
    assert f"{len(PASS_TO_PASS)} tests pass, 0 fail" in results[3]


def test_gives_no_reward_if_server_fails(runner):
    report = asyncio.run(runner.run(NAME, policy_of([ServerError("it is down")])))

    assert report.reward is None
    assert "it is down" in report.infra_reason


@pytest.mark.slow
def test_scores_attempt_0_whose_sandbox_fails_while_gold_works(runner):
    class Breaking:
        async def run(self, instance, box):
            raise SandboxError("too many processes")

    report = asyncio.run(runner.run(NAME, Breaking()))

    assert report.reward == 0.0
    assert "too many processes" in report.error


def test_gives_no_reward_without_archive(dataset, builder, tmp_path):
    source = msgspec.structs.replace(dataset.sources[NAME], archive="0" * 64)
    write_dataset(tmp_path, list(dataset.instances.values()), [source])

    report = asyncio.run(AttemptRunner(SweDataset(tmp_path), builder).run(NAME, PatchAgent()))

    assert report.reward is None
    assert "tiny.tar) is missing; fetch it" in report.infra_reason


def test_refuses_sources_of_another_tree(dataset, builder, tmp_path):
    (instance,) = dataset.instances.values()
    other = msgspec.structs.replace(instance, base_commit="tree:0")
    write_dataset(tmp_path, [other], list(dataset.sources.values()))
    (tmp_path / "archives").symlink_to(dataset.folder / "archives")

    with pytest.raises(InstanceError, match="its base_commit is tree:0"):
        asyncio.run(SweDataset(tmp_path).layer(NAME, builder))


def test_rejects_folder_without_dataset(tmp_path):
    with pytest.raises(InstanceError, match="has no instances.jsonl; build one"):
        SweDataset(tmp_path)


@pytest.mark.usefixtures("isolation")
def test_warns_of_instances_without_variants(caplog):
    fields = dict.fromkeys(("repo", "base_commit", "problem_statement", "patch", "test_patch"), "x")
    instance = SweInstance(instance_id="a", **fields)
    without = msgspec.structs.replace(instance, labels={VARIANTS: False})
    warn_of_forgeable({"a": instance})
    assert caplog.text == ""
    warn_of_forgeable({"a": instance, **dict.fromkeys("bcdefgh", without)})
    assert "the rewards of 7 instances can be forged" in caplog.text
    assert "b, c, d, e, f and 2 more" in caplog.text


def test_explains_edits_that_are_not_made():
    cases = {
        "is not in /testbed": ("../etc/passwd", "a", "b"),
        "exists; give the passage": ("a.py", "", "b"),
        "there is no /testbed/b.py": ("b.py", "a", "b"),
        "occurs 2 times": ("a.py", "x", "y"),
        "occurs 0 times": ("a.py", "z", "y"),
        "are texts": ("a.py", None, "y"),
    }

    async def edit() -> dict[str, str]:
        async with Sandbox() as box:
            await box.exec("mkdir -p /testbed; chown agent /testbed", user="root", cwd="/")
            tool = EditTool(box)
            call = dict(zip(("path", "old_text", "new_text"), ("a.py", "", "x x\n")))
            assert await tool(None, call) == "/testbed/a.py is written"
            return {
                name: await tool(None, dict(zip(("path", "old_text", "new_text"), values)))
                for name, values in cases.items()
            }

    for name, answer in asyncio.run(edit()).items():
        assert answer.startswith("Error: ") and name in answer


@pytest.mark.slow
def test_writes_report_of_each_prediction(runner, tmp_path):
    predictions = tmp_path / "predictions.jsonl"
    predictions.write_text(f'{{"instance_id": "{NAME}", "model_patch": ""}}\n')
    evaluation = evaluate_instances(
        runner,
        PatchAgent(),
        tmp_path / "out",
        predictions=str(predictions),
        identity={},
        concurrency=1,
    )

    asyncio.run(evaluation.run())

    assert '"reward":0.0' in (tmp_path / f"out/reports/{NAME}.json").read_text()
    with pytest.raises(InstanceError, match="no prediction for an instance"):
        predictions.write_text('{"instance_id": "other", "model_patch": ""}\n')
        evaluate_instances(
            runner, PatchAgent(), tmp_path, predictions=str(predictions), identity={}, concurrency=1
        )


@pytest.mark.slow
def test_serves_rollouts_with_rewards_of_grading(dataset, runner, tiny):
    tokenizer = Tokenizer.load("bytes")
    config = service_config(NOWHERE, rollout_timeout_s=1000.0, max_inflight=2)
    limits = SweAttemptConfig(max_turns=8, timeout_s=300.0)
    service = SweService(config, runner, [tiny.instance], [], tokenizer, limits)
    model = ScriptedServer(FIXES)
    with service.running() as url, model.running() as base_url:
        outcome = rollout(url, 0, base_url=f"{base_url}/sessions/0")

    assert outcome["reward"]["value"] == 1.0, outcome
    assert outcome["reward"]["parts"] == {"fail_to_pass": 1.0, "pass_to_pass": 1.0}
    assert outcome["metrics"]["replies"] == len(FIXES)


def test_refuses_service_whose_rollouts_end_before_their_tests(runner, tiny):
    config = service_config(NOWHERE, rollout_timeout_s=100.0)
    with pytest.raises(ValueError, match="raise rollout_timeout_s"):
        SweService(config, runner, [tiny.instance], [], Tokenizer.load("bytes"))


def test_gives_reason_of_missing_reward(runner):
    report = asyncio.run(runner.run(NAME, policy_of([ServerError("it is down")])))

    reward = reward_of(report)

    assert reward.value is None and "it is down" in reward.error


def test_checks_share_of_tasks(dataset, tmp_path):
    share = SweShare(dataset=str(dataset.folder), held_out_fraction=0.0)

    assert [instance.instance_id for instance in share.load()[0]] == [NAME]
    with pytest.raises(ValueError, match="dataset is empty"):
        SweShare()
    with pytest.raises(InstanceError, match="has no instances.jsonl"):
        dataclasses.replace(share, dataset=str(tmp_path)).load()
