"""What refuses a bad setting, with the setting's name and what to give instead. All raise `ConfigError`."""

from math import inf

from nestling.core.errors import ConfigError, SeedError
from nestling.core.seeds import check_seed


def at_least(where: str, value: int | float, low: int, *, strict: bool = False) -> None:
    """Refuse `value` unless it is finite and ≥ low (> low if `strict`). Written so that NaN fails."""
    good = value < inf and (value > low if strict else value >= low)
    if not good:
        raise ConfigError(
            f"{value!r} is not allowed", where=where, remedy=f"Give {'more than' if strict else 'at least'} {low}."
        )


def is_count(where: str, value: int, low: int, high: int = 2**32 - 1) -> None:
    """Refuse `value` unless it is a whole number in low … high, which no message, loop or tensor outgrows."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{value!r} is not a whole number", where=where, remedy=f"Give an int from {low} on.")
    at_least(where, value, low)
    if value > high:
        raise ConfigError(f"is more than {high:,}", where=where, remedy="Give less.")


def is_seed(where: str, value: int) -> None:
    """Refuse `value` unless it can seed a stream."""
    try:
        check_seed(value)
    except SeedError as error:
        raise ConfigError(error.cause, where=where, remedy=error.remedy) from error


def is_text(where: str, *values: str) -> None:
    """Refuse what cannot be written into `config.toml` or a path: bytes that are no UTF-8, a zero byte, an address.

    Nothing is fetched by its address, and an address may hold a password, which the run's folder would then show.
    """
    for value in values:
        if "://" in value:
            raise ConfigError("is an address", where=where, remedy="Give a path, or a name on the hub.")
        if "\0" in value or value != value.encode("utf-8", "ignore").decode():
            raise ConfigError(f"{value!r} is not allowed", where=where, remedy="Use UTF-8 text without zero bytes.")


def are_patterns(where: str, value: object) -> None:
    """Refuse `value` unless it is a tuple or list of texts."""
    if not isinstance(value, tuple | list) or not all(isinstance(pattern, str) for pattern in value):
        raise ConfigError(f"{value!r} is not a list of patterns", where=where, remedy='Write ("*conv*",).')
    is_text(where, *value)


def is_one_of(where: str, value: object, allowed: tuple[object, ...]) -> None:
    """Refuse `value` unless it is among `allowed`."""
    if value not in allowed:
        raise ConfigError(
            f"{value!r} is not allowed", where=where, remedy=f"Choose one of {', '.join(map(str, allowed))}."
        )
