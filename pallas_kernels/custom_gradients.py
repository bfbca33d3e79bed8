"""`jax.custom_vjp` with static leading arguments, as a decorator that keeps the function's type."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

Result = TypeVar("Result")


def custom_vjp(num_static: int) -> Callable[[Callable[..., Result]], jax.custom_vjp[Result]]:
    """Returns a decorator that makes a function's gradient custom; its first num_static arguments are static."""

    def decorate(function: Callable[..., Result]) -> jax.custom_vjp[Result]:
        decorated: Any = jax.custom_vjp(function, nondiff_argnums=tuple(range(num_static)))
        return decorated

    return decorate
