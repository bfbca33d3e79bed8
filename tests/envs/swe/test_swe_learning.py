"""A policy learns one narrow family of mutations from rewards of the orchestrator, and not from shuffled rewards.

The family is a comparison that was replaced: `<` by `<=`, `>` by `>=`, `==` by `!=`. A language model of a size that trains here
cannot write code, so the policy is a table: it looks at the function that the statement names, sees a comparison, and samples
another one to write in its place. Attempts, tools, sandboxes, grading, gateway and orchestrator are the real ones.
"""

import asyncio
import contextlib
import math
import random
import re
import tarfile

import pytest

from glm5_jax.envs.swe.attempts import AttemptRunner, SweAttemptConfig
from glm5_jax.envs.swe.dataset import SweDataset
from glm5_jax.envs.swe.mutations.campaign import MutationCampaign
from glm5_jax.envs.swe.mutations.maker import MutationProject
from glm5_jax.envs.swe.service import SweService
from glm5_jax.rl.orchestrator.client import OrchestratorClient
from glm5_jax.rl.orchestrator.server import Orchestrator
from glm5_jax.text.tokenizer import Tokenizer
from tests.rl.fleet import Engine, gateway, orchestrator_config, service_config, until

TOKENIZER = Tokenizer.load("bytes")
OPERATORS = ("<", ">", "==")
CHOICES = (*OPERATORS, "!=")
NUM_FUNCTIONS, NUM_INSTANCES = 18, 12
STEPS, RATE = 8, 4.0


def call(command: str) -> str:
    return f"</think><tool_call>bash<arg_key>command</arg_key><arg_value>{command}</arg_value></tool_call><|observation|>"


class TablePolicy(Engine):
    """Engine whose replies follow a table of preferences by the comparison that it sees."""

    def __init__(self):
        super().__init__(delay=0.0)
        self.table = {}

    def probabilities(self, seen: str) -> dict[str, float]:
        weights = {new: math.exp(self.table.get((seen, new), 0.0)) for new in CHOICES}
        return {new: weight / sum(weights.values()) for new, weight in weights.items()}

    def reply(self, prompt, rng):
        text = TOKENIZER.decode(prompt)
        function = re.search(r"test_(f\d+)", text)[1]
        answers = text.split("<tool_response>")[1:]
        if not answers:
            reply = call(f"grep -A1 'def {function}(' ops.py")
        elif len(answers) == 1:
            seen = re.search(r"return a (\S+) b", answers[0])[1]
            odds = self.probabilities(seen)
            (new,) = rng.choices(list(odds), list(odds.values()))
            reply = call(f"sed -i '/def {function}(/{{n;s/ {seen} / {new} /}}' ops.py")
        else:
            reply = "</think>Done.<|user|>"
        return TOKENIZER.encode(reply, parse_special=True)


@pytest.fixture(scope="module")
def dataset(builder, tmp_path_factory) -> SweDataset:
    """Returns instances whose only bug is one comparison."""
    folder = tmp_path_factory.mktemp("ops")
    names = {f"f{n}": OPERATORS[n % len(OPERATORS)] for n in range(NUM_FUNCTIONS)}
    source = "\n\n".join(f"def {f}(a, b):\n    return a {op} b\n" for f, op in names.items())
    tests = "".join(
        f"\n\ndef test_{f}():\n    assert [ops.{f}(a, 2) for a in (1, 2, 3)] == {[eval(f'{a} {op} 2') for a in (1, 2, 3)]}\n"
        for f, op in names.items()
    )
    files = {"ops.py": source, "tests/test_ops.py": f"import ops\n{tests}"}
    files["tests/test_other.py"] = "import ops\n\n\ndef test_names():\n    assert ops.f0\n"
    with tarfile.open(folder / "ops.tar", "w") as archive:
        for name, text in files.items():
            (folder / "file").write_text(text)
            archive.add(folder / "file", f"ops-1/{name}")
    projects = [MutationProject(name="ops", archive=folder / "ops.tar", license="MIT")]
    campaign = MutationCampaign(
        projects, builder, folder / "out", count=NUM_INSTANCES, concurrency=2
    )
    asyncio.run(campaign.run())
    return SweDataset(folder / "out")


def train(dataset, builder, shuffles: bool) -> tuple[float, float]:
    """Returns the mean reward on held-out instances before and after the training."""
    instances = [
        instance for instance in dataset.instances.values() if len(instance.FAIL_TO_PASS) == 1
    ]
    # Every comparison is held out and trained on, whatever the order in which the instances were made.
    instances.sort(key=lambda one: (re.search(r"\n\+.* a (\S+) b", one.patch)[1], one.instance_id))
    held_out = instances[::3]
    training = [instance for instance in instances if instance not in held_out]
    policy, rng = TablePolicy(), random.Random(0)
    limits = SweAttemptConfig(max_turns=6, timeout_s=300.0)
    with contextlib.ExitStack() as stack:
        gate = stack.enter_context(gateway(stack.enter_context(policy.running())))
        config = orchestrator_config(gate, group=4, batch_groups=4, max_running=4, max_staleness=0)
        url = stack.enter_context(Orchestrator(config).running())
        options = {"name": "swe", "rollout_timeout_s": 1000.0, "max_inflight": 4}
        service = SweService(
            service_config(url, **options),
            AttemptRunner(dataset, builder),
            training,
            held_out,
            TOKENIZER,
            limits,
        )
        stack.enter_context(service.running())
        client = OrchestratorClient(url, patience_s=60.0)
        until(lambda: client.status()["tasks"], 60.0)
        client.begin(0, 0)
        before = client.evaluate(len(held_out), 600.0)["swe"]["reward"]
        for step in range(STEPS):
            update(policy, client.take(step, 900.0), rng if shuffles else None)
            client.mark_trained(step)
            policy.version = step + 1
            client.push(step + 1)
        after = client.evaluate(len(held_out), 600.0)["swe"]
    assert after["failed"] == 0
    return before, after["reward"]


def update(policy: TablePolicy, groups, rng: random.Random | None) -> None:
    """Adds each advantage to the preference for the comparison that the attempt wrote. rng: shuffles the rewards."""
    rewards = [member.reward.value for group in groups for member in group.members]
    assert all(reward is not None for reward in rewards)
    if rng is not None:
        rng.shuffle(rewards)
    mean = sum(rewards) / len(rewards)
    members = [member for group in groups for member in group.members]
    for member, reward in zip(members, rewards):
        text = "".join(
            TOKENIZER.decode(record.token_ids[record.loss_mask > 0].tolist())
            for record in member.records
        )
        key = re.search(r"s/ (\S+) / (\S+) /", text).groups()
        policy.table[key] = policy.table.get(key, 0.0) + RATE * (reward - mean) / len(CHOICES)


@pytest.mark.slow
def test_policy_improves_on_held_out_mutations_and_not_with_shuffled_rewards(dataset, builder):
    before, after = train(dataset, builder, shuffles=False)
    _, control = train(dataset, builder, shuffles=True)

    assert before <= 0.75
    assert after == 1.0
    assert control < after
