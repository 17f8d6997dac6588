"""The tables of the little world: what is what, in plain tuples and dicts."""

from __future__ import annotations

from typing import Final

COLOURS: Final[dict[str, str]] = {
    "a banana": "yellow", "a lemon": "yellow", "the sun": "yellow", "a chick": "yellow", "a sunflower": "yellow",
    "butter": "yellow", "corn": "yellow", "honey": "golden", "a strawberry": "red", "a cherry": "red",
    "a tomato": "red", "a fire truck": "red", "a ladybird": "red", "a rose": "red", "a raspberry": "red",
    "blood": "red", "ketchup": "red", "a poppy": "red", "the sky": "blue", "the sea": "blue", "a blueberry": "blue",
    "a sapphire": "blue", "a cornflower": "blue", "a whale": "blue", "grass": "green", "a frog": "green",
    "a cucumber": "green", "a lime": "green", "spinach": "green", "a pea": "green", "a leaf": "green",
    "a cactus": "green", "a crocodile": "green", "broccoli": "green", "an emerald": "green", "moss": "green",
    "snow": "white", "milk": "white", "salt": "white", "a cloud": "white", "a swan": "white", "rice": "white",
    "an egg": "white", "a polar bear": "white", "a lamb": "white", "paper": "white", "coal": "black",
    "a raven": "black", "the night": "black", "a tyre": "black", "ink": "black", "a panther": "black",
    "tar": "black", "an orange": "orange", "a carrot": "orange", "a pumpkin": "orange", "a tiger": "orange",
    "a goldfish": "orange", "a fox": "orange", "a mandarin": "orange", "chocolate": "brown", "coffee": "brown",
    "wood": "brown", "a bear": "brown", "a chestnut": "brown", "bread": "brown", "a potato": "brown",
    "a walnut": "brown", "an aubergine": "purple", "a plum": "purple", "lavender": "purple", "a violet": "purple",
    "an amethyst": "purple", "a flamingo": "pink", "a piglet": "pink", "a peony": "pink", "a salmon": "pink",
    "an elephant": "grey", "a mouse": "grey", "a stone": "grey", "ash": "grey", "a donkey": "grey", "fog": "grey",
}  # fmt: skip

MIXES: Final[dict[tuple[str, str], str]] = {
    ("red", "blue"): "purple", ("red", "yellow"): "orange", ("blue", "yellow"): "green", ("red", "white"): "pink",
    ("black", "white"): "grey", ("red", "green"): "brown", ("blue", "white"): "light blue",
    ("black", "blue"): "dark blue", ("green", "white"): "light green", ("black", "green"): "dark green",
}  # fmt: skip

CAPITALS: Final[dict[str, str]] = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Austria": "Vienna", "Poland": "Warsaw", "Greece": "Athens", "Norway": "Oslo", "Sweden": "Stockholm",
    "Finland": "Helsinki", "Denmark": "Copenhagen", "Ireland": "Dublin", "Hungary": "Budapest", "Japan": "Tokyo",
    "China": "Beijing", "India": "New Delhi", "Egypt": "Cairo", "Kenya": "Nairobi", "Canada": "Ottawa",
    "Mexico": "Mexico City", "Brazil": "Brasilia", "Peru": "Lima", "Cuba": "Havana", "Russia": "Moscow",
    "Turkey": "Ankara", "Iceland": "Reykjavik", "Belgium": "Brussels", "Ghana": "Accra", "Chile": "Santiago",
}  # fmt: skip

SOUNDS: Final[dict[str, str]] = {
    "dog": "woof", "cat": "meow", "cow": "moo", "sheep": "baa", "duck": "quack", "pig": "oink",
    "rooster": "cock-a-doodle-doo",
    "lion": "roar", "bee": "buzz", "owl": "hoot", "frog": "ribbit", "mouse": "squeak", "snake": "hiss",
    "horse": "neigh", "wolf": "howl", "crow": "caw", "bird": "tweet", "donkey": "hee-haw", "turkey": "gobble",
}  # fmt: skip

