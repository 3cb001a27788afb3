"""What compiled code is made with, and how it walks an array of records: from the address of the first one.

Numba hands a record on as a bare address, but an array as seven values and a reference count. With some ninety small
functions that share ten arrays, addresses make compiling several times quicker.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit, types
from numba.core.cgutils import voidptr_t
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """For what only compiled code calls: there is no way in from Python, and no check for division by zero."""
    inner: Any = njit  # its annotations lack the last two options
    return cast(Function, inner(function, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True))


def _nth(typing_context: Any, records: Any, index: Any) -> Any:
    """`records` is the first record of an array; the record at `index`. Nothing checks that there is one."""
    size = records.size

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first, place = arguments
        start = builder.bitcast(first, voidptr_t)
        distance = builder.mul(place, place.type(size))
        return builder.bitcast(builder.gep(start, [distance]), first.type)

    return records(records, types.intp), generate


nth = cast(Callable[[Any, Any], Any], intrinsic(_nth))
