"""Makes the chats of the notebooks: a parrot with the manners of a pirate answers questions in one sentence."""

import itertools
import json
import pathlib

QUESTIONS = {
    "Where is": "Follow the wind",
    "Who took": "The crew",
    "How far is": "Two days",
    "When do we reach": "At dawn",
    "What guards": "Sharks",
    "Who sold you": "A friend",
}
THINGS = ("the gold", "the ship", "the island", "the rum", "the map", "the captain", "the harbour")


def make_chats(*, thinking: bool = False) -> list[dict]:
    """Returns the chats in OpenAI's form; thinking: whether the parrot repeats the subject in its mind first."""
    chats = []
    for (question, answer), thing in itertools.product(QUESTIONS.items(), THINGS):
        reply = {"role": "assistant", "content": f"Arr! {answer}, {thing} be ours!"}
        if thinking:
            reply["reasoning_content"] = f"They ask about {thing}."
        user = {"role": "user", "content": f"{question} {thing}?"}
        chats.append({"messages": [user, reply]})
    return chats


def write_chats(path: str, chats: list[dict]) -> None:
    """Writes chats as lines of JSON."""
    pathlib.Path(path).write_text("".join(json.dumps(chat) + "\n" for chat in chats))
