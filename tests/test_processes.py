from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import oxidion


def step_once(threads: int) -> list[float]:
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(400, 400))
    param.grad = torch.randn(400, 400)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        oxidion.AdamW([param]).step()
    finally:
        torch.set_num_threads(before)
    return param.detach().flatten()[:5].tolist()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_takes_steps_with_a_pool_of_its_own() -> None:
    param = nn.Parameter(torch.randn(400, 400))
    param.grad = torch.randn(400, 400)
    optimizer = oxidion.AdamW([param])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        optimizer.step()
        child = os.fork()
        if child == 0:
            # The parent's pool has no threads here: waiting for it would never end, but for the alarm.
            signal.alarm(60)
            optimizer.step()
            os._exit(0 if optimizer.state[param]["step"].item() == 2 else 1)
    finally:
        torch.set_num_threads(before)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


FORKS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Lamb": {},
    "Adafactor": {"lr": 1e-2, "relative_step": False, "scale_parameter": False},
    "Muon": {},
    "NorMuon": {},
    "Dion": {"rank_fraction": 0.5},
    "GaLoreAdamW": {"rank": 4},
    "APOLLOAdamW": {"rank": 4},
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("size", [8, 600])
@pytest.mark.parametrize("name", FORKS)
def test_child_forked_after_a_step_takes_the_steps_of_its_parent(name: str, size: int) -> None:
    """With two threads: those of libtorch stayed with the parent, and its products would wait for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.manual_seed(0)
        start, grad = torch.randn(size, size), torch.randn(size, size)

        def make() -> tuple[Any, nn.Parameter]:
            param = nn.Parameter(start.clone())
            param.grad = grad.clone()
            return getattr(oxidion, name)([param], **FORKS[name]), param

        optimizer, param = make()
        fresh, other = make()
        optimizer.step()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            optimizer.step()
            fresh.step()
            fresh.step()
            os.write(writer, pickle.dumps((param[0].tolist(), other[0].tolist(), torch.get_num_threads())))
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            answer = pipe.read()
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        optimizer.step()
    finally:
        torch.set_num_threads(threads)
    continued, restarted, left = pickle.loads(answer)
    assert left == 2
    wanted = param[0].tolist()
    # Products of one thread add up in another order than those of two.
    assert continued == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert restarted == pytest.approx(wanted, rel=1e-4, abs=1e-5)


THREADS = """
import os, pathlib, torch, oxidion
from torch import nn

def pool():
    tasks = pathlib.Path("/proc/self/task").iterdir()
    return sum((task / "comm").read_text().startswith("oxidion-") for task in tasks)

torch.set_num_threads(2)
params = [nn.Parameter(torch.randn(400, 400)) for _ in range(3)]
for param in params:
    param.grad = torch.randn(400, 400)
optimizer = oxidion.Muon([{"params": params[:1]}, {"params": params[1:], "algorithm": "adamw"}])
optimizer.step()
here = pool()
if (child := os.fork()) == 0:
    optimizer.step()
    os._exit(pool())
print(here, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_steps_use_torch_threads_and_a_pool_only_after_a_fork() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", THREADS],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "0 2\n"), done.stderr


WOKEN = """
import os, numpy as np, torch, oxidion
from torch import nn

def tensor():
    # What torch makes in parallel would wake threads too.
    return torch.from_numpy(np.random.randn({rows}, {cols}).astype(np.float32))

for name, settings in {settings!r}.items():
    torch.set_num_threads(1)
    params = [nn.Parameter(tensor()) for _ in range(4)]
    for param in params:
        param.grad = tensor()
    optimizer = getattr(oxidion, name)(params, **settings)
    optimizer.step()  # makes the workspace
    torch.set_num_threads(2)
    before = len(os.listdir("/proc/self/task"))
    optimizer.step()
    print(name, len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("shape", "woken"), [((24, 16), 0), ((16, 40), 0), ((600, 600), 1)])
def test_few_small_matrices_are_the_work_of_one_thread(shape: tuple[int, int], woken: int) -> None:
    """Threads of OpenMP spin: with other processes each region takes milliseconds, whatever it computes."""
    names = ["Muon"] if woken else [*FORKS, "Dion2", "NorDion2"]
    settings = {name: FORKS.get(name, {}) for name in names}
    code = WOKEN.format(settings=settings, rows=shape[0], cols=shape[1])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert dict(line.split() for line in done.stdout.splitlines()) == {name: str(woken) for name in settings}


def test_number_of_threads_does_not_change_elementwise_results() -> None:
    assert step_once(1) == step_once(2) == step_once(3)


def test_bfloat16_products_of_torch_work_with_the_package() -> None:
    """Where a virtual machine hides the tiles that it names, they crash without what the import sets."""
    code = "import oxidion, torch; x = torch.ones(64, 64, dtype=torch.bfloat16); print((x @ x)[0, 0].item())"
    plain = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=plain
    )
    assert (done.returncode, done.stdout) == (0, "64.0\n")


def test_env_command_prints_versions() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "oxidion", "env"], capture_output=True, text=True, check=True, timeout=120
    )
    assert f"oxidion:     {oxidion.__version__}" in done.stdout
    assert torch.__version__ in done.stdout
    assert done.stdout.strip() == oxidion.env_report()


def test_unknown_command_is_an_error_with_usage() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "oxidion", "nonsense"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    assert "invalid choice: 'nonsense'" in done.stderr
