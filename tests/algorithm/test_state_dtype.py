"""States of any type: dtypes, and steps against float64 ones whose states are rounded after each step.

Moments of 16 bits are rounded at random, so the reference takes the same random numbers by their definition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from support.asserts import error_in_ulps, relative_error
from support.cases import case_named
from support.rounding import of_state, rounded
from support.trajectory import FACTORS, Twin, role_state

STEPS = 6
NAMES = (
    *("lamb-default", "lamb-step", "adafactor-beta1", "came-default", "came-betas", "galore-default"),
    *("galore-right", "galore-rotate", "galore-fallback", "apollo-default", "apollo-tensor", "apollo-mini"),
)
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
TYPES = [(F32, BF16), (F32, F16), (F32, F64), (F64, BF16), (F64, F16), (F64, F32)]
KEPT_WIDE = {*FACTORS, "proj", "proj_right", "proj_step", "update_norm"}

Rule = Callable[[torch.dtype, bool], torch.dtype | None]
"""What a state is rounded to, given its own type and whether it is a moment; None: not at all."""

every_case = pytest.mark.parametrize("name", NAMES)


def is_moment(algorithm: str, role: str) -> bool:
    """Whether a state has the type that was asked for; the others are as wide as the arithmetic."""
    factored = algorithm in ("adafactor", "came") and role == "variance"
    return role != "step" and role not in KEPT_WIDE and not factored


def rightly(dtype: torch.dtype, _moment: bool) -> torch.dtype:
    """As it has to be."""
    return dtype


@dataclass
class Found:
    """The largest differences from the reference over all steps.

    Attributes:
        update: of an update, relative to its norm.
        wide: of a state that nothing was rounded of, relative to its norm.
        moved: elements of rounded states that are other numbers, of all.
        ulps: of a parameter, in units of its last place.
    """

    update: float = 0.0
    wide: float = 0.0
    moved: float = 0.0
    ulps: float = 0.0


def betas(algorithm: str, group: dict[str, Any]) -> tuple[float, float]:
    """The rates at which both moments decay."""
    if algorithm == "adafactor":
        return float(group["beta1"]), 1.0
    first, second = group["betas"][:2]
    return float(first), float(second)


class Rounded(Twin):
    """A twin whose reference keeps its states in the types that the optimizer has them in.

    The reference never sees the optimizer's states, only its parameters after each step.
    """

    def dtypes(self) -> list[dict[str, torch.dtype]]:
        """Types of the optimizer's states, by parameter and role."""
        states = [role_state(self.optimizer, param) for param in self.params]
        return [{role: value.dtype for role, value in state.items()} for state in states]

    def round_moment(self, index: int, role: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        """A moment as the optimizer stores it: at random in 16 bits, else to the nearest number."""
        if dtype.itemsize > 2:
            return value.to(dtype).double()
        param = self.params[index]
        number = [*role_state(self.optimizer, param)].index(role)
        key = [*self.optimizer.state[param]][number]
        random = of_state(self.optimizer, param, key, seed=int(self.groups[index].get("seed", 0)))
        return rounded(value, random, dtype, stays_positive=role == "variance").double()

    def round_states(self, rule: Rule, *, is_nearest: bool) -> None:
        """Round the reference's states."""
        rows = zip(self.states, self.dtypes(), self.case.algorithms, strict=True)
        for index, (state, dtypes, algorithm) in enumerate(rows):
            for role, value in state.items():
                moment = is_moment(algorithm, role)
                wanted = None if role == "step" else rule(dtypes[role], moment)
                if wanted is not None and moment and not is_nearest:
                    value.copy_(self.round_moment(index, role, value, wanted))
                elif wanted is not None:
                    value.copy_(value.to(wanted).double())

    def let_moments_be_rounded_in_the_step(self, grads: list[Tensor]) -> None:
        """Change the reference's moments so that those after the step are rounded ones within the step."""
        expected, states = self.expected, self.states
        self.expected = [value.clone() for value in expected]
        self.states = [{role: value.clone() for role, value in state.items()} for state in states]
        self.step_reference(grads)
        after, self.expected, self.states = self.states, expected, states
        rows = zip(states, after, self.dtypes(), self.case.algorithms, self.groups, strict=True)
        for index, (state, new, dtypes, algorithm, group) in enumerate(rows):
            for role, beta in zip(("momentum", "variance"), betas(algorithm, group), strict=True):
                if role in state and is_moment(algorithm, role):
                    stored = self.round_moment(index, role, new[role], dtypes[role])
                    state[role] += (stored - new[role]) / beta

    def run(self, rule: Rule = rightly, *, applied_rounded: bool = False, is_nearest: bool = False) -> Found:
        """Steps on both sides."""
        found, moved, all_ = Found(), 0, 0
        for grads in self.gradients(STEPS):
            before = [value.clone() for value in self.expected]
            self.set_grads(grads)
            self.optimizer.step()
            if applied_rounded:
                self.let_moments_be_rounded_in_the_step(grads)
            self.step_reference(grads)
            self.round_states(rule, is_nearest=is_nearest)
            rows = zip(self.params, self.expected, before, self.states, self.case.algorithms, strict=True)
            for param, expected, old, state, algorithm in rows:
                error = relative_error(param.detach().double() - old, expected - old)
                found.update = max(found.update, error)
                found.ulps = max(found.ulps, error_in_ulps(param.detach(), expected, old))
                for role, value in role_state(self.optimizer, param).items():
                    wide = torch.promote_types(self.dtype, F32)
                    if is_moment(algorithm, role) and value.dtype.itemsize < wide.itemsize:
                        moved, all_ = moved + int((value.double() != state[role]).sum()), all_ + value.numel()
                    elif role != "step":
                        found.wide = max(found.wide, relative_error(value, state[role]))
            self.follow_parameters()
        found.moved = moved / max(all_, 1)
        return found


def twin_of(name: str, dtype: torch.dtype, state_dtype: torch.dtype) -> Rounded:
    return Rounded(case_named(name), dtype, state_dtype=state_dtype, state_bits=32)


@pytest.mark.parametrize("name", [*NAMES, "came-mixed"])
@pytest.mark.parametrize(
    ("dtype", "state_dtype"), [*TYPES, (BF16, F32), (F16, F64)], ids=lambda v: str(v).removeprefix("torch.")
)
def test_moments_have_the_type_asked_for_and_nothing_else_has(
    name: str, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    twin = twin_of(name, dtype, state_dtype)
    twin.set_grads(twin.gradients(1)[0])
    twin.optimizer.step()
    moments = 0
    for dtypes, algorithm, label in zip(twin.dtypes(), twin.case.algorithms, twin.labels(), strict=True):
        for role, found in dtypes.items():
            wanted = state_dtype if is_moment(algorithm, role) else torch.promote_types(dtype, F32)
            assert found == (F32 if role == "step" else wanted), f"{label} {role}"
            moments += is_moment(algorithm, role)
    assert moments


@every_case
@pytest.mark.parametrize(("dtype", "state_dtype"), TYPES, ids=lambda v: str(v).removeprefix("torch."))
def test_steps_equal_float64_ones_with_states_rounded_after_each(
    name: str, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    found = twin_of(name, dtype, state_dtype).run()
    # Arithmetic is in float32 or float64: updates and what is as wide differ by its rounding, which Adam's
    # division enlarges. What is narrower is the same number, unless that rounding takes it over a threshold:
    # float32 is next to one of float16 for some of a thousand numbers, and each is a unit of 2^-10.
    limit, moved = (1e-5, 1e-3) if dtype == F32 else (1e-11, 0.0)
    if (dtype, state_dtype) == (F32, F16):
        limit, moved = 3e-4, 4e-3
    assert found.update <= limit
    assert found.wide <= limit
    assert found.moved <= moved


@every_case
@pytest.mark.parametrize("state_dtype", [F32, F64], ids=["float32", "float64"])
def test_parameters_of_16_bits_do_not_narrow_their_states(name: str, state_dtype: torch.dtype) -> None:
    found = twin_of(name, BF16, state_dtype).run()
    assert found.wide <= 1e-5
    assert found.ulps <= 1.0


WRONG: dict[str, tuple[Rule, dict[str, bool]]] = {
    "never rounded": (lambda _dtype, moment: None if moment else F32, {}),
    "another type": (lambda dtype, moment: F16 if moment else dtype, {}),
    "everything rounded": (lambda _dtype, _moment: BF16, {}),
    "rounded to the nearest": (rightly, {"is_nearest": True}),
    "applied after rounding": (rightly, {"applied_rounded": True}),
}
"""Other ways to keep states: what they are rounded to, and whether to the nearest or before they are used."""


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        (name, wrong)
        for name in ("lamb-default", "adafactor-beta1", "came-default", "galore-default", "apollo-default")
        for wrong in WRONG
        if (name, wrong) != ("lamb-default", "everything rounded")  # all that it has are moments
    ],
)
def test_other_roundings_would_show_in_the_updates(name: str, wrong: str) -> None:
    rule, how = WRONG[wrong]
    found = twin_of(name, F32, BF16).run(rule, **how)
    # 100 times the limit of the test above.
    assert found.update >= 1e-3
    if wrong != "applied after rounding":
        assert max(found.moved, found.wide) >= 2e-3  # measured: 86 % of moments, or 2e-3 to 9e-3 of factors
