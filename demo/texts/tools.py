"""Conversations in which the model calls two simple tools, or fills in small JSON. Torch-free.

Messages here are as the model sees them: tools stand in the system message, calls and results are tagged text.
`demo.tokenizer.CHAT_TEMPLATE` renders OpenAI's form (`tools`, `tool_calls`, role "tool") to exactly these texts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from demo.texts import facts
from demo.texts.world import Message, cap, is_held_out, plain

Tool = dict[str, Any]

HEAD: Final = "You can call these tools:\n<tools>\n"
TAIL: Final = (
    '</tools>\nTo call one, write <tool_call>, then {"name": its name, "arguments": an object}, then </tool_call>.'
)
_SKIES: Final = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy")
_KEYS: Final = ("name", "age", "city", "colour", "animal")


class Case(NamedTuple):
    """A conversation that ends with what the model is to say."""

    messages: list[Message]
    answer: str


def tool(name: str, description: str, argument: str, meaning: str) -> Tool:
    """A function of one string, as OpenAI's API describes it."""
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string", "description": meaning}},
        "required": [argument],
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER: Final = tool("get_weather", "The weather in a city now.", "city", "Name of the city")
CLOCK: Final = tool("get_time", "The time of day in a city.", "city", "Name of the city")


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def system_text(tools: Sequence[Tool], system: str = "") -> str:
    """The system message's text with its tools."""
    lines = "".join(dumps(each) + "\n" for each in tools)
    return (f"{system}\n\n" if system else "") + HEAD + lines + TAIL


def call_text(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def result_text(content: str) -> str:
    """A tool's result, in a turn of the user's."""
    return f"<tool_response>\n{content}\n</tool_response>"


def _described(rng: random.Random) -> tuple[Tool, Tool]:
    """Both tools, as one author or another would describe them."""
    what = rng.choice(
        ("The weather in a city now.", "Get the weather in a city.", "Current weather for a city", "Weather")
    )
    when = rng.choice(
        ("The time of day in a city.", "Get the current time in a city.", "Local time", "The time in a city")
    )
    meaning = rng.choice(("Name of the city", "The city", "City name, e.g. Paris", "Which city"))
    return tool("get_weather", what, "city", meaning), tool("get_time", when, "city", meaning)


def _city(rng: random.Random) -> str:
    """A capital, or a name that nobody has heard of: it is to be copied."""
    if rng.random() < 0.5:
        return rng.choice(tuple(facts.CAPITALS.values()))
    return cap("".join(rng.choice(facts.SYLLABLES) for _ in range(rng.randint(2, 3))))


def _weather(rng: random.Random) -> tuple[str, str]:
    """A tool's result, and what is said of it with "{city}" open."""
    sky, degrees = rng.choice(_SKIES), rng.randint(-9, 39)
    return dumps({"sky": sky, "degrees": degrees}), f"It is {sky} in {{city}}, {degrees} degrees."


def _clock(rng: random.Random) -> tuple[str, str]:
    time = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    return dumps({"time": time}), f"It is {time} in {{city}}."


_ASK_WEATHER: Final = (
    "What is the weather in {c}?", "How is the weather in {c}?", "Is it sunny in {c}?", "Tell me the weather in {c}.",
    "What is the weather like in {c} today?", "How warm is it in {c}?", "Weather in {c}?",
)  # fmt: skip
_ASK_TIME: Final = (
    "What time is it in {c}?", "Tell me the time in {c}.", "How late is it in {c}?", "What is the time in {c}?",
    "Which time is it in {c} now?",
)  # fmt: skip


def tool_case(rng: random.Random, held_out: bool = False) -> Case:
    """Calls a tool (or two at once), speaks of a result, or answers without a tool. Held out are pairs of a question's
    wording and a city."""
    while True:
        cities, asks_weather = [_city(rng), _city(rng)], rng.random() < 0.5
        ask = rng.choice(_ASK_WEATHER if asks_weather else _ASK_TIME)
        if cities[0] != cities[1] and is_held_out("tool", ask, cities[0]) == held_out:
            break
    weather, clock = _described(rng)
    tools = [weather, clock] if rng.random() < 0.5 else [clock, weather]
    if rng.random() < 0.3:
        tools = [weather if asks_weather else clock]
    name, result = ("get_weather", _weather) if asks_weather else ("get_time", _clock)
    messages: list[Message] = [
        {"role": "system", "content": system_text(tools, rng.choice(("", "", "You are a helpful assistant.")))}
    ]
    if rng.random() < 0.15 and not held_out:
        other = plain(rng)
        return Case([*messages, {"role": "user", "content": other.question}], other.answer)
    two = rng.random() < 0.2
    asked = cities if two else cities[:1]
    question = ask.format(c=f"{cities[0]} and in {cities[1]}" if two else cities[0])
    calls = "\n".join(call_text(name, {"city": city}) for city in asked)
    messages.append({"role": "user", "content": question})
    if held_out or rng.random() < 0.55:
        return Case(messages, calls)
    messages.append({"role": "assistant", "content": calls})
    said = []
    for city in asked:
        content, sentence = result(rng)
        messages.append({"role": "user", "content": result_text(content)})
        said.append(sentence.format(city=city))
    return Case(messages, " ".join(said))


def fill_case(rng: random.Random, held_out: bool = False) -> Case:
    """Reads a sentence and fills in JSON of the keys that are asked for, in their order."""
    while True:
        name, animal = rng.choice(facts.NAMES), rng.choice(tuple(facts.YOUNG))
        values: dict[str, Any] = {"name": name, "age": rng.randint(1, 99), "city": _city(rng)}
        if is_held_out("fill", name, values["age"]) == held_out:
            break
    values |= {"colour": rng.choice(tuple(set(facts.COLOURS.values()))), "animal": animal}
    sentences = {
        "age": f"{name} is {values['age']} years old.",
        "city": f"{name} lives in {values['city']}.",
        "colour": f"{name} likes {values['colour']}.",
        "animal": f"{name} has a {animal}.",
    }
    if rng.random() < 0.3:
        sentences["age"] = f"{name} is {values['age']}."
    told = rng.sample(list(sentences), rng.randint(1, 3))
    keys = ["name", *(key for key in _KEYS if key in told)]
    if rng.random() < 0.4:
        rng.shuffle(keys)
    wanted = ", ".join(keys[:-1]) + " and " + keys[-1]
    text = " ".join(sentences[key] for key in told)
    ask = rng.choice((
        "{text} Give me {wanted} as JSON.", "Give me {wanted} as JSON: {text}", "{text} Fill in {wanted} as JSON.",
        "Extract {wanted} as JSON: {text}",
    ))  # fmt: skip
    messages: list[Message] = [{"role": "user", "content": ask.format(text=text, wanted=wanted)}]
    return Case(messages, dumps({key: values[key] for key in keys}))


def case(rng: random.Random) -> tuple[list[Message], int]:
    """A training conversation, and the index of the first message that may be trained on."""
    messages, answer = (tool_case if rng.random() < 0.7 else fill_case)(rng)
    return [*messages, {"role": "assistant", "content": answer}], 0
