"""A byte-level BPE tokenizer in the Qwen style, and its chat template.

Every digit is a token of its own (the pre-tokenizer splits numbers), which is what lets small arithmetic generalise.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from demo.texts import tools
from demo.texts.dialogue import SYSTEM_PROMPTS, conversation, document
from demo.texts.style import STYLES
from demo.texts.world import Message

VOCAB_SIZE: Final = 2048
END_OF_TEXT, IM_START, IM_END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# The published pre-tokenizer pattern of the Qwen2 family ("qwen2" in GGUF).
PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEMPLATE: Final = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n\\n' }}{%- endif %}
    {{- HEAD }}
    {%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}
    {{- TAIL + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message['content'] + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role: ' + message['role']) }}
    {%- elif not (tools and loop.first and message['role'] == 'system') %}
        {{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}
        {%- for call in message['tool_calls'] or [] %}
            {%- if not loop.first or message['content'] %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": ' + (call['function']['name'] | tojson) + ', "arguments": ' }}
            {%- set arguments = call['function']['arguments'] %}
            {{- arguments if arguments is string else arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
CHAT_TEMPLATE: Final = (
    "".join(line.strip() for line in _TEMPLATE.splitlines())
    .replace("HEAD", repr(tools.HEAD))
    .replace("TAIL", repr(tools.TAIL))
)


def render(messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
    """What CHAT_TEMPLATE renders, without jinja."""
    text = "".join(f"{IM_START}{m['role']}\n{m['content']}{IM_END}\n" for m in messages)
    return text + f"{IM_START}assistant\n" if add_generation_prompt else text


def _texts(seed: int, count: int) -> Iterator[str]:
    rng = random.Random(seed)
    yield from SYSTEM_PROMPTS
    for i in range(count):
        yield document(rng)
        for message in conversation(rng, tuple(STYLES)[i % len(STYLES)])[0]:
            yield message["content"]
        if i % 4 == 0:
            for message in tools.case(rng)[0]:
                yield message["content"]
    yield from ("system\n", "user\n", "assistant\n")


def train_tokenizer(seed: int = 0, texts: int = 30000, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Trains on the world's own texts. The special tokens are the last three ids; unused ids below them are padding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, texts), trainer)
    missing = vocab_size - len(SPECIAL) - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"[PAD{i}]" for i in range(missing)])
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the vocabulary must hold."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(f"the tokenizer has no token {token!r}")
    return int(found)
