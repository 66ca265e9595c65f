"""The settings of multiple choice: which questions, and how many of them each client holds."""

from dataclasses import dataclass
from typing import Literal

from nestling.config.checks import is_count, is_one_of, is_text
from nestling.core.errors import ConfigError

QUESTION_SETS = ("wordnet", "mmlu", "mmlu-dev")
DOMAINS = 5
"""Every set comes in five subject areas, one for each client."""


@dataclass(frozen=True)
class ChoicesConfig:
    """Questions with four options: each of five clients has a subject area of its own."""

    kind: Literal["choices"] = "choices"
    data: Literal["wordnet", "mmlu", "mmlu-dev"] = "wordnet"
    """wordnet: which word a definition is of. mmlu: MMLU, from the hub. mmlu-dev: its 281 development questions."""
    path: str = ""
    """wordnet: data.noun, or its folder; mmlu: a folder with test-*.parquet or *.jsonl; empty: the usual places."""
    train_items: int = 2000
    """Training questions of each client, at most: a client that has fewer trains on those."""
    test_items: int = 200
    """Held-out questions of each client, at most, on which the last state is judged."""
    round_items: int = 40
    """The first of them, on which the state is judged after each round."""

    def __post_init__(self) -> None:
        is_one_of("task.data", self.data, QUESTION_SETS)
        is_text("task.path", self.path)
        is_count("task.train_items", self.train_items, 1)
        is_count("task.test_items", self.test_items, 1)
        is_count("task.round_items", self.round_items, 1)
        if self.round_items > self.test_items:
            raise ConfigError(
                f"{self.round_items} of {self.test_items} held-out questions",
                where="task.round_items",
                remedy="Give no more than task.test_items.",
            )
        if self.path and self.data == "mmlu-dev":
            raise ConfigError(
                f"{self.path!r} does not go with data = 'mmlu-dev', which comes by 'nestling fetch'",
                where="task.path",
                remedy="Leave it empty.",
            )

    @property
    def clients(self) -> int:
        """One for each subject area."""
        return DOMAINS
