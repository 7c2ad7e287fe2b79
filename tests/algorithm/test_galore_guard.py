"""Finite gradients whose singular vectors are not found: GaLore keeps the projection it has, and says so.

Two things make that happen. A float64 gradient of 1e200 has squares that are no numbers, and so has its Gram
matrix. And LAPACK may not converge: a library that is loaded before libtorch stands in for the routines and
reports that, in a process of its own (this file as a program).
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from support.asserts import relative_error
from support.inputs import gaussian

SHAPE, RANK = (8, 6), 2
LR, WEIGHT_DECAY, SCALE, EPS, BETAS = 0.1, 0.5, 0.25, 0.25, (0.9, 0.999)
LOGGER = "oxidion.galore"
METHODS, TYPES = ("gram", "exact", "random"), ("float32", "float64")
MESSAGE = "does not decompose; its old projection is kept"

STAND_IN = r"""
#include <dlfcn.h>
#include <stddef.h>
int failing = 0, failed = 0;
static void *own(const char *name) {
  void *torch = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
  return torch ? dlsym(torch, name) : NULL;
}
static void fail(int work, int *info) {
  if (failing && work != -1) { failed++; *info = 1; }
}
void dsyevd_(char *job, char *uplo, int *n, double *a, int *lda, double *w, double *work, int *lwork,
             int *iwork, int *liwork, int *info) {
  void (*real)(char *, char *, int *, double *, int *, double *, double *, int *, int *, int *, int *);
  *(void **)&real = own("dsyevd_");
  real(job, uplo, n, a, lda, w, work, lwork, iwork, liwork, info);
  fail(*lwork, info);
}
void dgesdd_(char *job, int *m, int *n, double *a, int *lda, double *s, double *u, int *ldu, double *vt,
             int *ldvt, double *work, int *lwork, int *iwork, int *info) {
  void (*real)(char *, int *, int *, double *, int *, double *, double *, int *, double *, int *, double *,
               int *, int *, int *);
  *(void **)&real = own("dgesdd_");
  real(job, m, n, a, lda, s, u, ldu, vt, ldvt, work, lwork, iwork, info);
  fail(*lwork, info);
}
"""
"""Two routines of LAPACK that do what they do, and then say that they did not while ``failing`` is set."""


def optimizer_of(param: Tensor, **settings: Any) -> Any:
    """Optimizer that recomputes its projection every third step; ``eps`` is above rounding errors."""
    keys: dict[str, Any] = {
        "lr": LR,
        "weight_decay": WEIGHT_DECAY,
        "scale": SCALE,
        "eps": EPS,
        "betas": BETAS,
    }
    return oxidion.GaLoreAdamW([param], rank=RANK, update_proj_gap=3, state_bits=32, **keys, **settings)


def step(optimizer: Any, param: nn.Parameter, grad: Tensor) -> None:
    param.grad = grad.to(param.dtype)
    optimizer.step()


def corner(*seed: int) -> Tensor:
    """A gradient in the first rows and columns only, so that a projection is exactly zero in all others."""
    grad = torch.zeros(SHAPE, dtype=torch.float64)
    grad[:RANK, :RANK] = gaussian((RANK, RANK), *seed) + 2.0 * torch.eye(RANK)
    return grad


def states_of(optimizer: Any, param: Tensor) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in optimizer.state[param].items()}


def bases_of(state: dict[str, Tensor]) -> list[Tensor]:
    """The projections, that of the rows first."""
    return [state[key].double() for key in ("proj", "proj_right") if key in state]


def expected_step(param: Tensor, grad: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Parameter and moments after a step in the projection of ``state``, by definition."""
    bases, count = bases_of(state), float(state["step"]) + 1.0
    low = bases[0].mT @ grad @ bases[1] if len(bases) == 2 else grad @ bases[0]
    m = BETAS[0] * state["exp_avg"].double() + (1.0 - BETAS[0]) * low
    v = BETAS[1] * state["exp_avg_sq"].double() + (1.0 - BETAS[1]) * low.square()
    normal = m / (1.0 - BETAS[0] ** count) / ((v / (1.0 - BETAS[1] ** count)).sqrt() + EPS)
    update = bases[0] @ normal @ bases[1].mT if len(bases) == 2 else normal @ bases[0].mT
    return (1.0 - LR * WEIGHT_DECAY) * param.double() - LR * SCALE * update, m, v


