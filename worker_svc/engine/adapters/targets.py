"""Which linear layers of a decoder the tensors of an adapter change. Importing this does not import torch.

The names of an adapter's tensors are paths of modules in the model that it was trained with:

    base_model.model . model.layers. 3 .self_attn.q_proj . lora_A . weight
    prefix             of the architecture                 side

Other writers leave out `base_model.model`, put `language_model` in front of the layers, or add the name of the adapter
before `weight`. Any such prefix is accepted, but all tensors must have the same one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from worker_svc.engine.adapters.config import AdapterConfig, AdapterError
from worker_svc.engine.backend import SITES, Module
from worker_svc.engine.checkpoint.architecture import Names, Role

PREFIX_WORDS = frozenset({"base_model", "model", "language_model", "text_model", "transformer", "module", "_orig_mod"})
TENSOR = re.compile(r"(?P<path>.+)\.lora_(?P<side>[AB])(\.[^.]+)?\.weight")
SHOWN = 3  # names in a message


class StoredLinear(Protocol):
    """A linear layer as a checkpoint stores it: `weights.Stored`."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def roles(self) -> tuple[tuple[Role, int], ...]: ...
    @property
    def in_features(self) -> int: ...


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """A module that an adapter changes, and how."""

    module: Module
    path: str  # in the adapter's own names
    a: str  # tensors
    b: str
    rank: int
    scale: float


def modules_of(stored: Iterable[Mapping[str, StoredLinear]]) -> dict[str, Module]:
    """The linear layers of a decoder by name. `stored` has an item per layer: its linear layers by site."""
    found = {}
    for layer, sites in enumerate(stored):
        for site, linear in ((SITES.index(name), linear) for name, linear in sites.items() if name in SITES):
            first = 0
            for name, size in _outputs(linear):
                found[name] = Module(layer, site, first, size, linear.in_features)
                first += size
    return found


def _outputs(linear: StoredLinear) -> list[tuple[str, int]]:
    """The names of a site's tensors and their numbers of outputs."""
    sizes = [size for _, size in linear.roles]
    if len(linear.names) == 1:
        return [(linear.names[0], sum(sizes))]
    return list(zip(linear.names, sizes, strict=True))


def find_targets(
    config: AdapterConfig, shapes: Mapping[str, tuple[int, ...]], modules: Mapping[str, Module], names: Names
) -> list[AdaptedModule]:
    """The targets of an adapter, in the order of layers and outputs.

    Raises AdapterError unless each tensor belongs to a target, each target has both tensors, and all shapes fit.
    """
    pairs = _pairs(shapes)
    root, stem = _root(pairs, names)
    own = {root + name.removeprefix(stem): module for name, module in modules.items()}
    unknown = sorted(pairs.keys() - own.keys())
    if unknown:
        raise AdapterError(
            f"the adapter changes {_shown(unknown)}; this model has no such linear layers, or adapters of them are not "
            f"computed; its adapters may change {', '.join(_kinds(modules))}"
        )
    wanted = {path for path, module in own.items() if config.targets(_trained(path), module.layer)}
    extra, missing = sorted(pairs.keys() - wanted), sorted(wanted - pairs.keys())
    if extra:
        raise AdapterError(f"target_modules does not select {_shown(extra)}, but the adapter has tensors for them")
    if missing:
        raise AdapterError(f"target_modules selects {_shown(missing)}, but the adapter has no tensors for them")
    found = [_target(config, path, own[path], pairs[path], shapes) for path in pairs]
    return sorted(found, key=lambda target: target.module)


def _pairs(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, dict[str, str]]:
    """The tensors of each module by side."""
    pairs: dict[str, dict[str, str]] = {}
    for name in sorted(shapes):
        match = TENSOR.fullmatch(name)
        if match is None:
            raise AdapterError(
                f"tensor {name} {list(shapes[name])} is neither lora_A nor lora_B of a linear layer; it is not computed"
            )
        sides = pairs.setdefault(match["path"], {})
        if match["side"] in sides:
            raise AdapterError(
                f"tensors {sides[match['side']]} and {name} belong to the same layer; an adapter has one"
            )
        sides[match["side"]] = name
    for path, sides in pairs.items():
        if len(sides) < 2:
            (side,) = sides
            raise AdapterError(f"{path} has lora_{side}, but no lora_{'B' if side == 'A' else 'A'}")
    return pairs


def _root(pairs: Mapping[str, dict[str, str]], names: Names) -> tuple[str, str]:
    """What precedes `layers.` in the names of the adapter and of the model. Raises AdapterError if there is no such
    name, or several."""
    container = names.layer.split(".{}")[0].rpartition(".")[2]  # model.layers.{}. -> layers
    stem = names.layer.partition(f"{container}.{{}}")[0]
    pattern = re.compile(rf"(?P<root>(.+\.)?){re.escape(container)}\.\d+\..+")
    roots = {match["root"] if (match := pattern.fullmatch(path)) else None: path for path in pairs}
    if not roots:
        raise AdapterError("the adapter has no tensors; it would change nothing")
    for root, path in roots.items():
        if root is None or not set(root.split(".")[:-1]) <= PREFIX_WORDS:
            raise AdapterError(
                f"the adapter changes {path}; only adapters of the linear layers of {names.layer.format('*')} are "
                "computed, not of embeddings, the head or other parts of a model"
            )
    if len(roots) > 1:
        found = _shown([str(root) for root in roots])
        raise AdapterError(f"the names of the adapter's tensors start with {found}; they must start alike")
    return next(root for root in roots if root is not None), stem


def _target(
    config: AdapterConfig,
    path: str,
    module: Module,
    sides: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
) -> AdaptedModule:
    rank = config.rank_of(_trained(path))
    expected = {"A": (rank, module.num_inputs), "B": (module.num_outputs, rank)}
    for side, name in sides.items():
        if shapes[name] != expected[side]:
            raise AdapterError(
                f"tensor {name} has shape {list(shapes[name])}, but rank {rank} and this model require "
                f"{list(expected[side])}; the adapter belongs to another model, or its adapter_config.json is wrong"
            )
    return AdaptedModule(module, path, sides["A"], sides["B"], rank, config.scale_of(_trained(path)))


def _trained(path: str) -> str:
    """The name of a module in the model that the adapter was trained with, for which its patterns are written."""
    return path.removeprefix("base_model.model.")


def _kinds(modules: Mapping[str, Module]) -> list[str]:
    return list(dict.fromkeys(re.sub(r"^.*\.\d+\.", "", name) for name in modules))


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
