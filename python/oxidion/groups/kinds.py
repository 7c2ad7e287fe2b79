"""The table of decisions: what a parameter is, by its module, and how it is read as matrices."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from oxidion.groups import facts, heads
from oxidion.groups.fused import Fused, fused, halves, recurrent

NORMALIZATIONS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)

ROUTER_CLASS = re.compile(r"Router|TopKGate|MoEGate|Gating|^Gate$")
EXPERTS_CLASS = re.compile(r"Expert|MoE|Moe|GroupedMLP|GroupedLinear|ParallelLinear")
STATE_SPACE = re.compile(
    r"A_log|A|D|dt_bias|time_\w+|x_\w+_mix|\w*_lambda|lambda_\w+|nu_log|theta_log|gamma_log"
)
TOKENS = re.compile(
    r"\w*(tokens?|pos(ition(al)?)?_?(embed(ding)?s?|enc\w*|emb|bias\w*)?|embed(ding)?s?|rel_pos\w*|latents?|queries|"
    r"prompts?|prototypes?|codebook|memory|registers?)|\w*relative_\w+|\w*(bias_)?table\w*|pe|wpe|wte"
)
"""Names of parameters that are tables of vectors, one of them for each place, token or query."""
GAINS = re.compile(r"\w*(scale|gamma|beta|gain|temperature|alpha|mask|mix|gate|magnitude|weight_g)s?\w*")
BIAS = re.compile(r"(\w*_)?b|\w*bias(es)?(_\w?\w?(_l\d+)?)?")
WEIGHT = re.compile(
    r"\w*(weight|kernel|proj|matrix)\w*|[wW]\d?|[wW]\d?_\w+|\w+_[wW]\d?|(hada|lokr|lora|vera)_\w+"
)
"""Names of parameters that multiply what their module gets."""
GATE_AND_VALUE = re.compile(r"w13|w1_w3|w31|gate_(and_)?up(_proj)?|up_gate(_proj)?|gated_up\w*")
DOWN = re.compile(
    r"(\w+_)?down(_\w+)?|(w|fc|ff|mlp|lin|linear|proj|dense|layer)_?2(_\w+)?|wo|w_?out|out\w*|\w*_out|c_proj|"
    r"dense_4h_to_h"
)
"""Names of experts' weights that lead back to the size between layers."""


@dataclass(frozen=True)
class Kind:
    """A kind of parameter, with the rule that found it."""

    rule: str
    """Name of the rule in a summary."""
    is_matrix: bool = False
    """True if the algorithm of matrices takes it."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Group keys that say how it is read as matrices."""
    is_known: bool = True
    """False where the rule guessed."""
    part: str = "rest"
    """"embedding" or "head" for those, else "rest"."""


@dataclass(frozen=True)
class Held:
    """A parameter with the module that holds it."""

    path: str
    name: str
    module: nn.Module
    param: Tensor
    parents: tuple[nn.Module, ...]
    """The modules around it, the nearest first."""

    @property
    def own(self) -> str:
        """Name of the module in its parent."""
        parts = self.path.split(".")
        return parts[-2] if len(parts) > 1 else ""

    @property
    def parent(self) -> nn.Module:
        """The module that holds the module; itself where there is none."""
        return self.parents[0] if self.parents else self.module


class Model:
    """The facts of a whole model that rules need."""

    def __init__(
        self,
        model: nn.Module,
        example: Any = None,
        split_fused: bool = True,
        prefix: str = "",
        per_head: Collection[str] = (),
    ) -> None:
        """Looks at the model once."""
        self.tables = facts.tables(model)
        self.heads = facts.heads(model, example, prefix)
        self.sizes = facts.hidden_sizes(model)
        self.split_fused = split_fused
        self.per_head = per_head
        self._modules = dict(model.named_modules())
        self._model = model

    def __iter__(self) -> Iterator[Held]:
        """The parameters, each once."""
        for path, name, module, param in facts.parameters(self._model):
            parts = path.split(".")[:-1]
            around = tuple(self._modules[".".join(parts[:n])] for n in range(len(parts) - 1, -1, -1))
            yield Held(path, name, module, param, around)

    def kind(self, held: Held) -> Kind:
        """The kind of a parameter, by the first rule that knows it."""
        return next(kind for rule in RULES if (kind := rule(self, held)) is not None)


def _vector(model: Model, p: Held) -> Kind | None:
    if p.param.ndim < 2 or sum(size != 1 for size in p.param.shape) < 2:
        is_head = p.param.ndim > 1 and id(p.module) in model.heads  # with one output
        return Kind("vectors: biases, gains, single tokens", part="head" if is_head else "rest")
    return None


def _adapter_of_embedding(_: Model, p: Held) -> Kind | None:
    return Kind("adapter of an embedding") if "lora_embedding_" in p.path else None


