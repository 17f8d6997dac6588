"""What reads files of others, each as a function of a folder, and the good folders that mutations begin with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import AddedToken

from api.text.bytelevel import byte_level_tokenizer, byte_of_char
from api.text.tokenizer import Tokenizer, load_tokenizer
from demo.paths import demo_adapters, demo_model
from engine.config import EngineConfig
from engine.errors import UserError
from engine.files.gguf.file import GGUFArray, open_gguf
from engine.lora.files.parse import parse_adapter
from engine.planning.plan import plan_engine
from engine.weights.open import open_model
from testing.fuzz.mutate import Files
from testing.models.gguf_writer import save_gguf
from testing.models.tiny import save_hf, tiny_model

REFUSALS = ("UserError", "ModelFileError", "AdapterError", "TemplateError", "MemoryPlanError", "RulesError")
_SAMPLES = Path(__file__).parents[2] / "tests/data/samples"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ġw", "o")]
_TEMPLATES = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{%- macro show(m, n=1) %}{{ m.content | trim }}{{ '<|im_end|>' * n }}{%- endmacro %}"
    "{%- set ns = namespace(last=messages|length - 1) %}{%- for i in range(10) %}{{ show(messages[-1], i) }}"
    "{%- if i > 3 %}{% break %}{%- endif %}{%- endfor %}{{ messages | tojson(indent=2) }}{{ 2 ** 10 }}",
)
_MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "<think>x</think> y"}]


@dataclass(frozen=True)
class Reader:
    """`read` may raise UserError for any content and nothing else. `limited`: the server runs it under limits of time
    and memory, so that reaching them is an end as well."""

    name: str
    seeds: Callable[[], list[Files]]
    read: Callable[[Path], object]
    limited: bool = False


def _content(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def _vocabulary() -> list[str]:
    return [*_SPECIAL, *byte_of_char(), *("".join(merge) for merge in _MERGES)]


def _gguf_seeds() -> list[Files]:
    seeds = []
    for family, kind in (("qwen3_moe", "Q8_0"), ("qwen2_moe", "F32"), ("mixtral", "Q8_0"), ("qwen3_moe", "Q4_K")):
        tokens, size = _vocabulary(), 256 if kind == "Q4_K" else 32
        metadata = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
            "tokenizer.ggml.merges": [" ".join(merge) for merge in _MERGES],
            "tokenizer.chat_template": _TEMPLATES[0],
        }
        with TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            model = tiny_model(
                family=family, hidden_size=size, moe_intermediate_size=size, num_experts=2, vocab_size=len(tokens)
            )
            save_gguf(model, path, metadata=metadata, expert_type=kind)
            seeds.append({path.name: path.read_bytes()})
    return seeds


def _safetensors_seeds() -> list[Files]:
    seeds = []
    for family, options in (
        ("qwen3_moe", {}),
        ("qwen3_moe", {"fused": True}),
        ("qwen3_moe", {"sharded": True}),
        ("mixtral", {}),
    ):
        with TemporaryDirectory() as folder:
            model = tiny_model(0, family=family, hidden_size=32, moe_intermediate_size=32, num_experts=2)
            save_hf(model, Path(folder), **options)
            seeds.append(_content(Path(folder)))
    return seeds


def _tokenizer_seeds() -> list[Files]:
    added = [AddedToken(token, special=True, normalized=False) for token in _SPECIAL]
    backend = byte_level_tokenizer(_vocabulary(), _MERGES, added)
    config = {
        "chat_template": _TEMPLATES[0],
        "eos_token": "<|im_end|>",
        "pad_token": {"content": "<|endoftext|>"},
        "added_tokens_decoder": {str(len(_vocabulary())): {"content": "<tool>", "special": False, "lstrip": True}},
    }
    merges = "#version: 0.2\n" + "\n".join(" ".join(merge) for merge in _MERGES)
    common = {"tokenizer_config.json": json.dumps(config).encode()}
    return [
        {**common, "tokenizer.json": backend.to_str().encode()},
        {**common, "vocab.json": json.dumps({t: i for i, t in enumerate(_vocabulary())}).encode(),
         "merges.txt": merges.encode()},
    ]  # fmt: skip


def _template_seeds() -> list[Files]:
    return [{"chat_template.jinja": template.encode()} for template in _TEMPLATES]


def _adapter_seeds() -> list[Files]:
    folders = [*demo_adapters().values(), _SAMPLES / "kt_fused_all", _SAMPLES / "kt_peft_perexpert"]
    return [_content(folder) for folder in folders]


def _read_gguf(folder: Path) -> None:
    path = folder / "model.gguf"
    for value in open_gguf(path).metadata.values():
        if isinstance(value, GGUFArray):
            list(value)
    _read_model(path)
    load_tokenizer(path)


def _read_model(path: Path) -> None:
    """All that a server's start reads: the plan, then every weight."""
    source = plan_engine(EngineConfig(model=str(path), kv_cache_tokens=256, device="cpu", rules="reference")).source
    for name in source.names():
        source.tensor(name).dequantise()
    for layer in source.config.sparse_layers:
        for projection, _ in source.experts(layer).projections():
            source.experts(layer).expert(projection, source.config.num_experts - 1).dequantise()


def _read_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokens = tokenizer.encode("hello wörld <|im_start|> 123", add_special_tokens=True)
    tokenizer.decode(tokens, skip_special_tokens=False)
    tokenizer.least_tokens("hello")


def _load_template(folder: Path) -> Tokenizer:
    return load_tokenizer(demo_model(), None, folder / "chat_template.jinja")


def _render_template(folder: Path) -> None:
    tokenizer = _load_template(folder)
    tokenizer.encode_rendered(tokenizer.render(_MESSAGES, trust_control_tokens=False, variables={}))


def _parse_adapter(folder: Path) -> None:
    """For the base that it may be of."""
    try:
        parse_adapter(folder, open_model(str(demo_model())).config, name="x")
    except UserError:
        parse_adapter(folder, open_model(str(_SAMPLES / "base-model")).config, name="x")


READERS = (
    Reader("GGUF", _gguf_seeds, _read_gguf),
    Reader("safetensors", _safetensors_seeds, _read_model),
    Reader("tokenizer", _tokenizer_seeds, _read_tokenizer),
    Reader("chat template", _template_seeds, _load_template),
    Reader("rendered template", _template_seeds, _render_template, limited=True),
    Reader("adapter", _adapter_seeds, _parse_adapter),
)
