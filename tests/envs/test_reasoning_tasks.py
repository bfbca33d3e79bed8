"""Tasks depend on their config and number, have correct answers, and are on one side of the split."""

import asyncio
import json
import re

import pytest

from glm5_jax.data import chat_tasks
from glm5_jax.data.chat_data import first_user_text
from glm5_jax.data.conversation import parse_line
from glm5_jax.data.sources import is_held_out
from glm5_jax.envs.reasoning.task_sources import BOXED, ELEMENTS, KINDS, SYMBOLS, TaskConfig, tasks
from glm5_jax.envs.reasoning.verifiers import KINDS as VERIFIERS, ScienceVerifier
from glm5_jax.rl.types import Attempt


def make_tasks(kind, size=400, **options):
    """Returns all tasks, of both sides."""
    return list(tasks(TaskConfig(kind=kind, size=size, held_out_fraction=0, **options)))


def question(task):
    [message] = task.messages
    assert message["role"] == "user"
    return message["content"]


@pytest.mark.parametrize("kind", KINDS)
def test_task_depends_only_on_its_number(kind):
    some, more = make_tasks(kind, 20), make_tasks(kind, 40)
    assert some == more[:20]
    ids = [task.id for task in more]
    assert len(set(ids)) == 40 and ids[7].endswith("-7")
    assert {task.kind for task in more} == {TaskConfig(kind=kind).domain} <= set(VERIFIERS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_task_is_on_one_side(kind):
    size = 80 if kind == "worlds" else 400
    config = TaskConfig(kind=kind, size=size, held_out_fraction=0.25)
    train, evaluation = list(tasks(config)), list(tasks(config, evaluation=True))

    def numbers(some):
        return [int(task.id.rsplit("-", 1)[1]) for task in some]

    assert sorted(numbers(train) + numbers(evaluation)) == list(range(len(make_tasks(kind, size))))
    assert numbers(train) == sorted(numbers(train))
    assert 0.1 < len(evaluation) / len(train + evaluation) < 0.4
    assert not {question(task) for task in train} & {question(task) for task in evaluation}


@pytest.mark.parametrize("kind", ["addition", "products", "choices"])
def test_other_seeds_and_orders_keep_split(kind):
    options = {"size": 1000, "digits": 1, "held_out_fraction": 0.3}
    stems = []
    for evaluation in (False, True):
        stems.append(set())
        for seed in (0, 1):
            for task in tasks(TaskConfig(kind=kind, seed=seed, **options), evaluation=evaluation):
                stem = question(task).splitlines()[0]
                stems[-1].add("".join(sorted(stem)) if kind == "addition" else stem)
    assert min(map(len, stems)) > 10 and not stems[0] & stems[1]


@pytest.mark.parametrize("kind", ["gsm8k", "chain", "mbpp"])
def test_split_equals_that_of_sft(kind):
    config = TaskConfig(kind=kind, size=200, instruction=BOXED)
    chats = chat_tasks.make_lines(chat_tasks.ChatTaskConfig(kind=kind, size=200), "interleaved")
    sides = [
        is_held_out(first_user_text(parse_line(line)), config.held_out_fraction) for line in chats
    ]
    for evaluation in (False, True):
        numbers = {int(task.id.rsplit("-", 1)[1]) for task in tasks(config, evaluation=evaluation)}
        assert numbers == {i for i, side in enumerate(sides) if side == evaluation}


def test_sft_contains_no_held_out_product():
    sides, chats = {False: set(), True: set()}, chat_tasks.ChatTaskConfig(kind="tools", size=4000)
    for line in chat_tasks.make_lines(chats, "interleaved"):
        if "*" in (text := first_user_text(parse_line(line))):
            sides[is_held_out(text, TaskConfig().held_out_fraction)].add(text)
    for evaluation, sft_products in sides.items():
        config = TaskConfig(kind="products", size=4000, digits=2)
        products = {question(task) for task in tasks(config, evaluation=evaluation)}
        assert len(products & sft_products) > 10 and not products & sides[not evaluation]


def test_ids_contain_config_of_task():
    ids = {task.id: task for task in make_tasks("addition", 5)}
    assert list(ids)[0] == "addition2-seed0-0"
    for options in ({"seed": 1}, {"digits": 3}):
        assert not ids.keys() & {task.id for task in make_tasks("addition", 5, **options)}
    assert make_tasks("gsm8k", 1)[0].id == make_tasks("gsm8k", 1, seed=1)[0].id == "gsm8k-0"
    assert make_tasks("svamp", 3, seed=1) == make_tasks("svamp", 3)


def test_counts_shipped_tasks():
    counts = {"gsm8k": 1500, "svamp": 1000, "mbpp": 374, "humaneval": 82, "musique": 46}
    assert {kind: len(make_tasks(kind, 10**6)) for kind in counts} == counts


@pytest.mark.parametrize(("kind", "sign"), [("addition", "+"), ("products", "*")])
@pytest.mark.parametrize("digits", [1, 4, 30])
def test_numbers_have_their_digits_and_results(kind, sign, digits):
    for task in make_tasks(kind, 100, digits=digits):
        left, right = question(task).removesuffix("?").split(sign)
        assert len(left) == len(right) == len(str(int(left))) == len(str(int(right))) == digits
        result = int(left) + int(right) if sign == "+" else int(left) * int(right)
        assert task.data["answer"] == str(result)


def test_products_need_the_calculator():
    for task in make_tasks("products", 5):
        [tool] = task.tools
        assert tool["function"]["name"] == "calculate" and task.data["min_calls"] == 1


def test_word_problems_have_numeric_answers():
    for task in make_tasks("gsm8k", 1500) + make_tasks("svamp", 1000):
        assert re.fullmatch(r"-?\d+(\.\d+)?", task.data["answer"])
    assert make_tasks("gsm8k", 1)[0].data == {"answer": "72"}


def test_chain_asks_for_last_value():
    for task in make_tasks("chain", 100, steps=4):
        values = {}
        for name, left, sign, right in re.findall(r"(\w)=(\w)([+*])(\d)", question(task)):
            left = int(left) if left.isdigit() else values[left]
            values[name] = (left * int(right) if sign == "*" else left + int(right)) % 10
        assert list(values) == list("abcd") and task.data == {"answer": str(values["d"])}


def right_answer(stem: str) -> str:
    """Returns the right answer of a question of `choices`, computed from its text."""
    if match := re.fullmatch(r"Which is the symbol of (\w+)\?", stem):
        return SYMBOLS[ELEMENTS.index(match[1])]
    if match := re.fullmatch(r"Which element has the symbol (\w+)\?", stem):
        return ELEMENTS[SYMBOLS.index(match[1])]
    if match := re.fullmatch(r"Which element has the atomic number (\d+)\?", stem):
        return ELEMENTS[int(match[1]) - 1]
    a, b = map(int, re.findall(r"\b\d+\b", stem.replace("s^2", "")))
    units = {"force": "N", "moves": "m", "flow": "V", "machine": "J"}
    [unit] = [unit for word, unit in units.items() if word in stem]
    return f"{a * b} {unit}"


@pytest.mark.parametrize("choices", [2, 4, 10])
def test_exactly_one_choice_is_right(choices):
    letters = set()
    for task in make_tasks("choices", 500, choices=choices):
        stem, *lines = question(task).splitlines()
        answers = dict(line.split(") ", 1) for line in lines)
        assert list(answers) == list("ABCDEFGHIJ"[:choices]) and task.data["choices"] == choices
        assert len(set(answers.values())) == choices
        assert [x for x in answers if answers[x] == right_answer(stem)] == [task.data["answer"]]
        letters.add(task.data["answer"])
    assert len(letters) == choices
    reply = Attempt(messages=({"role": "assistant", "content": f"({task.data['answer']})"},))
    assert asyncio.run(ScienceVerifier()(task, reply)).value == 1.0


def test_elements_are_ordered_by_number():
    known = {
        1: ("hydrogen", "H"),
        11: ("sodium", "Na"),
        26: ("iron", "Fe"),
        47: ("silver", "Ag"),
        54: ("xenon", "Xe"),
    }
    assert len(ELEMENTS) == len(SYMBOLS) == len(set(SYMBOLS)) == 54
    assert {number: (ELEMENTS[number - 1], SYMBOLS[number - 1]) for number in known} == known


def test_prompts_of_programs_show_at_most_one_test():
    for task in make_tasks("mbpp"):
        first, *others = task.data["tests"].splitlines()
        assert question(task).endswith(f"\n{first}") and others
        assert not any(test in question(task) for test in others if test != first)
    for task in make_tasks("humaneval"):
        assert task.data["prelude"].rstrip() in question(task)
        asserts = [line.strip() for line in task.data["tests"].splitlines() if "assert" in line]
        assert asserts and not any(line in question(task) for line in asserts)


def test_instruction_follows_question():
    [task] = make_tasks("addition", 1, instruction=BOXED)
    assert (
        question(task)
        == question(make_tasks("addition", 1)[0]) + "\nPut your final answer within \\boxed{}."
    )


def test_tasks_are_serializable():
    for kind in KINDS:
        [task] = make_tasks(kind, 1)
        assert json.loads(json.dumps([task.messages, task.data, task.tools]))[1] == task.data


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "poem"),
        ("size", 0),
        ("seed", -1),
        ("digits", 0),
        ("steps", 1),
        ("hops", 1),
        ("hops", 5),
        ("choices", 1),
        ("choices", 11),
        ("held_out_fraction", 1.5),
    ],
)
def test_names_value_out_of_range(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value!r}"):
        TaskConfig(**{field: value})