def _adapter(_: Model, p: Held) -> Kind | None:
    if re.search(r"(^|\.)(lora_[ab]|hada_\w+|lokr_\w+|vera_[ab])(\.|$)", p.path, re.I) is None:
        return None
    if p.param.ndim > 2:
        return Kind("adapters of convolutions", True, {"flatten": True})
    return Kind("adapters", True)


def _embedding(model: Model, p: Held) -> Kind | None:
    how = model.tables.get(id(p.param))
    return None if how is None else Kind(how, part="embedding")


def _normalization(_: Model, p: Held) -> Kind | None:
    named = any(name.endswith(("Norm", "Norm1d", "Norm2d", "Norm3d")) for name in facts.class_names(p.module))
    return Kind("normalization") if isinstance(p.module, NORMALIZATIONS) or named else None


def _head(model: Model, p: Held) -> Kind | None:
    how = model.heads.get(id(p.module))
    return None if how is None or not facts.is_linear(p.module) else Kind(how, part="head")


def _router(_: Model, p: Held) -> Kind | None:
    around = (p.module, *p.parents[:1])
    if any(ROUTER_CLASS.search(name) for m in around for name in facts.class_names(m)) or p.own == "router":
        return Kind("router")
    if p.own not in ("gate", "wg", "switch", "gating") or p.parent is p.module:
        return None
    chooses = any("expert" in name for name, _ in p.parent.named_children())
    return Kind("router") if chooses else None


def _convolution(_: Model, p: Held) -> Kind | None:
    module = p.module
    if not isinstance(module, nn.modules.conv._ConvNd) and (
        not hasattr(module, "kernel_size") or p.param.ndim < 3 or not hasattr(module, "in_channels")
    ):
        return None
    groups, channels = int(getattr(module, "groups", 1)), int(getattr(module, "in_channels", 0))
    if groups > 1 and groups == channels:
        return Kind("depthwise convolution")
    keys: dict[str, Any] = {"flatten": True}
    if getattr(module, "transposed", False):
        keys["fan_in_fan_out"] = True
        return Kind("transposed convolutions", True, keys)
    return Kind("convolutions" if groups == 1 else "convolutions with groups, as one matrix", True, keys)


