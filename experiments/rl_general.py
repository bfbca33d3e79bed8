"""General RL: replies that keep what was asked, are right, and read well (GLM-5 3.4).

    python -m launch.run --experiment=experiments/rl_general.py:tiny --experiment.checkpoint=WORKDIR

Rewards are of three sources: rules that a program checks, an outcome reward model (--experiment.reward_model=WORKDIR of
experiments/reward_model.py) and a judge, any model behind OpenAI's API (--experiment.judge=http://HOST:PORT, with
--experiment.judge_key_file=FILE if it wants a key). With a model, rules are the gate before it; without one they are what
there is, and tasks without rules are refused. Either way guards find what is too long, repeats itself or mixes languages.
What people wrote is the other side of a comparison (tasks of kind "anchors"), and may be learnt as text beside
(--experiment.anchors=FILE --experiment.texts=8).

:tiny  from the lifecycle's last checkpoint, in about three minutes: demands on what is answered in a play, by rules.
:small for one accelerator: instructions, safety and creativity by both models.
:glm5  the same for 1,024 chips. The paper prints neither tasks nor weights; those here are what is shipped.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from experiments import rl_reasoning
from glm5_jax.agents.client import ChatClient
from glm5_jax.agents.judge import Judge
from glm5_jax.core.mesh import make_mesh
from glm5_jax.core.server import read_key
from glm5_jax.data.conversation import Conversation, parse
from glm5_jax.data.preferences import PROMPTS, Anchor, read_anchors
from glm5_jax.data.sources import held_out
from glm5_jax.envs import instruction_tasks, instructions
from glm5_jax.envs.general import General, GeneralConfig, anchor_tasks, prompt_tasks
from glm5_jax.envs.instruction_tasks import DemandConfig
from glm5_jax.envs.instructions import Instructions
from glm5_jax.envs.task_mixture import TaskMixture
from glm5_jax.rl.experiment import RlConfig
from glm5_jax.rl.outcome_model import Asked, OutcomeModel
from glm5_jax.rl.rollout import RolloutConfig
from glm5_jax.rl.stage import Reinforcement, World
from glm5_jax.rl.types import Attempt, Reward, Task, Verifier
from glm5_jax.training.experiment import choose

KINDS = ("demands", "instructions", "prompts", "anchors")


@dataclasses.dataclass(frozen=True)
class Share:
    """Tasks, and how much of all that is learnt from they are to be.

    Attributes:
      kind: "demands", made up; or of a file: "instructions" as IFEval writes them, "prompts" with their rubrics, or
        "anchors", what people answered (data/preferences.py).
      file: of those; a name of `PROMPTS`; None: the shipped instructions.
      demands: of that kind. rubric: by which anchors are compared.
      weight: how much.
      held_out_fraction: share of what is asked that is for evaluation, of files.
    """

    kind: str = "demands"
    file: str | None = None
    demands: DemandConfig = DemandConfig()
    rubric: str = "general"
    weight: float = 1.0
    held_out_fraction: float = (
        0.05  # of SFT too: what is asked must stand on one side in all stages
    )

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; use one of {', '.join(KINDS)}")
        if (self.file is None) != (self.kind == "demands") and self.kind != "instructions":
            raise ValueError(
                f"tasks of kind {self.kind!r} have the file {self.file!r}; prompts and anchors come from one, demands "
                "from none"
            )
        if not 0 <= self.held_out_fraction <= 1:
            raise ValueError(f"held_out_fraction is {self.held_out_fraction}; use 0 to 1")

    @property
    def name(self) -> str:
        if self.kind == "demands":
            return self.demands.name
        return f"{self.kind}:{self.file or 'shipped'}"

    def tasks_of(self, *, evaluation: bool = False) -> list[Task]:
        """Those of one side of the split. ValueError names what a file has wrong."""
        if self.kind == "demands":
            return list(instruction_tasks.tasks(self.demands, evaluation=evaluation))
        if self.kind == "instructions":
            found = list(instructions.tasks(self.file or instructions.SHIPPED))
        elif self.kind == "prompts":
            found = prompt_tasks(PROMPTS.get(self.file, self.file))
        else:
            found = anchor_tasks(self.file, self.rubric)
        return [
            task
            for task in found
            if held_out(str(task.messages[-1]["content"]).strip(), self.held_out_fraction)
            == evaluation
        ]


ALL = (Share("instructions"), Share("prompts", "safety"), Share("prompts", "creativity"))


@dataclasses.dataclass(frozen=True)
class GeneralRlConfig(RlConfig):
    """Attributes:
    tasks: of all kinds, with their weights.
    rules: whether "all" instructions of a task must be kept, or their "share" counts; with a model, "all".
    reward: how rules, models and guards make one number; a model that is not given has no weight.
    reward_model: workdir of the outcome reward model; None: there is none.
    judge: URL of the server that judges, and the model there; None: there is none, and whatever it has.
    judge_key_file: a file that holds the key that server wants; the key itself would stand in logs and the workdir.
    anchors: a file of them, of which as many as `texts` are learnt in every batch.
    """

    tasks: tuple[Share, ...] = (Share(),)
    rules: str = "all"
    reward: GeneralConfig = GeneralConfig()
    reward_model: str | None = None
    judge: str | None = None
    judge_model: str | None = None
    judge_key_file: str | None = None
    anchors: str | None = None

    def __post_init__(self):
        super().__post_init__()
        Instructions(self.rules)
        if not self.tasks:
            raise ValueError("tasks is empty; name at least one kind")
        names = [share.name for share in self.tasks]
        if len(set(names)) < len(names):
            raise ValueError(f"two of the tasks have one name: {sorted(names)}; join them into one")
        if (self.anchors is None) != (self.texts == 0):
            raise ValueError(
                f"anchors is {self.anchors!r} and texts {self.texts}; a file and how many of a batch belong together"
            )
        if self.judge is None and self.judge_key_file is not None:
            raise ValueError(
                f"judge_key_file is {self.judge_key_file!r} and judge None; name the server that wants the key"
            )

    @property
    def free(self) -> tuple[str, ...]:
        return *super().free, "judge_key_file"

    def stage(self, workdir, evaluator=None, before=None, **options) -> Reinforcement:
        del evaluator
        verify, judging = judges(self)
        kinds = {share.name: share.tasks_of() for share in self.tasks}
        world = World(
            TaskMixture(kinds, {share.name: share.weight for share in self.tasks}, seed=self.seed),
            {share.name: share.tasks_of(evaluation=True) for share in self.tasks},
            verify,
            judging=judging,
            texts=[written(one) for one in read_anchors(self.anchors)] if self.anchors else (),
        )
        known = list(itertools.chain(*kinds.values()))
        return Reinforcement(self, workdir, world, known, before=before, **options)


def judges(config: GeneralRlConfig) -> tuple[Verifier, Callable[[], AbstractAsyncContextManager]]:
    """What judges attempts, and within what. ValueError for tasks that nobody judges, and a model that is none."""
    unruled = [s.name for s in config.tasks if s.kind in ("prompts", "anchors")]
    if config.reward_model is None and config.judge is None and unruled:
        raise ValueError(
            f"tasks {unruled} are judged by models; give the field judge a URL or reward_model a workdir"
        )
    client = outcomes = None
    if config.judge is not None:
        file = config.judge_key_file
        key = None if file is None else read_key(file, "judge_key_file")
        client = ChatClient(config.judge, config.judge_model, api_key=key)
    if config.reward_model is not None:
        mesh = make_mesh(dataclasses.asdict(config.mesh), expert_slices=config.step.expert_slices)
        mesh = mesh if mesh.size > 1 else None
        # What the learner's rows are a multiple of, these are.
        outcomes = Asked(OutcomeModel.load(config.reward_model, rows=config.rows, mesh=mesh))
    given = {"orm": outcomes, "grm": client and Judge(client)}
    missing = {name: 0.0 for name, model in given.items() if model is None}
    reward = dataclasses.replace(config.reward, **missing)
    ruled = General(reward, Instructions(config.rules), given["orm"], given["grm"])
    free = dataclasses.replace(ruled, rules=None) if unruled else ruled

    async def verify(task: Task, attempt: Attempt) -> Reward:
        return await (ruled if task.kind == instructions.KIND else free)(task, attempt)

    return verify, (lambda: client) if client else contextlib.nullcontext


def written(anchor: Anchor) -> Conversation:
    """The conversation that ends with what a person answered."""
    line = {"messages": [*anchor.messages, anchor.anchor], "tools": list(anchor.tools)}
    return parse(line)


def get_config(variant: str = "tiny") -> GeneralRlConfig:
    """The variant's experiment; ValueError lists the variants."""
    return choose(variant, {"tiny": tiny, "small": small, "glm5": glm5})


def tiny() -> GeneralRlConfig:
    """Rate, batch and lengths are ours, as those of rl_reasoning.py."""
    base = rl_reasoning.tiny()
    return GeneralRlConfig(
        **shared(
            base,
            name="rl_general:tiny",
            rollout=RolloutConfig(prompts=16, group=8, max_tokens=64, max_turns=1),
        ),
        tasks=(Share(demands=DemandConfig(characters=200)),),
        rules="share",
    )


def small() -> GeneralRlConfig:
    """Replies of 4K tokens."""
    return GeneralRlConfig(**shared(rl_reasoning.small(), name="rl_general:small"), tasks=ALL)


def glm5() -> GeneralRlConfig:
    """Group and batch of Reasoning RL, as those of General RL are not printed."""
    return GeneralRlConfig(**shared(rl_reasoning.glm5(), name="rl_general:glm5"), tasks=ALL)


def shared(config: RlConfig, **changes) -> dict:
    """What all stages of reinforcement learning have in common, but for these changes."""
    own = {field.name: getattr(config, field.name) for field in dataclasses.fields(RlConfig)}
    return own | changes


if __name__ == "__main__":
    print(__doc__.split("\n\n")[1].strip())
