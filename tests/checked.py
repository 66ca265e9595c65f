"""Types of arguments and results are checked at every call of the package's functions, shapes wherever they are named.

jaxtyping's import hook opens a scope for the names of dimensions around every function and checks its arguments twice,
which in the codecs takes fifteen times what the function takes. Where no annotation has a shape there is nothing to put
into that scope: such a function is given to beartype alone, which makes the same checks and raises the same error.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, ForwardRef, Literal, get_args, get_origin

import jaxtyping
from beartype import BeartypeConf, beartype

_scoped = jaxtyping.jaxtyped
_plain = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))


def jaxtyped(thing: Any = None, *, typechecker: Callable) -> Any:
    """What the hook calls on every function, and on every class for the `__init__` that a dataclass makes."""
    if thing is None:
        return lambda each: jaxtyped(each, typechecker=typechecker)
    if inspect.isclass(thing):
        if dataclasses.is_dataclass(thing) and not hasattr(thing.__init__, "__wrapped__"):
            thing.__init__ = jaxtyped(thing.__init__, typechecker=typechecker)
        return thing
    # The yields of a generator are not looked at by the hook, so they are not here.
    if inspect.isgeneratorfunction(thing) or any(map(needs_a_scope, thing.__annotations__.values())):
        return _scoped(thing, typechecker=typechecker)
    return _plain(thing)


def needs_a_scope(annotation: Any) -> bool:
    """Whether a shape is in it, or a name that stands for what may have one."""
    if isinstance(annotation, str | ForwardRef):
        return True
    if get_origin(annotation) is Literal:  # its strings are values
        return False
    if inspect.isclass(annotation) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    parts = annotation if isinstance(annotation, list) else get_args(annotation)  # a list: arguments of a Callable
    return any(map(needs_a_scope, parts))


jaxtyping.jaxtyped = jaxtyped  # the hook looks it up in every module that it instruments
