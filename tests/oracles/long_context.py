"""Solves long-context tasks from their prompts, with regular expressions and marker ids.

It does not use how a task was generated, so it also shows that the prompt determines the answers.
"""

import collections
import re


def solve_text(kind: str, prompt: str) -> list[str]:
    """Returns the answers as text, without separators."""
    if kind == "variable":
        value = re.search(r"names stand for (\d+)", prompt)[1]
        assigned, answers = {}, []
        for name, what in re.findall(r"Let (\w+) stand for (\w+)\.\n", prompt):
            assigned[name] = assigned.get(what, what)
            if assigned[name] == value:
                answers.append(name)
        return answers
    if kind == "frequent":
        count = int(re.search(r"Which (\d+) words", prompt)[1])
        listed = prompt.split("\n\n", 1)[1].rsplit("\n\nQuestion", 1)[0]
        return [word for word, _ in collections.Counter(listed.split()).most_common(count)]
    if kind == "mrcr":
        pattern = r"Write (\d+) and then, word by word, the (\w+) (\w+) about (\w+)\.\nPoet:$"
        tag, ordinal, form, topic = re.search(pattern, prompt).groups()
        number = "first second third fourth fifth sixth seventh eighth".split().index(ordinal)
        rounds = prompt.rsplit("\n\nReader: Write", 1)[0].split("Reader: Give me a ")[1:]
        opening = f"{form} about {topic}.\nPoet: "
        replies = [r.removeprefix(opening) for r in rounds if r.startswith(opening)]
        return [f"{tag} {replies[number]}"]
    notes = collections.defaultdict(list)
    for key, value in re.findall(r"Note: the code of (\w+) is (\d+)\.\n", prompt):
        notes[key].append(value)
    question = prompt.rsplit("Question:", 1)[1]
    if kind == "multi_value":
        return notes[re.search(r"codes of (\w+),", question)[1]]
    if kind == "multi_query":
        keys = re.search(r"codes of (.*), in this order", question)[1].split(", ")
        return [notes[key][0] for key in keys]
    return [notes[re.search(r"code of (\w+)\?", question)[1]][0]]


def solve_tokens(kind: str, prompt: list[int], markers: dict[str, int], config) -> list[list[int]]:
    """Returns the answers as ids."""
    name = {number: marker for marker, number in markers.items()}
    at = max(i for i, token in enumerate(prompt) if name.get(token, "") in _QUESTIONS)
    context, question = prompt[:at], prompt[at + 1 :]
    if kind == "frequent":
        return [[w] for w, _ in collections.Counter(context).most_common(config.num_frequent)]
    size = config.value_tokens
    if kind == "variable":
        assigned, answers = {}, []
        for i in _indices(context, markers["assign"]):
            word, what = context[i + 1], tuple(context[i + 2 : i + 2 + size])
            assigned[word] = assigned.get(what[0], what)
            if assigned[word] == tuple(question):
                answers.append([word])
        return answers
    if kind == "mrcr":
        tag, ordinal, *pair = question
        number = int(name[ordinal].removeprefix("number "))
        selected = [i for i in _indices(context, markers["user"]) if context[i + 1 : i + 3] == pair]
        start = selected[number - 1] + 4
        return [[tag, *context[start : start + config.reply_tokens]]]
    notes = collections.defaultdict(list)
    for i in _indices(context, markers["note"]):
        notes[context[i + 1]].append(context[i + 2 : i + 2 + size])
    return notes[question[0]] if kind == "multi_value" else [notes[key][0] for key in question]


_QUESTIONS = ("recall", "recall all", "recall each", "trace", "count", "repeat")


def _indices(tokens: list[int], marker: int) -> list[int]:
    return [i for i, token in enumerate(tokens) if token == marker]
