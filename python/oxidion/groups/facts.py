"""Facts about the layers of a model: embeddings, output layers, sizes. No decision is made here."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from oxidion._dist.comm import local

HEAD = re.compile(
    r"lm_head|heads?|\w+_head|head_\w+|output_layer|classifiers?|\w+_classifier|unembed\w*|embed_out|score|"
    r"qa_outputs|cls_score|cls_logits|bbox_pred|bbox_predictor|(class|bbox)_embed|seq_relationship|"
    r"(to_)?logits|final_layer|proj_out(_\d)?|conv_out|aux\d?|aux_?logits",
    re.IGNORECASE,
)
"""Names of modules that hold an output layer, at any depth that is not behind a number."""

HEAD_OF_ROOT = re.compile(r"fc|out|output|prediction|predictor|generator|final_proj|(fc|linear|decoder)_out")
"""The same, of a module that the model itself holds."""

FEATURES = re.compile(r"(box|mask|keypoint|conv)_head|rpn_head|norm_head|head_norm")
"""Names that look like an output layer and are none."""

INNER = re.compile(r"pool|projection|embed|norm")
"""Names of last layers whose outputs are features."""

MODULATION = re.compile(r"adaLN|modulation|(^|[._])film", re.IGNORECASE)
"""Names of layers whose outputs scale and shift those of others."""

ATTENTION = re.compile(r"(.*\.)?(query|key|value|[qkv](_proj)?|to_[qkv])")
"""Names of layers inside of the heads of an attention, which are no output layers."""

LINEAR = (nn.Linear, nn.modules.conv._ConvNd, nn.Bilinear)


def class_names(module: nn.Module) -> list[str]:
    """Names of a module's classes below ``nn.Module``: FSDP2 puts one of its own before them."""
    return [cls.__name__ for cls in type(module).__mro__ if cls not in (nn.Module, object)]


def is_linear(module: nn.Module) -> bool:
    """True for layers whose weight multiplies what they get, a library's own too."""
    if isinstance(module, LINEAR):
        return True
    names = class_names(module)
    return any(name.endswith(("Linear", "Linear4bit", "Conv1D", "Dense")) for name in names)


def address(param: Tensor) -> int:
    """Address of a parameter's memory; 0 where this process stores nothing of it."""
    own = local(param)
    return 0 if own.device.type == "meta" or own.numel() == 0 else own.untyped_storage().data_ptr()


def parameters(model: nn.Module) -> Iterator[tuple[str, str, nn.Module, Tensor]]:
    """Each parameter once, as ``named_parameters`` has them: path, name in its module, module, itself."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if id(param) not in seen:
                seen.add(id(param))
                yield (f"{prefix}.{name}" if prefix else name), name, module, param


def _layers_around(model: nn.Module) -> Iterator[nn.Module]:
    """A model and what is inside of DDP, ``DataParallel`` and ``torch.compile``, from the outside in."""
    while True:
        yield model
        inner = next((child for name, child in model.named_children() if name == "_orig_mod"), None)
        if isinstance(model, (DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif inner is not None:
            model = inner
        else:
            return


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of DDP, ``DataParallel`` and ``torch.compile``, with its own names."""
    return list(_layers_around(model))[-1]


def replicas(model: nn.Module) -> Any:
    """The process group over which DDP replicates a model, compiled or not; None without DDP."""
    groups = (m.process_group for m in _layers_around(model) if isinstance(m, DistributedDataParallel))
    return next(groups, None)


