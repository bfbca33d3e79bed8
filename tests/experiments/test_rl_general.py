"""General RL and distillation as experiments: their judges, their teachers, and refused configs."""

import asyncio
import dataclasses
import json

import jax
import numpy as np
import pytest

from experiments import distill, rl_agentic, rl_general, rl_reasoning
from experiments.rl_general import GeneralTaskWeight
from glm5_jax.checkpoint.store import Store
from glm5_jax.data import chat_tasks
from glm5_jax.data.conversation import make_records
from glm5_jax.data.record import TokenRecord
from glm5_jax.envs.hybrid_reward import GUARDS, GeneralConfig
from glm5_jax.envs.instructions import ifeval
from glm5_jax.envs.instructions.generated_tasks import ConstraintTaskConfig
from glm5_jax.inference.request import EngineConfig
from glm5_jax.metrics.metrics_log import column, read
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.rl.config import EvaluationConfig, Teacher
from glm5_jax.rl.reward_model.outcome_model import OutcomeModel, write_scorer
from glm5_jax.rl.rollouts.rollout import RolloutConfig
from glm5_jax.rl.trainers.mismatch_monitor import MismatchConfig
from glm5_jax.rl.trainers.sync_trainer import RolloutSource
from glm5_jax.rl.trajectory import Group
from glm5_jax.rl.types import Attempt
from glm5_jax.runtime.http_server import ListenConfig, find_free_port
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training import report, stages
from glm5_jax.training.experiment import write_config
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.optimizer import OptimizerConfig
from tests.agents.judges import facts, serving, verdict
from tests.agents.scripted import ScriptedServer
from tests.model.small import one_layer
from tests.rl.test_outcome_model import CONFIG as REWARD, random_params

DEMANDS = GeneralTaskWeight(demands=ConstraintTaskConfig(size=100, max_characters=200))
PLAIN_MODEL = dataclasses.replace(
    rl_general.tiny().model, int4_group=None
)  # int4 cannot be split in eight
ON_EIGHT_DEVICES = {"requires_checkpoint": False, "model": PLAIN_MODEL}


def general(**changes):
    changes = ON_EIGHT_DEVICES | {"tasks": (DEMANDS,)} | changes
    return dataclasses.replace(rl_general.tiny(), **changes)


@pytest.fixture
def anchors(tmp_path):
    path = tmp_path / "anchors.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": f"{i}?"}], "anchor": "fact"} for i in range(20)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def attempt_with(text):
    return Attempt(messages=({"role": "assistant", "content": text},))


def test_judges_tasks_with_rules_only_by_rules():
    verify, _ = rl_general.make_verifier(general())
    task = DEMANDS.tasks_of()[0]
    wanted = [one.is_followed("Ay Ay Ay") for one in ifeval.instructions(task.data)]
    reward = asyncio.run(verify(task, attempt_with("Ay Ay Ay")))
    assert reward.value == sum(wanted) / len(wanted)
    assert [reward.parts[name] for name in GUARDS] == [1, 1, 1]
    looped = asyncio.run(verify(task, attempt_with("Ay " * 60)))
    assert looped.value == 0 and looped.parts["repetition"] == 0


def test_guards_accept_replies_of_sft():
    """Guards reject only unwanted replies; the replies of SFT pass."""
    replies = [
        json.loads(line)["messages"][2]["content"]
        for line in chat_tasks.make_lines(
            chat_tasks.ChatTaskConfig(kind="plays", size=500), "interleaved"
        )
    ]
    verify, _ = rl_general.make_verifier(general())
    [task, *_] = DEMANDS.tasks_of()
    for reply in replies:
        reward = asyncio.run(verify(task, attempt_with(reply)))
        assert reward.value == reward.parts["rules"], reply


@pytest.fixture(scope="module")
def scored_model(tmp_path_factory):
    """Returns a reward model whose scores have an obvious scale."""
    workdir = tmp_path_factory.mktemp("reward")
    state = {
        "params": random_params(),
        "optimizer": {"count": np.zeros(1)},
        "rng": np.zeros(2),
        "step": 1,
    }
    with Store(workdir) as store:
        store.save(state, {}, {})
    write_config(workdir, REWARD)
    Tokenizer.default().save(workdir / "tokenizer")
    write_scorer(workdir, step=1, length=REWARD.length, variant="glm5", mean=5.0, std=2.0)
    return str(workdir)


