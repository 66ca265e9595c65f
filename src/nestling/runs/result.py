"""What one run came to: the content of `result.json`, read back as strictly as it was written."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from numbers import Integral, Real
from typing import Any

from nestling.core.errors import WireError
from nestling.runs.files import printable

SCHEMA = 1
_OF_LANGUAGE = ("recalls", "gains", "drops")
_PERSONAL = ("accuracy_personal", "accuracy_personal_global")
_PRIVATE = ("epsilon", "delta", "sampling_rate")
_OF_TEXT = ("chance", "perplexity", "perplexity_base")
_LEFT_OUT = (*_OF_LANGUAGE, *_PERSONAL, *_PRIVATE, *_OF_TEXT, "settings", "riders")  # where there is nothing to say
_RECALL = {
    "client": int, "template": str, "items": int, "exact": int, "chosen": int, "by_depth": dict, "hits": str,
    "choices": str,
}  # fmt: skip
_RIDER = {"rounds", "zero", "small", "echo"}
_NOT_NEGATIVE = (
    "seed", "rounds", "clients", "test_items", "classes", "trainable_parameters", "payload_bytes_up",
    "payload_bytes_down", "bytes_up", "bytes_down", "seconds", "seconds_references",
    "model_parameters", "epsilon", "delta", "perplexity", "perplexity_base",
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What one run came to, as in `result.json`. Accuracies lie in 0 … 1 and are of the last round, on `test_items`.

    The three reference accuracies and `seconds_references` are None if references were skipped; `payload_bytes_*` are
    of one client's message in one round, `bytes_*` of all messages of the run, headers included; chance is 1 / classes,
    or `chance` where a text's bytes, and not items, are counted: the accuracy of always answering with the commonest.
    `perplexity` is exp of the mean loss of such a byte, and `perplexity_base` the frozen base's.
    `model_parameters` counts all weights of the model, so that a table can say how much less is sent; None if unknown.
    `evaluated_on` is "test", or "validation" while settings are being chosen. `settings` is a short digest of all
    settings but seed, name and machine, by which a table knows the seeds of one row; empty where a run wrote none.

    Where clients end with models of their own (FedALA on images), `accuracy_personal` is theirs, each judged by the
    client's own shares of classes, and `accuracy_personal_global` the last state's under the same weights
    (`federation/personal.py`).

    A private run has `epsilon` at `delta`: what all rounds that were ever charged have spent, for adding or removing
    one client. `sampling_rate` is there if each client was drawn in secret, with that probability, and ε counts on it.

    A needle run also has `recalls`: for each row (`federation/recalls.py`) one object a client, with its counts, mean
    loss of an answer token, exact answers by depth, and a 0 or 1 an item in `hits` (exact) and `choices` (of four); and
    `gains`: memory on − memory off, as [mean, low, high], the ends of the 95 % interval over paired items. So has one
    of multiple choice, where `template` is a client's subject area, `chosen` counts right letters among four, and
    `exact` those that are the likeliest of all tokens. `drops` has, for each client and "all", the accuracy of its own
    training − that of the federation's state, as `gains`; empty if no client was trained alone.

    `riders` names clients that look as if they did not train (`federation/riders.py`): of how many `rounds` there is a
    reply, and in how many it was `zero`, `small` or an `echo`. Nobody is named in a private run.
    """

    name: str
    method: str
    adapter: str
    codec: str
    task: str
    seed: int
    rounds: int
    clients: int
    alpha: float | None
    accuracy: float
    accuracy_base: float | None
    accuracy_local_only: float | None
    accuracy_centralised: float | None
    test_items: int
    classes: int
    trainable_parameters: int
    payload_bytes_up: int
    payload_bytes_down: int
    bytes_up: int
    bytes_down: int
    seconds: float
    seconds_references: float | None
    run_dir: str
    averaging_error: float | None
    base_hash: str
    state_digest: str
    model_parameters: int | None = None
    evaluated_on: str = "test"
    rejected: Mapping[str, int] = field(default_factory=dict)
    recalls: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    gains: Mapping[str, list[float]] = field(default_factory=dict)
    drops: Mapping[str, list[float]] = field(default_factory=dict)
    accuracy_personal: float | None = None
    accuracy_personal_global: float | None = None
    settings: str = ""
    epsilon: float | None = None
    delta: float | None = None
    sampling_rate: float | None = None
    riders: Mapping[str, dict[str, int]] = field(default_factory=dict)
    chance: float | None = None
    perplexity: float | None = None
    perplexity_base: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the schema's version; an optional number that is not finite becomes None."""
        values = {"schema": SCHEMA, **plain(asdict(self))}
        return {key: value for key, value in values.items() if value not in (None, {}, "") or key not in _LEFT_OUT}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str = "result.json") -> "Result":
        """Read back what `to_dict` gave. Raises `WireError` on a missing, unknown or bad entry or another schema."""
        if values.get("schema") != SCHEMA:
            cause = f"has schema {printable(repr(values.get('schema')))[:40]}, this version reads {SCHEMA}"
            raise WireError("schema", cause, where=where)
        given: dict[str, Any] = (
            {key: {} for key in (*_OF_LANGUAGE, "riders")}
            | dict.fromkeys(_PERSONAL + _PRIVATE + _OF_TEXT)
            | {"settings": ""}
        )
        given |= {key: value for key, value in values.items() if key != "schema"}
        expected = {f.name: f.type for f in fields(cls)}
        if given.keys() != expected.keys():
            missing, extra = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
            cause = (
                f"has other entries (missing {missing[:3]}, unexpected {[printable(str(key)) for key in extra[:3]]})"
            )
            raise WireError("fields", cause, where=where)
        if (given["epsilon"] is None) != (given["delta"] is None):
            raise WireError("fields", "has only one of epsilon and delta", where=where)
        if given["sampling_rate"] is not None and given["epsilon"] is None:
            raise WireError("fields", "has a sampling_rate and no epsilon", where=where)
        return cls(**{name: _checked(name, given[name], kind, where) for name, kind in expected.items()})


