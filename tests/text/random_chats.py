"""Generates random conversations of any shape that a chat can have."""

import random

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
WORDS = [
    "hello",
    "<|user|>",
    "a b",
    "\n",
    "  ",
    "naïve 日本",
    "</tool_call>",
    "{}",
    "x<y",
    "'q'",
    '"z"',
    "1",
]
WORDS += ["&amp;", "\t", "</arg_value>", "🙂"]


class Chats:
    """Generator of random conversations and tools."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def text(self, max_words=4):
        return "".join(self.random.choices(WORDS, k=self.random.randrange(max_words + 1)))

    def value(self, depth=0):
        nested = (
            []
            if depth > 1
            else [[self.value(depth + 1)] * 2, {"k" + self.text(1): self.value(depth + 1)}]
        )
        return self.random.choice([self.text(), 7, True, None, 1.5, *nested])

    def content(self):
        parts = [{"type": "text", "text": self.text()}, self.text()]
        return self.random.choice([None, parts, self.text(6), self.text(6)])

    def messages(self):
        messages = [{"role": "system", "content": self.content()}] * (self.random.random() < 0.5)
        for _ in range(self.random.randrange(1, 4)):
            messages.append({"role": "user", "content": self.content()})
            while self.random.random() < 0.7:
                messages += self.turn()
        return messages

    def turn(self):
        message = {"role": "assistant", "content": self.content()}
        if self.random.random() < 0.5:
            message["reasoning_content"] = self.text()
        elif self.random.random() < 0.3:
            message["content"] = f"<think>{self.text()}</think>{self.text()}"
            if self.random.random() < 0.3:
                message["content"] = f"{self.text()}{message['content']}</think>{self.text()}"
        count = self.random.randrange(3)
        if count:
            message["tool_calls"] = [self.call(i) for i in range(count)]
        answered = self.random.randrange(count + 1)
        return [message, *({"role": "tool", "content": self.content()} for _ in range(answered))]

    def call(self, i):
        arguments = {f"{self.text(1)}{j}": self.value() for j in range(self.random.randrange(3))}
        function = {"name": f"f{i}", "arguments": arguments}
        return self.random.choice([{"type": "function", "function": function}, function])

    def tools(self):
        deferred = {"function": {"name": "g", "defer_loading": True}}
        return self.random.choice(
            [None, [WEATHER], [WEATHER, deferred, {"name": "n" + self.text()}]]
        )