def assert_step_in_old_bases(
    optimizer: Any, param: nn.Parameter, grad: Tensor, start: Tensor, held: dict[str, Tensor], limit: float
) -> None:
    """The step from ``start`` and ``held`` is one in the projections of ``held``, which are kept."""
    expected, m, v = expected_step(start, grad, held)
    state = optimizer.state[param]
    for key in held:
        if key.startswith("proj"):
            assert held[key].any()
            assert torch.equal(state[key], held[key]), key
    assert param.isfinite().all()
    assert relative_error(param.detach() - start, expected - start.double()) <= limit
    assert relative_error(state["exp_avg"], m) <= limit
    assert relative_error(state["exp_avg_sq"], v) <= limit
    assert float(state["step"]) == float(held["step"]) + 1.0


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [r for r in caplog.records if r.name == LOGGER]
    assert all(r.levelno == logging.WARNING for r in found)
    return [r.getMessage() for r in found]


@pytest.mark.parametrize(
    "settings",
    [{}, {"rotate_moments": True}, {"proj_type": "full"}, {"svd": "random"}],
    ids=lambda settings: "-".join(map(str, settings.values())) or "gram",
)
def test_overflowing_gradient_moves_within_the_kept_projection(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    param = nn.Parameter(gaussian(SHAPE, 1))
    optimizer = optimizer_of(param, **settings)
    for number in range(3):
        step(optimizer, param, corner(2, number))
    for number in (3, 6):  # both due; said once
        assert number == float(optimizer.state[param]["step"])
        start, held = param.detach().clone(), states_of(optimizer, param)
        grad = corner(2, number)
        grad[5, 4] = 1e200  # orthogonal to what is kept: adds nothing to the projected gradient
        assert grad.isfinite().all()
        assert not (grad @ grad.mT).isfinite().all()
        step(optimizer, param, grad)
        assert_step_in_old_bases(optimizer, param, grad, start, held, 1e-12)
        assert len(warnings_of(caplog)) == 1
        assert warnings_of(caplog)[0].startswith("parameter 0: ")
        assert MESSAGE in warnings_of(caplog)[0]
        for other in range(number + 1, number + 3):
            step(optimizer, param, corner(2, other))
    held = states_of(optimizer, param)
    step(optimizer, param, gaussian(SHAPE, 3))
    assert not torch.equal(optimizer.state[param]["proj"], held["proj"]), "a new one is found when due again"
    assert param.isfinite().all()


def test_singular_vectors_of_the_matrix_itself_need_no_squares(caplog: pytest.LogCaptureFixture) -> None:
    param = nn.Parameter(gaussian(SHAPE, 1))
    optimizer = optimizer_of(param, svd="exact")
    for number in range(4):
        if number == 3:
            held = states_of(optimizer, param)
        step(optimizer, param, corner(2, number) + (1e200 if number == 3 else 0.0))
    assert not torch.equal(optimizer.state[param]["proj"], held["proj"])
    assert not warnings_of(caplog)


@pytest.mark.parametrize("svd", ["gram", "random"])
def test_first_gradients_whose_squares_overflow_take_no_step(
    svd: str, caplog: pytest.LogCaptureFixture
) -> None:
    param = nn.Parameter(gaussian(SHAPE, 1))
    optimizer, expected = optimizer_of(param, svd=svd), param.detach().clone()
    for number in range(2):
        step(optimizer, param, 1e200 * gaussian(SHAPE, 2, number))
        expected = (1.0 - LR * WEIGHT_DECAY) * expected
        torch.testing.assert_close(param.detach(), expected, rtol=1e-14, atol=0.0)
        state = optimizer.state[param]
        assert not any(state[key].any() for key in ("proj", "proj_step", "exp_avg", "exp_avg_sq"))
        assert float(state["step"]) == number + 1
    assert len(warnings_of(caplog)) == 1
    assert MESSAGE in warnings_of(caplog)[0]
    # The next gradient gives the projection, though none is scheduled before the fourth step.
    start, grad = param.detach().clone(), gaussian(SHAPE, 3)
    step(optimizer, param, grad)
    assert float(optimizer.state[param]["proj_step"]) == 3
    held = {**states_of(optimizer, param), "step": torch.tensor(2.0)}
    held |= {key: torch.zeros_like(held[key]) for key in ("exp_avg", "exp_avg_sq")}
    assert_step_in_old_bases(optimizer, param, grad, start, held, 1e-12)


def fails(library: str, svd: str, dtype: torch.dtype, messages: list[str]) -> list[int]:
    """How many decompositions failed: in the first step, and with a projection that was there."""
    switch = ctypes.CDLL(library)
    failing, failed = (ctypes.c_int.in_dll(switch, name) for name in ("failing", "failed"))
    messages.clear()
    failing.value, failed.value = 1, 0
    first = nn.Parameter(gaussian(SHAPE, 1).to(dtype))
    start, optimizer = first.detach().clone(), optimizer_of(first, svd=svd)
    step(optimizer, first, gaussian(SHAPE, 2))
    counts = [failed.value]
    assert not any(optimizer.state[first][key].any() for key in ("proj", "exp_avg", "exp_avg_sq"))
    torch.testing.assert_close(first.detach(), (1.0 - LR * WEIGHT_DECAY) * start)
    failing.value = 0
    param = nn.Parameter(gaussian(SHAPE, 1).to(dtype))
    optimizer = optimizer_of(param, svd=svd)
    for number in range(3):
        step(optimizer, param, gaussian(SHAPE, 2, number))
    failing.value = 1
    start, held = param.detach().clone(), states_of(optimizer, param)
    grad = gaussian(SHAPE, 2, 3).to(dtype)
    step(optimizer, param, grad)
    counts.append(failed.value - counts[0])
    # Rounding of float32, which Adam's division enlarges.
    limit = 1e-12 if dtype == torch.float64 else 1e-5
    assert_step_in_old_bases(optimizer, param, grad.double(), start, held, limit)
    failing.value = 0
    for number in range(4, 7):
        step(optimizer, param, gaussian(SHAPE, 2, number))
    assert not torch.equal(optimizer.state[param]["proj"], held["proj"]), "a new one is found when due again"
    return counts


def program(library: str) -> None:
    """Every method and type; writes the numbers of failures and the messages. Nothing where none can fail."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(LOGGER).addHandler(handler)
    failing = ctypes.c_int.in_dll(ctypes.CDLL(library), "failing")
    failing.value = 1
    try:
        torch.linalg.eigh(torch.eye(3, dtype=torch.float64))
    except RuntimeError:
        found = {}
        for svd in METHODS:
            for dtype in TYPES:
                print(svd, dtype, file=sys.stderr)
                counts = fails(library, svd, getattr(torch, dtype), messages)
                found[f"{svd} {dtype}"] = {"failed": counts, "messages": list(messages)}
        print(json.dumps(found))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What this file as a program finds with the library that stands in for LAPACK."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("lapack")
    (folder / "lapack.c").write_text(STAND_IN)
    built = str(folder / "lapack.so")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", built, str(folder / "lapack.c"), "-ldl"], check=True, timeout=60
    )
    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, __file__, built],
        env={**os.environ, "LD_PRELOAD": built, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if not done.stdout:
        pytest.skip("LAPACK is built into this libtorch where nothing can stand in for it")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("svd", METHODS)
def test_decomposition_without_convergence_keeps_the_projection(
    outcome: dict[str, Any], svd: str, dtype: str
) -> None:
    found = outcome[f"{svd} {dtype}"]
    assert found["failed"] == [1, 1]
    assert len(found["messages"]) == 2, "one for each optimizer"
    assert all(MESSAGE in message for message in found["messages"])


if __name__ == "__main__":
    program(sys.argv[1])
