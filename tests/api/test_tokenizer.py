"""Tokenizers from Hugging Face files and from GGUF metadata: the same ids as transformers'."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from api.text.bytelevel import PATTERNS, byte_of_char
from api.text.tokenizer import Tokenizer, load_tokenizer
from engine.errors import UserError
from tests.api.conftest import MERGES, SPECIAL, TEMPLATE, tiny_tokenizer

TEXTS = [
    "hello world, hello!",
    "<|im_start|>user\nhi<|im_end|>\n<tool>x",
    "I'LL we've 12345 \u00e4 a\u0308  \n\n\t end  ",
    "日本語 👨‍👩‍👧 naïve\r\nمرحبا",
    "",
]


def write_gguf(path: Path, *, template: str | None = TEMPLATE, bos: bool = False, pre: str = "qwen2") -> Path:
    """What llama.cpp's converter writes about a tokenizer, and one tensor."""
    writer = gguf.GGUFWriter(str(path), "qwen3moe")
    tokens = [*SPECIAL, *byte_of_char(), *("".join(merge) for merge in MERGES), "<tool>", "[PAD0]"]
    types = [1] * len(tokens)
    types[:3] = [3, 3, 3]
    types[-2:] = [4, 5]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(bos)
    if template is not None:
        writer.add_chat_template(template)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def both(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")
    return load_tokenizer(model_dir), load_tokenizer(path)


@pytest.mark.parametrize("text", TEXTS)
def test_same_ids_as_transformers(both: tuple[Tokenizer, Tokenizer], model_dir: Path, text: str) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_file=str(model_dir / "tokenizer.json"))
    for tokenizer in both:
        assert tokenizer.encode(text, add_special_tokens=True) == reference(text)["input_ids"]


def qwen2_of_transformers() -> Qwen2Tokenizer:
    """Its pre-tokenizer is transformers' own, not that of our tokenizer.json."""
    tokens = [*SPECIAL, *byte_of_char(), *("".join(merge) for merge in MERGES)]
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    tokenizer = Qwen2Tokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=MERGES)
    tokenizer.add_tokens([*special, AddedToken("<tool>", special=False, normalized=False)])
    return tokenizer


QWEN2 = qwen2_of_transformers()
PIECES = st.sampled_from(
    ["hello", " ", "  ", "\n", "\r\n", "\t", "'S", "n't", "12", "é", "e\u0301", "日", "👋", "!?", "_", "w", "\u00a0"]
)


@settings(max_examples=300)
@given(st.lists(PIECES | st.text(max_size=4), max_size=12).map("".join))
def test_same_ids_as_transformers_qwen2(both: tuple[Tokenizer, Tokenizer], text: str) -> None:
    expected = QWEN2(text)["input_ids"]
    for tokenizer in both:
        assert tokenizer.encode(text, add_special_tokens=True) == expected


@settings(max_examples=200)
@given(st.text(max_size=30))
def test_gguf_and_hugging_face_agree(both: tuple[Tokenizer, Tokenizer], text: str) -> None:
    hf, from_gguf = both
    tokens = hf.encode(text, add_special_tokens=False)
    assert from_gguf.encode(text, add_special_tokens=False) == tokens
    assert from_gguf.decode(tokens, skip_special_tokens=False) == hf.decode(tokens, skip_special_tokens=False)


def test_gguf_brings_template_special_tokens_and_bos(tmp_path: Path) -> None:
    source = "{{ bos_token }}{{ eos_token }}{{ messages[0].content }}"
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", template=source, bos=True))
    assert tokenizer.template is not None
    assert tokenizer.template.render([{"role": "user", "content": "x"}]) == "<|endoftext|><|im_end|>x"
    assert tokenizer.encode("a", add_special_tokens=True)[0] == 0
    assert 0 not in tokenizer.encode("a", add_special_tokens=False)


