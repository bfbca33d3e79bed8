"""Tasks of a user: write a number of two digits backwards. An example of a task file for RL.

glm5 run rl_reasoning:addition --tasks="({'file': 'experiments/tasks/reverse.py'},)" --workdir=DIR
"""

from glm5_jax.rl.types import Attempt, Task


def tasks():
    """Yields the prompts, with what `verify` needs."""
    for number in range(10, 100):
        yield {"question": f"{number}?", "answer": str(number)[::-1]}


def verify(task: Task, attempt: Attempt) -> float:
    """Rewards every digit in its place, and the end after the last one."""
    answer, reply = task.data["answer"], attempt.reply
    in_place = sum(a == b for a, b in zip(reply, answer))
    length = max(len(answer), len(reply), attempt.num_sampled_tokens - 1)
    return (in_place + (attempt.finish_reason == "stop")) / (length + 1)