def innermost(model: nn.Module) -> nn.Module:
    """The model inside of wrappers, which have no parameter but those of one child."""
    while next(model.parameters(recurse=False), None) is None:
        held = [child for child in model.children() if next(child.parameters(), None) is not None]
        if len(held) != 1 or isinstance(model, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            break
        model = held[0]
    return model


def _called(model: nn.Module, method: str) -> list[nn.Module]:
    """Modules that a method without arguments returns, if the model has the method and it works."""
    given = getattr(model, method, None)
    if not callable(given):
        return []
    try:
        found = given()
    except (AttributeError, NotImplementedError, TypeError):
        return []
    return [m for m in (found if isinstance(found, (tuple, list)) else [found]) if isinstance(m, nn.Module)]


def _is_trained(module: nn.Module) -> bool:
    return any(param.requires_grad for param in module.parameters(recurse=False))


def last_linear(module: nn.Module) -> list[nn.Module]:
    """The last linear layer inside a module; of each entry where it is a list of modules."""
    if is_linear(module):
        return [module]
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [layer for child in module.children() for layer in last_linear(child)]
    layers = [m for path, m in module.named_modules() if is_linear(m) and not MODULATION.search(path)]
    return ([m for m in layers if _is_trained(m)] or layers)[-1:]


def _attends(module: nn.Module) -> bool:
    return any(ATTENTION.fullmatch(path) and is_linear(inner) for path, inner in module.named_modules())


def _by_name(root: nn.Module, prefix: str = "") -> list[nn.Module]:
    """Output layers by the names of the modules that hold them; ``prefix`` is that of a part of a model."""
    found: list[nn.Module] = []
    for path, module in root.named_modules(prefix=prefix):
        parts = path.split(".")
        if any(part.isdigit() for part in parts) or FEATURES.fullmatch(parts[-1]):
            continue
        at_root = not prefix and len(parts) == 1 and HEAD_OF_ROOT.fullmatch(parts[-1]) is not None
        if (HEAD.fullmatch(parts[-1]) or at_root) and not _attends(module):
            found += last_linear(module)
    return found


def is_transposed(module: nn.Module) -> bool:
    """True for a layer whose weight is stored ``[in, out]``."""
    given = (getattr(module, key, False) is True for key in ("transposed", "is_transposed"))
    return any(given) or "Conv1D" in class_names(module)


def weight_shape(module: nn.Module) -> tuple[int, ...]:
    """Outputs and inputs of a linear layer; empty where they are not known."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim < 2:
        return ()
    return tuple(weight.shape[:2][:: -1 if is_transposed(module) else 1])


def number(module: nn.Module, *names: str) -> int | None:
    """A size that a module or its configuration has under one of some names."""
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            found = getattr(holder, name, None)
            if isinstance(found, int) and not isinstance(found, bool) and found > 0:
                return found
    return None


def alternates(module: nn.Module) -> bool:
    """True for an attention that says that queries, keys and values alternate from head to head."""
    return getattr(module, "head_first", False) is True or {"key_dim", "val_dim"} <= vars(module).keys()


INPUTS = ("in_features", "in_channels", "input_size", "kdim", "vdim", "embed_dim", "d_model")
"""Attributes of layers, of linear, convolutional, recurrent and attention ones, for the sizes of inputs."""


def _inputs(module: nn.Module) -> set[int]:
    """The sizes of the inputs of a layer, as far as they are known."""
    given = [getattr(module, key, None) for key in INPUTS]
    shape = weight_shape(module)[1:] if is_linear(module) else ()
    return {size for size in (*given, *shape) if isinstance(size, int)}


def _layers(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """The linear layers with their names; frozen ones too, whose inputs are others' outputs."""
    return [(path, m) for path, m in root.named_modules() if is_linear(m)]


def _at_the_end(root: nn.Module) -> list[nn.Module]:
    """Returns the last trained one of several linear layers, if its outputs are no other layer's inputs.

    With it come the layers right before it in the same module that have the same inputs and whose outputs are
    no inputs either. The list is empty where the last of all is such a layer and frozen.
    """
    layers = _layers(root)
    trained = [(path, m) for path, m in layers if _is_trained(m)]
    if len(layers) < 2 or not trained:
        return []
    inputs = [(m, _inputs(m)) for m in root.modules()]
    sizes = hidden_sizes(root)

    def is_last(path: str, layer: nn.Module) -> bool:
        taken = sizes.union(*(own for m, own in inputs if m is not layer))
        is_inner = not weight_shape(layer) or weight_shape(layer)[0] in taken
        is_named = INNER.search(path) or MODULATION.search(path) or ATTENTION.fullmatch(path)
        return not (is_inner or is_named)

    def place(path: str, layer: nn.Module) -> tuple[Any, ...]:
        return path.rpartition(".")[0], weight_shape(layer)[1:]

    own = place(*trained[-1])
    if layers[-1][1] is not trained[-1][1] and is_last(*layers[-1]):
        return []
    neighbours = itertools.takewhile(lambda pair: place(*pair) == own and is_last(*pair), reversed(trained))
    return [m for _, m in neighbours]


def last_path(model: nn.Module) -> str:
    """Name of the weight of the last linear layer; empty without one, or if it is frozen or an embedding."""
    own = {id(param): path for path, _, _, param in parameters(model) if param.requires_grad}
    layers = _layers(innermost(model))
    weight = getattr(layers[-1][1], "weight", None) if layers else None
    return "" if weight is None or id(weight) in tables(model) else own.get(id(weight), "")


def traced_head(model: nn.Module, example: Any) -> list[nn.Module]:
    """The linear layer that is called last in a forward pass of ``example``.

    The model runs in evaluation mode, without gradients. Nothing of it or of the generators of random
    numbers is changed.
    """
    last: list[nn.Module] = []

    def called(module: nn.Module, _args: Any, _output: Any) -> None:
        last[:] = [module]

    modes = [(module, module.training) for module in model.modules()]
    hooks = [module.register_forward_hook(called) for module in model.modules() if is_linear(module)]
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng():
            if isinstance(example, dict) or hasattr(example, "keys"):
                model(**example)
            elif isinstance(example, (tuple, list)):
                model(*example)
            else:
                model(example)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes:
            module.training = mode
    return last


def heads(model: nn.Module, example: Any = None, prefix: str = "") -> dict[int, str]:
    """The output layers, by the identity of the module, and how each was found.

    Of a part of a model, which has a ``prefix``, they are found by name alone: its last layer may be any.
    """
    root = innermost(model)
    ways: list[tuple[str, Callable[[], Iterable[nn.Module]]]] = [
        ("output layer of get_output_embeddings()", lambda: _called(root, "get_output_embeddings")),
        ("output layer of get_classifier()", lambda: _called(root, "get_classifier")),
        ("output layer by its name", lambda: _by_name(root, prefix)),
    ]
    found: dict[int, str] = {}
    if example is not None:
        found = {id(m): "output layer of the forward pass" for m in traced_head(model, example)}
    for how, way in ways:
        for module in way():
            for layer in last_linear(module):
                found.setdefault(id(layer), how)
    if not found and not prefix:
        found = {id(m): "output layer, the last one" for m in _at_the_end(root)}
    return found


def tables(model: nn.Module) -> dict[int, str]:
    """Parameters that are the weight of an embedding, or share the memory of one, by identity."""
    held: list[Tensor] = []
    for module in model.modules():
        weight = getattr(module, "weight", None)
        named = any(name.endswith(("Embedding", "EmbeddingBag")) for name in class_names(module))
        if named and isinstance(weight, Tensor):
            held.append(weight)
    found = {id(weight): "embedding" for weight in held if weight.ndim >= 2}
    memory = {address(weight) for weight in held} - {0}
    for param in model.parameters():
        if id(param) not in found and address(param) in memory:
            found[id(param)] = "shares the memory of an embedding"
    return found


def hidden_sizes(model: nn.Module) -> set[int]:
    """The sizes of what layers hand on to each other: from the configuration, else from the embeddings."""
    sizes: set[int] = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        for key in ("hidden_size", "d_model", "n_embd", "dim"):
            size = getattr(config, key, None)
            if isinstance(size, int):
                sizes.add(size)
    if sizes:
        return sizes
    return {m.embedding_dim for m in model.modules() if isinstance(m, nn.Embedding)}