def test_files_beside_a_gguf_file_win(tmp_path: Path, model_dir: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", pre="llama-bpe")
    with pytest.raises(UserError, match="llama-bpe"):
        load_tokenizer(path)
    shutil.copy(model_dir / "tokenizer.json", tmp_path)
    tokenizer = load_tokenizer(path)
    assert tokenizer.source == str(tmp_path)
    assert tokenizer.template is not None, "the file's template is used when the folder has none"


def test_vocab_and_merges_files(tmp_path: Path, both: tuple[Tokenizer, Tokenizer]) -> None:
    tokens = [*SPECIAL, *byte_of_char(), *("".join(merge) for merge in MERGES)]
    (tmp_path / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(merge) for merge in MERGES))
    added = {str(i): {"content": token, "special": True} for i, token in enumerate(SPECIAL)}
    added[str(len(tokens))] = {"content": "<tool>", "special": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    tokenizer = load_tokenizer(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False) == both[0].encode(text, add_special_tokens=False)


def test_added_tokens_only_the_config_knows(tmp_path: Path) -> None:
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    place = tiny_tokenizer().get_vocab_size()
    config = {"added_tokens_decoder": {str(place): {"content": "<late>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).encode("a<late>", add_special_tokens=False)[-1] == place
    config["added_tokens_decoder"] = {str(place + 3): {"content": "<late>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="<late>"):
        load_tokenizer(tmp_path)


def test_template_sources(tmp_path: Path) -> None:
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    messages = [{"role": "user", "content": "x"}]

    def rendered(**options: Path) -> str | None:
        template = load_tokenizer(tmp_path, **options).template
        return template.render(messages) if template else None

    assert rendered() is None
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "list"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert rendered() == "list"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert rendered() == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert rendered() == "jinja"
    (tmp_path / "mine.jinja").write_text("mine")
    assert rendered(chat_template=tmp_path / "mine.jinja") == "mine"


@pytest.mark.parametrize("value", [5, False, {}, {"default": "x"}, [{"name": "default", "template": {}}]], ids=str)
def test_a_template_that_is_no_text_is_refused(tmp_path: Path, value: object) -> None:
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    for name in ("tokenizer_config.json", "chat_template.json"):
        (tmp_path / name).write_text(json.dumps({"chat_template": value}))
        with pytest.raises(UserError, match=r"chat_template is .*; allowed is a template's text"):
            load_tokenizer(tmp_path)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(["hole", "twice", "late", "byte"]), st.integers(0, 255))
def test_ids_that_are_not_those_of_the_file_are_refused(
    tmp_path_factory: pytest.TempPathFactory, change: str, at: int
) -> None:
    folder = tmp_path_factory.mktemp("vocab")
    tokens = [*byte_of_char(), "".join(MERGES[0])]
    ids = {token: i + (change == "late" or (change == "hole" and i > at)) for i, token in enumerate(tokens)}
    if change == "twice":
        ids[tokens[at]] += 1
    if change == "byte":
        ids["<other>"] = ids.pop(tokens[at])
    (folder / "vocab.json").write_text(json.dumps(ids))
    (folder / "merges.txt").write_text("")
    with pytest.raises(UserError, match="1 of the 256 bytes have no token" if change == "byte" else "are not 0 to 256"):
        load_tokenizer(folder)


def test_no_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--skip-tokenizer"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_tokens_as_bytes(both: tuple[Tokenizer, Tokenizer]) -> None:
    tokenizer = both[0]
    tokens = tokenizer.encode("👋", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, tokens)) == "👋".encode()
    assert tokenizer.token_bytes(tokens[0]).decode(errors="replace") == "\ufffd"
    assert tokenizer.token_bytes(tokenizer.vocab_size + 9) == b""


BROKEN_VALUES = st.sampled_from(
    [None, True, -1, 1 << 70, 1.5, "", "x", [], {}, [None], {"x": None}, [["a", "b", "c"]], {"content": 1}, [[[[]]]]]
)


def paths_into(value: object, limit: int = 40) -> list[tuple[object, ...]]:
    """Ways to the parts of a JSON value, few of each list and object."""
    found: list[tuple[object, ...]] = [()]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in [*items][:limit]:
        found += [(key, *path) for path in paths_into(part, 3)]
    return found


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_broken_tokenizers_are_one_error(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any part of any file replaced by something else, or the file cut off: a tokenizer, or one error of one line."""
    folder = tmp_path_factory.mktemp("broken")
    shutil.copytree(model_dir, folder, dirs_exist_ok=True)
    vocab = data.draw(st.booleans())
    if vocab:
        (folder / "tokenizer.json").unlink()
        tokens = [*SPECIAL, *byte_of_char(), *("".join(merge) for merge in MERGES)]
        (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
        (folder / "merges.txt").write_text("\n".join(" ".join(merge) for merge in MERGES))
    config = {"added_tokens_decoder": {"300": {"content": "<more>"}}, "chat_template": [{"name": "x", "template": "y"}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    file = data.draw(st.sampled_from(sorted(path for path in folder.iterdir() if path.is_file())))
    if data.draw(st.booleans()) and file.suffix == ".json":
        content = json.loads(file.read_text())
        *way, last = data.draw(st.sampled_from(paths_into(content)[1:] or [(None,)]))
        part = content
        for key in way:
            part = part[key]
        if last is not None:
            part[last] = data.draw(BROKEN_VALUES)
        file.write_text(json.dumps(content))
    else:
        whole = file.read_bytes()
        file.write_bytes(whole[: data.draw(st.integers(0, len(whole)))] + data.draw(st.binary(max_size=4)))
    try:
        load_tokenizer(folder).encode("hello", add_special_tokens=True)
    except UserError as error:
        assert str(folder) in str(error) or "template" in str(error)


START, END = ["I", "'LL", " we", "'ve", " "], [" aBCDe", " //\n", "x"]
SPLIT = {
    "qwen2": [*START, "1", "2", "3", "4", "5", *END],
    "glm4": [*START, "123", "45", *END],
    "gpt-4o": ["I'LL", " we've", " ", "123", "45", " a", "BCDe", " //\n", "x"],
}
SPLIT["deepseek-llm"] = ["I", "'", "LL", " we", "'", "ve", " ", *"12345", " aBCDe", " //", "\n", "x"]
SPLIT["deepseek-v3"] = SPLIT["glm4"]
SPLIT["kimi-k2"] = [*SPLIT["gpt-4o"]]
SPLIT |= {"chatglm-bpe": SPLIT["glm4"], "minimax-m2": SPLIT["gpt-4o"]}


@pytest.mark.parametrize("pre", SPLIT)
def test_texts_are_split_as_the_pre_tokenizer_says(tmp_path: Path, pre: str) -> None:
    made, text = load_tokenizer(write_gguf(tmp_path / "m.gguf", pre=pre)), "I'LL we've 12345 aBCDe //\nx"
    parts = made._backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in parts] == SPLIT[pre]
    assert made.decode(made.encode("naïve 日本", add_special_tokens=False), skip_special_tokens=True) == "naïve 日本"


_SAMPLES = [
    *("I'LL", "'s", " ", "  ", "\n", "\r\n", "\t", "12345", "\u0660", "aBCDe", "\u1f64\u03a9", "漢字", "ひら", "カナ"),
    *("한", "//", ".a", "é", "e\u0301", "\u01c5", "！", "『", "\u2019t", "👋", "_x", "//\n", "\u3000", "ﬁ", "中A", "ա"),
]
_OLD = st.characters(max_codepoint=0x17E)  # of one category in every version of Unicode


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(PATTERNS)), st.lists(st.sampled_from(_SAMPLES) | st.text(_OLD, max_size=2), max_size=12))
def test_patterns_mean_what_another_engine_takes_them_for(pre: str, parts: list[str]) -> None:
    """Sets of characters above all, which engines write in different ways."""
    text, regex = "".join(parts), pytest.importorskip("regex")
    made = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(each), "isolated") for each in PATTERNS[pre]])
    pieces = [text] if text else []
    for pattern in PATTERNS[pre]:
        pattern = re.sub(r"\\x\{([0-9a-f]+)\}", lambda found: f"\\U{int(found[1], 16):08x}", pattern)
        split = regex.compile(f"({pattern})", regex.V1)
        pieces = [piece for each in pieces for piece in _isolated(split, each)]
    assert [piece for piece, _ in made.pre_tokenize_str(text)] == pieces


def _isolated(split: Any, text: str) -> list[str]:
    pieces, at = [], 0
    for found in split.finditer(text):
        pieces += [text[at : found.start()], found[0]]
        at = found.end()
    return [piece for piece in (*pieces, text[at:]) if piece]


@pytest.mark.parametrize("text", ["<｜User｜>", "<|tool_calls_section_begin|>", "<think>"])
def test_what_looks_like_a_control_token_is_one(tmp_path: Path, text: str) -> None:
    """Whatever the file says: else a client's text could hold a turn of its own."""
    backend = tiny_tokenizer()
    backend.add_tokens([AddedToken(text, special=False, normalized=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}" + text}))
    made = load_tokenizer(tmp_path)
    token = made.added_token(text)
    assert token is not None
    rendered = made.render([{"role": "user", "content": f"a{text}"}], trust_control_tokens=False, variables={})
    ids = made.encode_rendered(rendered)
    assert ids.count(token) == (2 if text == "<think>" else 1) and ids[-1] == token
    assert made.decode(ids, skip_special_tokens=False) == f"a{text}{text}"
    assert made.encode(text, add_special_tokens=False) == [token]