def test_scales_score_of_reward_model_on_mesh_of_run(scored_model, monkeypatch):
    load, meshes = OutcomeModel.load, []

    def record(workdir, *, mesh, **more):
        meshes.append(mesh)
        return load(workdir, mesh=mesh, **more)

    monkeypatch.setattr(OutcomeModel, "load", record)
    reward = GeneralConfig(squash=False, orm=1.0)
    config = general(
        reward_model=scored_model,
        tasks=(GeneralTaskWeight(kind="prompts", file="creativity"),),
        reward=reward,
    )
    verify, _ = rl_general.make_verifier(config)
    task = config.tasks[0].tasks_of()[0]
    result = asyncio.run(verify(task, attempt_with("A tale of a whale.")))
    scores = load(scored_model).score([(task, attempt_with("A tale of a whale."))])
    assert result.parts["orm"] == pytest.approx(scores[0], abs=1e-4)
    assert result.value == result.parts["orm_z"] == (result.parts["orm"] - 5) / 2
    [mesh] = meshes
    assert mesh.size == jax.device_count() == 8


@pytest.mark.slow
def test_runs_with_reward_model_and_judge_with_key(tmp_path, scored_model, monkeypatch):
    """Two steps with random replies that both models score, on one device and without the page."""
    for module in (rl_general, stages):
        monkeypatch.setattr(
            module, "make_mesh", lambda axes, **_: make_mesh(axes, devices=jax.devices()[:1])
        )
    monkeypatch.setattr(report, "write_page", lambda workdir: None)
    key = tmp_path / "key"
    key.write_text("secret\n")
    listen = ListenConfig(port=find_free_port(), api_key="secret")
    judge = ScriptedServer(lambda messages: verdict({"messages": messages}, lambda text: 6), listen)
    config = general(
        model=one_layer(vocab_size=292, max_position_embeddings=512),
        tokenizer="bytes",
        optimizer=OptimizerConfig(),
        tasks=(GeneralTaskWeight(kind="prompts", file="creativity"),),
        reward=GeneralConfig(orm=0.25, grm=0.75, squash=False, mixing=None),
        reward_model=scored_model,
        judge=f"http://127.0.0.1:{listen.port}",
        judge_key_file=str(key),
        rollout=RolloutConfig(prompts=2, group=8, max_tokens=64, max_turns=1, thinking=False),
        engine=EngineConfig(page_size=128, max_num_seqs=16, prefill_chunk=512, max_length=512),
        length=512,
        evaluation=EvaluationConfig(tasks=0),
        mismatch=MismatchConfig(attempts=0),
        train=TrainConfig(steps=2, eval_interval=0, sample_interval=0),
    )
    with judge.running():
        config.make_stage(tmp_path / "run").run()
    assert len(judge.scripted.requests) >= 2
    rows = read(tmp_path / "run")
    parts = {name: column(rows, f"reward_part/{name}")[1] for name in ("orm", "orm_z", "grm")}
    assert parts["grm"] == pytest.approx([0.6, 0.6])
    assert parts["orm_z"] == pytest.approx([(value - 5) / 2 for value in parts["orm"]])
    assert column(rows, "rollout/environment_errors")[1] == [0, 0]
    assert "secret" not in (tmp_path / "run" / "config.json").read_text()


def test_http_judge_scores_replies_that_pass_rules(tmp_path, anchors):
    """Each batch has its event loop, which opens the client."""

    async def run(times):
        async with serving(lambda body: verdict(body, facts)) as url:
            config = general(
                judge=url,
                rules="all",
                tasks=(
                    DEMANDS,
                    GeneralTaskWeight(kind="anchors", file=anchors),
                    GeneralTaskWeight(kind="prompts", file="creativity"),
                ),
            )
            stage = config.make_stage(tmp_path / "run")
            suite = stage.suite
            by_name = {task.id.split("-")[0].split(":")[0]: task for task in suite.tasks.draw(60)}
            anchored = next(t for t in by_name.values() if "anchor" in t.data)
            prompted = next(t for t in by_name.values() if t.data.get("rubric") == "creativity")
            ruled = next(t for t in by_name.values() if t.kind == ifeval.KIND)
            rewards = []
            for _ in range(times):
                async with suite.judging():
                    rewards += [
                        await suite.verify(anchored, attempt_with("fact fact")),
                        await suite.verify(anchored, attempt_with("no")),
                        await suite.verify(prompted, attempt_with("fact")),
                        await suite.verify(ruled, attempt_with(", the and you my is" * 20)),
                    ]
            stage.close()
            return rewards

    rewards = [*asyncio.run(run(2)), *asyncio.run(run(1))]
    for better, worse, prompted, ruled in zip(*(rewards[i::4] for i in range(4)), strict=True):
        assert better.value > worse.value and better.parts["grm"] == 1 and worse.parts["grm"] == 0
        assert prompted.parts["grm"] == 0.1 and "orm" not in prompted.parts
        assert ruled.value == 0 and ruled.parts["gate"] == 0 and "grm" not in ruled.parts


