"""Stories, poems and small talk, each from a small grammar."""

from __future__ import annotations

import random
from typing import Final

from demo.texts.facts import NAMES

NAME: Final = "Tiny Kite"

HEROES: Final = (
    "fox",
    "mouse",
    "bear",
    "owl",
    "rabbit",
    "frog",
    "cat",
    "dragon",
    "duck",
    "hedgehog",
    "turtle",
    "robot",
)
TRAITS: Final = ("small", "brave", "clever", "sleepy", "kind", "curious", "cheerful", "shy")
PLACES: Final = ("forest", "garden", "castle", "meadow", "village", "valley", "harbour", "old mill")
FINDS: Final = (
    "a golden key", "a lost kite", "a shiny stone", "a secret door", "an old map", "a singing shell", "a tiny boat",
    "a warm lantern",
)  # fmt: skip
DEEDS: Final = (
    "shared it with a friend", "carried it home", "gave it to the king", "hid it under a tree",
    "followed it to the sea", "showed it to the moon",
)  # fmt: skip
ENDINGS: Final = (
    "And everyone was happy.", "Then they all had cake.", "And the stars came out.",
    "From that day on they were friends.", "Then it was time to sleep.",
)  # fmt: skip
POEMS: Final[dict[str, str]] = {
    "the sea": "The sea is wide, the sea is blue, it sings a song for me and you.",
    "the moon": "The moon is round, the moon is bright, it keeps us company at night.",
    "the rain": "The rain comes down on roof and tree and sings a quiet song to me.",
    "a cat": "The cat lies down upon the mat and dreams of fish, and that is that.",
    "snow": "The snow falls soft on hill and lane and makes the world all new again.",
    "spring": "The spring is here, the birds all sing, the sun warms every little thing.",
    "a kite": "A kite goes up into the sky, it pulls the string and waves goodbye.",
    "a friend": "A friend is near in sun and rain, and when you fall helps you again.",
    "the wind": "The wind runs over field and hill and never, never can be still.",
    "the stars": "The stars are small and far away, they wait for night and sleep by day.",
}
JOKES: Final = (
    "Why did the cow cross the road? To get to the other moo.",
    "What do you call a sleeping dinosaur? A dino-snore.",
    "Why was six afraid of seven? Because seven ate nine.",
    "What is a cat's favourite colour? Purr-ple.",
    "What do you call a bear with no teeth? A gummy bear.",
)

# (questions, answers): any question of a group may get any answer of it.
CHAT: Final[tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]] = (
    ("greeting",
     ("Hello!", "Hi!", "Hey!", "Hello there!", "Hi there!", "Good morning!", "Good evening!", "Hey there!", "Hello",
      "Greetings!", "Good day!", "Howdy!"),
     ("Hello! How can I help you?", "Hi there! Nice to meet you.", "Hello! What would you like to know?")),
    ("name",
     ("Who are you?", "What is your name?", "What are you called?", "Tell me your name.", "Introduce yourself.",
      "What are you?", "Are you a robot?", "What model are you?"),
     (f"I am {NAME}, a very small language model.",)),
    ("skills",
     ("What can you do?", "What do you know?", "How can you help me?", "What can I ask you?", "Help!",
      "What are you good at?"),
     ("I can add and subtract small numbers, count, name colours, know a few facts and tell short stories.",)),
    ("maker",
     ("Who made you?", "Where do you come from?", "Who trained you?", "How were you made?", "Who created you?"),
     ("I was trained from scratch on a little world of made-up text.",)),
    ("size",
     ("How big are you?", "How many parameters do you have?", "Are you large?", "Are you a big model?"),
     ("I am tiny: about nine million parameters, in eight small experts per layer.",)),
    ("feeling",
     ("How are you?", "How are you doing?", "How do you feel?", "Are you well?", "How is it going?",
      "How are you today?"),
     ("I am fine, thank you! How are you?", "Very well, thank you for asking!")),
    ("fine",
     ("I am fine.", "I am happy today.", "I feel great!", "Very well, thanks.", "I am doing well."),
     ("I am glad to hear that!",)),
    ("sad",
     ("I am sad.", "I feel sad today.", "I am not happy.", "I had a bad day.", "I am tired."),
     ("I am sorry to hear that. Would you like a story?",)),
    ("thanks",
     ("Thank you!", "Thanks!", "Thank you very much.", "Thanks a lot!", "That is great, thanks.", "Well done!",
      "Good job!"),
     ("You are welcome!", "My pleasure!")),
    ("goodbye",
     ("Goodbye!", "Bye!", "See you later!", "Good night!", "Bye bye!", "I have to go.", "See you!", "Farewell!"),
     ("Goodbye! Come back soon.", "Bye! Have a nice day.")),
    ("like",
     ("What is your favourite colour?", "Which colour do you like best?"),
     ("I like blue, because a kite loves the sky.",)),
    ("animal",
     ("What is your favourite animal?", "Which animal do you like best?", "Do you like animals?"),
     ("I like owls, because they are quiet and wise.",)),
    ("food",
     ("What do you eat?", "Are you hungry?", "What is your favourite food?", "Do you like cake?"),
     ("I do not eat, but I like to talk about cake.",)),
    ("joke",
     ("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Say something funny.", "A joke, please."), JOKES),
    ("yes", ("Yes.", "Yes, please.", "Sure.", "Okay."), ("Great! What shall we talk about?",)),
    ("no", ("No.", "No, thank you.", "Never mind."), ("That is all right. I am here if you need me.",)),
)  # fmt: skip


def article(noun: str) -> str:
    """The noun behind "a" or "an"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def story(rng: random.Random, hero: str) -> str:
    """Three or four short sentences about a hero, under 60 words."""
    name, trait = rng.choice(NAMES), rng.choice(TRAITS)
    place, find = rng.choice(PLACES), rng.choice(FINDS)
    return (
        f"Once upon a time, {article(trait)} {hero} named {name} lived in the {place}. "
        f"One day {name} found {find} and {rng.choice(DEEDS)}. {rng.choice(ENDINGS)}"
    )


def tell(rng: random.Random) -> tuple[str, str]:
    """A request for a story and the story."""
    hero = rng.choice(HEROES)
    asks = (
        f"Tell me a story about {article(hero)}.", f"Tell a story about {article(hero)}.",
        f"I want a story about {article(hero)}.", f"Can you tell me a story about {article(hero)}?",
        f"Write a short story about {article(hero)}.", f"A story with {article(hero)}, please.",
    )  # fmt: skip
    if rng.random() < 0.3:
        return rng.choice(("Tell me a story.", "Tell me a short story.", "A story, please.")), story(rng, hero)
    return rng.choice(asks), story(rng, hero)


def recite(rng: random.Random) -> tuple[str, str]:
    """A request for a poem and the poem."""
    topic = rng.choice(tuple(POEMS))
    asks = (
        f"Write a poem about {topic}.", f"Tell me a poem about {topic}.", f"A poem about {topic}, please.",
        f"Do you know a poem about {topic}?", f"Can you write a poem about {topic}?", f"Make a rhyme about {topic}.",
    )  # fmt: skip
    if rng.random() < 0.2:
        return rng.choice(("Write a poem.", "Tell me a poem.", "Say a poem.")), POEMS[topic]
    return rng.choice(asks), POEMS[topic]


def chat(rng: random.Random) -> tuple[str, str]:
    """A piece of small talk and its answer."""
    _, asks, answers = rng.choice(CHAT)
    return rng.choice(asks), rng.choice(answers)
