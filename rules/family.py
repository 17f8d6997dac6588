"""How a model family's module classes are named: what the classes in a rules file are checked and matched against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

KINDS = ("model", "layer", "attention", "moe_block", "experts", "mlp", "norm", "rope", "router", "linear", "embedding")
ANY_CLASS = "Module"
_TORCH = "torch.nn"
# Classes of torch's own that any model has. KTransformers' experts are a ModuleList.
_TORCH_CLASSES = {"Linear": "linear", "Embedding": "embedding"}
_EXPERTS_AS_LIST = "ModuleList"


@dataclass(frozen=True)
class Family:
    """`classes` maps a module class to its kind (one of KINDS), by its last word; `packages` are where rules may say
    that it lies. `aliases` map other names, with or without a package, to one of the classes. `operators` are
    KTransformers' classes for this family alone, and the kind that each replaces. `stored_name`: what the family's
    files and KTransformers call a module."""

    classes: Mapping[str, str]
    packages: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    operators: Mapping[str, str] = field(default_factory=dict)
    stored_name: Callable[[str], str] = str

    def kind(self, module_class: str) -> str:
        """The kind of a canonical class."""
        return _TORCH_CLASSES.get(module_class) or self.classes[module_class]

    @property
    def has_routers(self) -> bool:
        """Whether routers have a class of their own, which is no projection's."""
        return "router" in self.classes.values()

    def class_of(self, kind: str) -> str:
        """The canonical class of a kind."""
        return next(name for name, held in (*_TORCH_CLASSES.items(), *self.classes.items()) if held == kind)

    def canonical(self, path: str) -> str | None:
        """The canonical name of a class given by path or by its last word; None if the model has no such class."""
        if path in self.aliases:
            return self.aliases[path]
        package, _, word = path.rpartition(".")
        if package not in ("", _TORCH, *self.packages):
            return None
        word = self.class_of("experts") if word == _EXPERTS_AS_LIST else self.aliases.get(word, word)
        return word if word in self.classes or word in _TORCH_CLASSES or word == ANY_CLASS else None

    @property
    def matchable(self) -> list[str]:
        """What a rule may match, for messages."""
        return [*(f"{_TORCH}.{name}" for name in (*_TORCH_CLASSES, _EXPERTS_AS_LIST)), *self.classes]


def named_after(prefix: str) -> dict[str, str]:
    """The classes of a family of transformers that begin with its name."""
    kinds = {
        "Model": "model",
        "DecoderLayer": "layer",
        "Attention": "attention",
        "SparseMoeBlock": "moe_block",
        "Experts": "experts",
        "MLP": "mlp",
        "RMSNorm": "norm",
        "RotaryEmbedding": "rope",
    }
    return {f"{prefix}{word}": kind for word, kind in kinds.items()}
