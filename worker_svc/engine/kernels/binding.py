"""Functions and structs of the C++ sources for ctypes, read from their declarations.

A pointer takes a tensor, a writable array, a ctypes array, an address, or None for null; as an argument also a `byref`.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

STRUCT_SOURCES = ("kernels.h", "forward.cpp")
SCALARS: dict[str, Any] = {
    "int": ctypes.c_int, "int64_t": ctypes.c_int64, "uint32_t": ctypes.c_uint32, "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float, "double": ctypes.c_double, "bool": ctypes.c_bool, "NormKind": ctypes.c_int,
}  # fmt: skip
RESULTS = SCALARS | {"void": None, "const char*": ctypes.c_char_p}
FUNCTION = re.compile(r"(void|int|int64_t|const char\*) (quire_\w+)\(([^)]*)\) *\{")
DECLARATOR = re.compile(r"(\*?) *(\w+)(?:\[(\w+)\])?")  # pointer, name, constant that is the length of an array

_Bytes = ctypes.c_char * 0


def address_of(x: npt.NDArray[Any]) -> int:
    """The address of a writable array. Takes a third of the time of `array.ctypes`."""
    return ctypes.addressof(_Bytes.from_buffer(x.data))


def plain(values: Iterable[Any]) -> list[Any]:
    """The values as ctypes takes them: addresses of tensors and arrays, other values as they are. One call for all
    arguments, because steps of one token are short."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, np.ndarray):
            found.append(ctypes.addressof(_Bytes.from_buffer(value.data)))
        elif isinstance(value, ctypes.Array):
            found.append(ctypes.addressof(value))
        else:
            found.append(value.data_ptr() if hasattr(value, "data_ptr") else value)
    return found


class Struct(ctypes.Structure):
    """A struct of the sources. Fields that are not given are 0. It keeps alive what its fields point to. Raises
    TypeError for a field that it lacks."""

    names: ClassVar[frozenset[str]]

    def __init__(self, **fields: Any) -> None:
        if not fields.keys() <= self.names:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(fields.keys() - self.names)}")
        super().__init__(**dict(zip(fields, plain(fields.values()), strict=True)))
        self.kept = fields

    @classmethod
    def of(cls, *sources: Any, **fields: Any) -> Self:
        """The struct with these fields, and with those of the sources that have the same names."""
        own = {name: getattr(source, name) for source in sources for name in cls.names if hasattr(source, name)}
        return cls(**(own | fields))


def array(structs: Sequence[Struct], kind: type[Struct] | None = None) -> ctypes.Array[Any]:
    """A C array of copies. It keeps alive what they point to. `kind`: their type, if there may be none."""
    copies = ((kind or type(structs[0])) * len(structs))(*structs)
    copies.kept = structs  # type: ignore[attr-defined]
    return copies


@cache
def struct(name: str) -> type[Struct]:
    """The struct `name` of the sources."""
    body = re.search(rf"^struct {name} \{{(.*?)^\}};", _text(*STRUCT_SOURCES), re.M | re.S)
    if body is None:
        raise LookupError(f"no struct {name} in {' and '.join(STRUCT_SOURCES)}")
    fields = list(_fields(body[1]))
    return type(name, (Struct,), {"_fields_": fields, "names": frozenset(field for field, _ in fields)})


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Makes all functions that the library has take the arguments of their declarations."""
    sources = sorted(path.name for path in Path(__file__).parent.glob("*.cpp"))
    for result, name, arguments in FUNCTION.findall(_text(*sources)):
        if hasattr(library, name):
            function = getattr(library, name)
            function.argtypes = [_argument(text) for text in arguments.split(",") if text.strip()]
            function.restype = RESULTS[result]
            setattr(library, name, partial(_call, function))
    return library


def _argument(text: str) -> Any:
    return ctypes.c_void_p if "*" in text else SCALARS[text.split()[0]]


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*plain(arguments))


def _fields(body: str) -> Iterator[tuple[str, Any]]:
    """The fields of a struct, which come before its methods."""
    for statement in body.split(";"):
        if "(" in statement or not statement.strip():
            return
        kind, declarators = statement.strip().removeprefix("const ").split(maxsplit=1)
        for declarator in declarators.split(","):
            is_pointer, name, length = DECLARATOR.match(declarator.strip()).groups()  # type: ignore[union-attr]
            found = ctypes.c_void_p if is_pointer or kind.endswith("*") else SCALARS.get(kind) or struct(kind)
            yield name, found * _constant(length) if length else found


def _constant(name: str) -> int:
    found = re.search(rf"constexpr int {name} = (\d+);", _text(*STRUCT_SOURCES))
    if found is None:
        raise LookupError(f"no constant {name} in {' and '.join(STRUCT_SOURCES)}")
    return int(found[1])


@cache
def _text(*names: str) -> str:
    """The sources without comments and with single spaces within lines."""
    text = "".join((Path(__file__).parent / name).read_text() for name in names)
    return re.sub(r"[ \t]+", " ", re.sub(r"//.*", "", text))
