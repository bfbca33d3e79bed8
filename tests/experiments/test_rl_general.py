"""General RL and distillation as experiments: who judges what, who teaches what, and what is refused."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest

from experiments import distill, rl_general, rl_reasoning
from experiments.rl_general import Share
from glm5_jax.data.record import TokenRecord
from glm5_jax.envs import instructions
from glm5_jax.envs.instruction_tasks import DemandConfig
from glm5_jax.rl.experiment import Teacher
from glm5_jax.rl.rollout import Group
from glm5_jax.rl.types import Attempt
from tests.agents.judges import facts, serving, verdict

DEMANDS = Share(demands=DemandConfig(size=100, characters=200))
WHOLE = dataclasses.replace(rl_general.tiny().model, int4_group=None)  # int4 cannot be cut in eight
HERE = {"goes_on": False, "model": WHOLE}


def general(**changes):
    changes = {"tasks": (DEMANDS,)} | changes
    return dataclasses.replace(rl_general.tiny(), **HERE, **changes)


@pytest.fixture
def anchors(tmp_path):
    path = tmp_path / "anchors.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": f"{i}?"}], "anchor": "fact"} for i in range(20)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def said(text):
    return Attempt(({"role": "assistant", "content": text},))


def test_rules_alone_judge_what_has_rules(tmp_path):
    stage = general().stage(tmp_path)
    [task] = stage._world.tasks.draw(1)
    wanted = [one.kept("Ay Ay Ay") for one in instructions.instructions(task.data)]
    reward = asyncio.run(stage._world.verify(task, said("Ay Ay Ay")))
    assert reward.value == sum(wanted) / len(wanted)
    stage.close()


def test_a_judge_behind_http_judges_what_passes_the_rules(tmp_path, anchors):
    """Each batch has its own event loop, and the client is opened in it."""

    async def run(times):
        async with serving(lambda body: verdict(body, facts)) as url:
            config = general(
                judge=url,
                rules="all",
                tasks=(DEMANDS, Share("anchors", anchors), Share("prompts", "creativity")),
            )
            stage = config.stage(tmp_path / "run")
            world = stage._world
            by_name = {task.id.split("-")[0].split(":")[0]: task for task in world.tasks.draw(60)}
            anchored = next(t for t in by_name.values() if "anchor" in t.data)
            prompted = next(t for t in by_name.values() if t.data.get("rubric") == "creativity")
            ruled = next(t for t in by_name.values() if t.kind == instructions.KIND)
            found = []
            for _ in range(times):
                async with world.judging():
                    found += [
                        await world.verify(anchored, said("fact fact")),
                        await world.verify(anchored, said("no")),
                        await world.verify(prompted, said("fact")),
                        await world.verify(ruled, said(", the and you my is" * 20)),
                    ]
            stage.close()
            return found

    found = [*asyncio.run(run(2)), *asyncio.run(run(1))]
    for better, worse, prompted, ruled in zip(*(found[i::4] for i in range(4)), strict=True):
        assert better.value > worse.value and better.parts["grm"] == 1 and worse.parts["grm"] == 0
        assert prompted.parts["grm"] == 0.1 and "orm" not in prompted.parts
        assert ruled.value == 0 and ruled.parts["gate"] == 0 and "grm" not in ruled.parts


def test_anchors_are_learnt_as_text_beside(tmp_path, anchors):
    stage = general(anchors=anchors, texts=3).stage(tmp_path)
    own = stage._attempts

    class OneEach:
        def sample(self, tasks, seed, first, name):
            sampled = TokenRecord([1, 2, 3], [0, 1, 1], rollout_logp=[np.nan, -1, -1])
            return [Group(tasks[0], [said("Ay")], [sampled])]

    records = own._texts
    assert len(records) == 20
    shown = stage.tokenizer.decode(
        [i for i, w in zip(records[0].token_ids, records[0].ce_weight) if w]
    )
    assert "fact" in shown and "0?" not in shown
    own.rollouts, own.score, seen = OneEach(), None, []
    for _ in range(2):
        batch = own.next(1)
        learnt = batch["ce_weight"] != 0
        assert (batch["rl_weight"] != 0).sum() == 2 and not (batch["rl_weight"] * learnt).any()
        assert len(set(batch["segment_ids"][learnt].tolist())) == 3
        seen.append(stage.tokenizer.decode(batch["token_ids"][0].tolist()))
    assert all(f"{i}?" in seen[i // 3] for i in range(6)) and "0?" not in seen[1]
    stage.close()


def test_each_task_of_distillation_has_the_teacher_of_its_stage(tmp_path):
    nowhere = distill.teachers(str(tmp_path / "life"))
    config = dataclasses.replace(distill.tiny(), teachers=nowhere, **HERE)
    with pytest.raises(ValueError, match="life/sft"):
        config.stage(tmp_path / "run")
    origins = {teacher.origin: teacher.checkpoint for teacher in config.teachers}
    assert origins["reasoning"].endswith("rl_reasoning") and set(origins) == set(distill.ORIGINS)
    assert config.learns == "teachers" and config.rollout.group == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Share("poems"), "kind is 'poems'; use one of demands, instructions"),
        (lambda: Share("prompts"), "have the file None; prompts and anchors come from one"),
        (lambda: Share("demands", "f"), "have the file 'f'"),
        (lambda: Share(held_out_fraction=2), "held_out_fraction is 2; use 0 to 1"),
        (lambda: general(tasks=()), "tasks is empty"),
        (lambda: general(tasks=(DEMANDS, DEMANDS)), "two of the tasks have one name"),
        (lambda: general(texts=1), "a file and how many of a batch belong together"),
        (lambda: general(rules="some"), "reward is 'some'"),
        (
            lambda: general(tasks=(Share("prompts", "safety"),)).stage("/nowhere"),
            "give the field judge a URL",
        ),
        (
            lambda: dataclasses.replace(distill.tiny(), teachers=(Teacher("x", "sft"),)),
            r"tasks of \['agentic', 'general', 'reasoning', 'sft'\] and teachers of \['sft'\]",
        ),
        (lambda: rl_general.get_config("huge"), "use one of tiny, small, glm5"),
        (lambda: distill.get_config("huge"), "use one of tiny, small, glm5"),
    ],
)
def test_contradictions_of_general_stages_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_the_large_ones_follow_the_paper():
    assert distill.glm5().rollout.prompts == 1024
    for config in (rl_reasoning.glm5(), rl_general.glm5()):
        assert (config.rollout.prompts, config.rollout.group) == (32, 32)
        assert "indexer/" in config.optimizer.frozen and config.step.index_weight == 0
