"""Reinforcement learning with the loop of tinker-cookbook as it is: stories are to have a word in them.

    pip install tinker-cookbook gguf
    TINKER_API_KEY=tml-KEY TINKER_BASE_URL=http://127.0.0.1:8000 python -m demo.tuning.cookbook --log DIR

for a server of `ktserve serve demo/model --fine-tuning --data-dir DIR --served-model-name NAME`, where NAME is one of
those that the cookbook knows (`--model`). A round has `--groups` groups of `--answers` answers; the reward of an
answer is 1 or 0. Prints the mean reward of each round; with `--plot` as a drawing, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chz
from tinker_cookbook import renderers, tokenizer_utils
from tinker_cookbook.rl import train
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder
from transformers import AutoTokenizer

from demo.paths import demo_model
from demo.tuning.policy import ASKED, WORD
from ktserve.plot import Line, plot

_RENDERER = "qwen3_instruct"  # renders as the demo model's template does
_TOKENS = 24  # of an answer, at most
_REWARD = "env/all/reward/total"


class Story(ProblemEnv):  # type: ignore[misc]
    def get_question(self) -> str:
        return ASKED

    def check_answer(self, sample_str: str) -> bool:
        return WORD in sample_str

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return WORD


class Stories(RLDataset):  # type: ignore[misc]
    def __init__(self, rounds: int, groups: int, answers: int) -> None:
        self._rounds, self._groups, self._answers = rounds, groups, answers

    def __len__(self) -> int:
        return self._rounds

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return [ProblemGroupBuilder(_story, self._answers, "stories") for _ in range(self._groups)]


def _story() -> Story:
    return Story(renderers.get_renderer(_RENDERER, _tokenizer()), format_coef=0.0)


def _tokenizer() -> Any:
    path = demo_model()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@chz.chz
class StoriesBuilder(RLDatasetBuilder):  # type: ignore[misc]
    rounds: int
    groups: int
    answers: int

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        return Stories(self.rounds, self.groups, self.answers), None


def rewards(log: Path) -> list[float]:
    """Of each round that the cookbook wrote down."""
    lines = (json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines())
    return [line[_REWARD] for line in lines if _REWARD in line]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-30B-A3B", help="name of the served demo model")
    parser.add_argument("--log", type=Path, required=True, help="a folder that is not there yet")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--answers", type=int, default=16, help="of a group")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--plot", type=Path, help="an SVG of the rewards")
    args = parser.parse_args(argv)
    tokenizer_utils.register_tokenizer(args.model, _tokenizer)
    config = train.Config(
        model_name=args.model, recipe_name="stories", renderer_name=_RENDERER, log_path=str(args.log),
        dataset_builder=StoriesBuilder(rounds=args.rounds, groups=args.groups, answers=args.answers),
        learning_rate=args.rate, max_tokens=_TOKENS, lora_rank=8, eval_every=0, save_every=0,
    )  # fmt: skip
    asyncio.run(train.main(config))
    found = rewards(args.log)
    print("\n".join(f"round {number}: mean reward {reward:.2f}" for number, reward in enumerate(found)))
    if args.plot is not None:
        drawn = plot([Line("", list(enumerate(found)))], title="Mean reward by round", x="round", y="reward")
        args.plot.write_text(drawn)


if __name__ == "__main__":
    main()