def _checked(name: str, value: Any, kind: Any, where: str) -> Any:
    """`value` if it is of the annotated kind; a whole number passes for a float, a truth value for nothing."""
    if value is None and kind in (float | None, int | None):
        return None
    if kind is str and isinstance(value, str):
        return value
    if kind in (int, int | None) and type(value) is int:
        number: float = value
    elif kind in (float, float | None) and type(value) in (int, float) and math.isfinite(value):
        value = number = float(value)
    elif name in _OF_LANGUAGE and isinstance(value, dict):
        if all(map(is_row if name == "recalls" else _is_gain, value.values())):
            return value
        raise WireError("fields", f"has an unusable value for {name}", where=where)
    elif name in ("rejected", "riders") and isinstance(value, dict):
        if all(map(_is_count if name == "rejected" else _is_rider, value.items())):
            return value
        raise WireError("fields", f"has an unusable value for {name}", where=where)
    else:
        raise WireError("fields", f"has an unusable value for {name}", where=where)
    share = name.startswith("accuracy") or name in ("sampling_rate", "chance")
    if (name in _NOT_NEGATIVE and not 0 <= number < 2**64) or (share and not 0 <= number <= 1):
        raise WireError("fields", f"has {name} = {number}, which cannot be", where=where)
    return value


def is_row(value: Any) -> bool:
    """Whether it is what one row says of each client."""
    return isinstance(value, list) and bool(value) and all(map(_is_recall, value))


def _is_recall(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != _RECALL.keys() | {"loss"}:
        return False
    items, loss = value["items"], value["loss"]
    return (
        all(type(value[key]) is kind for key, kind in _RECALL.items())
        and (loss is None or (type(loss) in (int, float) and math.isfinite(loss)))
        and items > 0
        and all(len(value[key]) == items and set(value[key]) <= set("01") for key in ("hits", "choices"))
        and all(value[n] == value[key].count("1") for n, key in (("exact", "hits"), ("chosen", "choices")))
    )


def _is_count(entry: tuple[str, Any]) -> bool:
    return type(entry[1]) is int and entry[1] >= 0


def _is_rider(entry: tuple[str, Any]) -> bool:
    client, counts = entry
    return (
        client.isdecimal()
        and isinstance(counts, dict)
        and counts.keys() == _RIDER
        and all(type(n) is int and 0 <= n <= counts["rounds"] for n in counts.values())
        and sum(counts.values()) <= 2 * counts["rounds"]
    )


def _is_gain(value: Any) -> bool:
    numbers = isinstance(value, list) and len(value) == 3
    return numbers and all(type(x) in (int, float) and -1 <= x <= 1 for x in value)


def plain(value: Any) -> Any:
    """Numbers of any library as Python's; what is not finite as None."""
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, Sequence):
        return [plain(entry) for entry in value]
    raise TypeError(f"{type(value).__name__} is not a plain value")