def _attention(model: Model, p: Held) -> Kind | None:
    if not isinstance(p.module, nn.MultiheadAttention):
        return None
    if not p.name.endswith("_weight"):
        return Kind("bias")
    is_fused = p.name == "in_proj_weight"
    thirds = [p.param.shape[0] // 3] * 3
    name = "qkv" if is_fused else p.name.removesuffix("_weight")
    by_head = heads.split([name], [p.module], p.param.shape, model.per_head)
    return _matrix("linear layers", model, Fused(thirds, "fused") if is_fused else None, by_head=by_head)


def _gate_and_value(_: Model, p: Held) -> Kind | None:
    """Gate and value in a dimension of their own: ``[hidden, 2, dim]``, perhaps with experts before it."""
    if p.param.ndim not in (3, 4) or p.param.shape[-2] != 2 or not GATE_AND_VALUE.fullmatch(p.name):
        return None
    return Kind("gate and value in a dimension of their own", True, {"interleaved": 2})


def _recurrent(model: Model, p: Held) -> Kind | None:
    if not isinstance(p.module, (nn.RNNBase, nn.RNNCellBase)) or not p.name.startswith("weight"):
        return None
    sizes = recurrent(p.module, p.param)
    return _matrix("recurrent layers", model, Fused(sizes, "gates") if sizes else None)


def _matrix(
    rule: str,
    model: Model,
    parts: Fused | None,
    *,
    transposed: bool = False,
    by_head: heads.Split | None = None,
) -> Kind:
    """A matrix, or a stack of them, cut into heads or along its outputs into parts."""
    keys: dict[str, Any] = {"fan_in_fan_out": True} if transposed else {}
    if transposed:
        rule += " stored [in, out]"
    if by_head is not None and by_head.sizes:
        return Kind(f"{rule} (heads)", True, {**keys, **by_head.keys(transposed=transposed)})
    sizes, said, alternating = parts or Fused([], "")
    if alternating > 1 and by_head is None and not transposed and model.split_fused:
        return Kind(f"{rule} (gate and value alternate)", True, {**keys, "interleaved": alternating})
    words = [word for word in (said, "" if by_head is None else "heads unknown") if word]
    if words:
        rule += f" ({', '.join(words)})"
    if sizes and model.split_fused:
        keys["split_sizes"] = tuple(sizes)
        if transposed:
            keys["split_dim"] = 1
    return Kind(rule, True, keys)


def _linear(model: Model, p: Held) -> Kind | None:
    if not facts.is_linear(p.module) or "bias" in p.name:
        return None
    if isinstance(p.module, nn.Bilinear):
        return Kind("bilinear layers", True, {"flatten": True})
    if p.param.ndim != 2:
        return None
    transposed = facts.is_transposed(p.module)
    size, features = p.param.shape[::-1] if transposed else p.param.shape
    parts = fused(p.own, p.parent, size, features)
    by_head = heads.split(p.path.split(".")[-2::-1], p.parents, (size, features), model.per_head)
    return _matrix("linear layers", model, parts, transposed=transposed, by_head=by_head)


def _experts(model: Model, p: Held) -> Kind | None:
    around = [name for m in (p.module, *p.parents[:1]) for name in facts.class_names(m)]
    named = any(EXPERTS_CLASS.search(name) for name in around) or "expert" in p.path.lower()
    if BIAS.fullmatch(p.name):
        return Kind("bias") if named or p.param.ndim == 2 else None
    count = _experts_in_rows(p.module)
    if named and p.param.ndim == 2 and count is not None and p.param.shape[0] % count == 0:
        down = DOWN.fullmatch(p.name) is not None
        keys: dict[str, Any] = {"num_heads": count} if count > 1 else {}
        return Kind("experts below each other", True, {**keys, **({"fan_in_fan_out": True} if down else {})})
    if p.param.ndim != 3 or not named:
        return None
    down = DOWN.fullmatch(p.name) is not None
    is_fused = not down and re.search(r"gate_up|gate_and_up|w13|gated_up|mlp1", p.name) is not None
    # Of a square matrix that is one the orientation is nothing to an update.
    is_even = p.param.shape[-1] == p.param.shape[-2] and not is_fused
    transposed = False if is_even else _orientation(model, p)
    size = p.param.shape[-1] if transposed else p.param.shape[-2]
    parts = halves(p.module, size) if is_fused else None
    kind = _matrix("experts", model, parts, transposed=bool(transposed))
    if transposed is None:
        return Kind(f"{kind.rule} [out, in] as a guess", True, kind.keys, is_known=False)
    return kind


def _experts_in_rows(module: nn.Module) -> int | None:
    count = getattr(module, "moe_num_experts", None)
    return count if isinstance(count, int) and count > 0 else None


def _orientation(model: Model, p: Held) -> bool | None:
    """Returns True if experts are stored ``[in, out]``; None where nothing determines it."""
    stored = getattr(p.module, "is_transposed", None)
    if isinstance(stored, bool):
        return stored
    rows, cols = p.param.shape[-2:]
    for out, into in (("out_features", "in_features"), ("output_size", "input_size")):
        pair = (getattr(p.module, out, None), getattr(p.module, into, None))
        if pair in ((rows, cols), (cols, rows)) and rows != cols:
            return pair == (cols, rows)
    own = {getattr(p.module, key, None) for key in ("hidden_size", "dim", "d_model", "embed_dim")}
    for sizes in ({size for size in own if isinstance(size, int)}, model.sizes):
        is_row, is_col = rows in sizes, cols in sizes
        if is_row != is_col:
            down = DOWN.fullmatch(p.name) is not None
            # Weights that lead back have the size between layers as their outputs, others as their inputs.
            return is_row != down
    return None


def _parametrized(model: Model, p: Held) -> Kind | None:
    """Returns the kind of a weight whose parts are in a list of ``torch.nn.utils.parametrizations``."""
    if "ParametrizationList" not in facts.class_names(p.module) or len(p.parents) < 2:
        return None
    owner = p.parents[1]
    path = p.path.rsplit(".", 3)[0]
    own = Held(f"{path}.{p.own}", p.own, owner, p.param, p.parents[2:])
    return model.kind(own)


def _state_space(_: Model, p: Held) -> Kind | None:
    return Kind("state space and mixing") if STATE_SPACE.fullmatch(p.name) else None


def _token(_: Model, p: Held) -> Kind | None:
    return Kind("tokens and positions") if TOKENS.fullmatch(p.name) else None


def _gain(_: Model, p: Held) -> Kind | None:
    if BIAS.fullmatch(p.name):
        return Kind("bias")
    return Kind("gains") if GAINS.fullmatch(p.name) and not WEIGHT.fullmatch(p.name) else None


def _guess(_: Model, p: Held) -> Kind | None:
    by = f"weights of {type(p.module).__name__}"
    if WEIGHT.fullmatch(p.name) and p.param.ndim in (2, 3):
        return Kind(f"{by}, matrices as a guess", True, is_known=False)
    return Kind(f"{by}, no matrices as a guess", is_known=False)


Rule = Callable[[Model, Held], "Kind | None"]

RULES: tuple[Rule, ...] = (
    _vector,
    _adapter_of_embedding,
    _adapter,
    _embedding,
    _normalization,
    _head,
    _router,
    _convolution,
    _attention,
    _gate_and_value,
    _recurrent,
    _linear,
    _parametrized,
    _experts,
    _state_space,
    _token,
    _gain,
    _guess,
)
"""One rule an entry; the first that knows a parameter decides."""