YOUNG: Final[dict[str, str]] = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "sheep": "lamb", "duck": "duckling", "pig": "piglet",
    "horse": "foal", "bear": "cub", "lion": "cub", "frog": "tadpole", "hen": "chick", "goat": "kid", "deer": "fawn",
    "swan": "cygnet", "kangaroo": "joey", "owl": "owlet", "fox": "cub", "goose": "gosling",
}  # fmt: skip

LEGS: Final[dict[str, int]] = {
    "dog": 4, "cat": 4, "spider": 8, "bird": 2, "ant": 6, "snake": 0, "horse": 4, "bee": 6, "duck": 2, "frog": 4,
    "fish": 0, "hen": 2, "octopus": 0, "beetle": 6, "crab": 10, "owl": 2, "cow": 4, "person": 2,
}  # fmt: skip

OPPOSITES: Final[dict[str, str]] = {
    "hot": "cold", "big": "small", "up": "down", "day": "night", "fast": "slow", "happy": "sad", "light": "dark",
    "open": "closed", "young": "old", "wet": "dry", "left": "right", "full": "empty", "high": "low",
    "hard": "soft", "loud": "quiet", "early": "late", "near": "far", "long": "short", "thick": "thin", "new": "old",
    "strong": "weak", "sweet": "sour", "clean": "dirty", "rich": "poor", "good": "bad", "first": "last",
}  # fmt: skip

SIDES: Final[dict[str, int]] = {
    "triangle": 3, "square": 4, "rectangle": 4, "pentagon": 5, "hexagon": 6, "octagon": 8,
}  # fmt: skip

HOMES: Final[dict[str, str]] = {
    "bee": "a hive", "bird": "a nest", "dog": "a kennel", "fox": "a den", "spider": "a web", "horse": "a stable",
    "rabbit": "a burrow", "fish": "the water", "bear": "a cave", "ant": "an anthill", "whale": "the sea",
    "squirrel": "a tree", "hen": "a coop", "king": "a castle", "cow": "a barn",
}  # fmt: skip

DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS: Final = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
SEASONS: Final[dict[str, str]] = {
    "spring": "flowers open and birds sing", "summer": "the days are long and warm",
    "autumn": "the leaves turn red and fall", "winter": "it is cold and snow may fall",
}  # fmt: skip

NAMES: Final = (
    "Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Grace", "Hugo", "Iris", "Jack", "Kim", "Leo", "Mia", "Noah", "Olga",
    "Paul", "Quinn", "Rosa", "Sam", "Tina", "Uma", "Vera", "Will", "Xena", "Yuri", "Zoe", "Anna", "Tom", "Lucy", "Max",
)  # fmt: skip
WORDS: Final = (
    "cat", "dog", "sun", "tree", "house", "apple", "river", "cloud", "stone", "bread", "moon", "star", "fish", "book",
    "garden", "window", "flower", "bird", "night", "water", "orange", "yellow", "castle", "dragon", "kite", "boat",
)  # fmt: skip

# What the world does not hold: the model says so.
UNKNOWN: Final = (
    "Who won the football match yesterday?", "What is the price of gold today?", "Who is the president?",
    "What will the weather be tomorrow?", "What is quantum physics?", "How do I fix my car?",
    "What is the meaning of life?", "Who wrote Hamlet?", "What is the stock market?", "How do I cook lasagna?",
    "What time is it?", "How tall is the highest mountain?", "What is the speed of light?", "Who invented the radio?",
    "Can you write code?", "What is my password?", "Where did I put my keys?", "What is the news today?",
    "How old is the universe?", "Explain the theory of relativity.", "Translate this into Latin.",
    "What is the population of the earth?", "Who painted the Mona Lisa?", "What is a black hole?",
    "What are the lottery numbers?", "How far away is Mars?", "What is the best phone?", "Who is my neighbour?",
)  # fmt: skip
SYLLABLES: Final = ("zo", "bra", "lu", "mi", "kra", "to", "ve", "qui", "nor", "dal", "pa", "shu", "gre", "fi", "wob")