def test_trains_on_anchors_as_text(tmp_path, anchors):
    stage = general(anchors=anchors, sft_rows=3).make_stage(tmp_path)
    texts = [
        one for text in stage.suite.conversations for one in make_records(text, stage.tokenizer)
    ]
    source = RolloutSource(stage.config, stage.suite, texts)

    class OneEach:
        def sample(self, tasks, seed, first, name):
            sampled = TokenRecord(
                token_ids=[1, 2, 3], loss_mask=[0, 1, 1], rollout_logp=[np.nan, -1, -1]
            )
            return [Group(task=tasks[0], attempts=[attempt_with("Ay")], records=[sampled])]

    assert len(texts) == 20
    shown = stage.tokenizer.decode([i for i, w in zip(texts[0].token_ids, texts[0].ce_weight) if w])
    assert "fact" in shown and "0?" not in shown
    source.rollouts, seen = OneEach(), []
    for _ in range(2):
        batch = source.next(1)
        is_text = batch["ce_weight"] != 0
        assert (batch["rl_weight"] != 0).sum() == 2 and not (batch["rl_weight"] * is_text).any()
        assert len(set(batch["segment_ids"][is_text].tolist())) == 3
        seen.append(stage.tokenizer.decode(batch["token_ids"][0].tolist()))
    assert all(f"{i}?" in seen[i // 3] for i in range(6)) and "0?" not in seen[1]
    stage.close()


def fewer(share):
    if isinstance(share, GeneralTaskWeight):
        return dataclasses.replace(share, demands=ConstraintTaskConfig(size=20, max_characters=200))
    return dataclasses.replace(share, tasks=dataclasses.replace(share.tasks, size=20))


def test_distillation_task_has_teacher_of_its_stage(tmp_path):
    nowhere = distill.teachers(str(tmp_path / "life"))
    few = {origin: tuple(map(fewer, getattr(distill.tiny(), origin))) for origin in distill.ORIGINS}
    config = dataclasses.replace(distill.tiny(), teachers=nowhere, **ON_EIGHT_DEVICES, **few)
    with pytest.raises(ValueError, match="life/sft"):
        config.make_stage(tmp_path / "run")
    origins = {teacher.origin: teacher.checkpoint for teacher in config.teachers}
    assert origins["reasoning"].endswith("rl_reasoning") and set(origins) == set(distill.ORIGINS)
    assert config.objective == "teachers" and config.rollout.group == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: GeneralTaskWeight(kind="poems"),
            "kind is 'poems'; use one of demands, instructions",
        ),
        (
            lambda: GeneralTaskWeight(kind="prompts"),
            "have the file None; prompts and anchors come from one",
        ),
        (lambda: GeneralTaskWeight(kind="demands", file="f"), "have the file 'f'"),
        (lambda: GeneralTaskWeight(held_out_fraction=2), "held_out_fraction is 2; use 0 to 1"),
        (lambda: general(tasks=()), "tasks is empty"),
        (lambda: general(tasks=(DEMANDS, DEMANDS)), "two of the tasks have one name"),
        (lambda: general(sft_rows=1), "give both the file and the number in a batch"),
        (lambda: general(rules="some"), "reward is 'some'"),
        (lambda: general(judge_key_file="f"), "judge_key_file is 'f' and judge None"),
        (
            lambda: rl_general.make_verifier(general(judge="http://a", judge_key_file="/nowhere")),
            "judge_key_file /nowhere cannot be read",
        ),
        (
            lambda: general(tasks=(GeneralTaskWeight(kind="prompts", file="safety"),)).make_stage(
                "/nowhere"
            ),
            r"tasks \['prompts.safety'\] are judged by models, .* give --experiment.judge=URL or",
        ),
        (
            lambda: rl_general.check(rl_general.get_config("glm5")),
            r"tasks \['prompts.safety', 'prompts.creativity'\] are judged by models, .* give --experiment.judge=URL or",
        ),
        (
            lambda: dataclasses.replace(
                distill.tiny(), teachers=(Teacher(checkpoint="x", origin="sft"),)
            ),
            r"tasks of \['agentic', 'general', 'reasoning', 'sft'\] and teachers of \['sft'\]",
        ),
        (lambda: rl_general.get_config("huge"), "use one of tiny, small, glm5"),
        (lambda: distill.get_config("huge"), "use one of tiny, small, glm5"),
    ],
)
def test_rejects_contradictory_general_config(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_large_variants_follow_paper():
    assert distill.glm5().rollout.prompts == 1024
    for config in (rl_reasoning.glm5(), rl_general.glm5()):
        assert (config.rollout.prompts, config.rollout.group) == (32, 32)
        assert "indexer/" in config.optimizer.frozen and config.step.index_weight == 0
    for config in (rl_reasoning.glm5(), rl_general.glm5(), rl_agentic.glm5(), distill.glm5()):
        # GLM-5 3.6.2: rollouts are drafted by the MTP layer.
        assert config.engine.num_speculative_tokens == 4 and config.engine.num_pages
