"""Dion launched on a driver without a device: how many launches it takes, and what becomes of P."""

from __future__ import annotations

from .driver import needs_nvrtc, on_the_device, run


@needs_nvrtc
def test_dion_takes_as_many_launches_for_six_matrices_as_for_one(environment: dict[str, str]) -> None:
    said = run(
        environment,
        """
        for count in (1, 6):
            optimizer = oxidion.Dion(parameters(*[(40, 24)] * count), rank_fraction=0.5)
            optimizer.step()
            driver.emulator_begin_capture()
            optimizer.step()
            print(driver.emulator_end_capture())
        """,
    )
    # Momentum and Q; three on the columns of P, five passes of three, three on the columns of R; decay.
    assert said.splitlines() == ["19"] * 2


@needs_nvrtc
def test_dion_orthonormalizes_and_keeps_q_of_empty_columns(environment: dict[str, str]) -> None:
    run(
        environment,
        """
        def dion(grad):
            param = torch.nn.Parameter(torch.zeros_like(grad))
            param.grad = grad
            optimizer = oxidion.Dion([param], lr=1.0, adjust_lr=None, orth_dtype="float32")
            optimizer.init_state()
            optimizer.state[param]["Q"].copy_(torch.eye(33))
            return optimizer, param
        left, right = (torch.linalg.qr(torch.randn(n, 33, dtype=torch.float64)).Q for n in (100, 33))
        for power in (0, 1, 2, 3, 4, 5, 6, 7):
            grad = (left * torch.logspace(0, -power, 33) @ right.mT).float()
            for scale in (1e-30, 1.0):
                [row] = dion(grad * scale)[0].metrics()
                assert row["orthogonality_error"] < 1e-6, (power, scale)
        grad[:, 5], grad[:, 7] = grad[:, 2], 0.0
        optimizer, param = dion(grad)
        for _ in range(3):
            before = param.detach().clone()
            optimizer.step()
            assert (param.detach() - before * 0.99).norm() < 33**0.5 * 1.001
        assert torch.equal(optimizer.state[param]["Q"][:, 7], torch.eye(33)[:, 7])
        """,
    )


@needs_nvrtc
def test_dion_stack_of_matrices_equals_its_matrices(environment: dict[str, str]) -> None:
    run(
        environment,
        """
        for shape in ((5, 12, 8), (5, 8, 12)):
            [stack] = parameters(shape)
            alone = [torch.nn.Parameter(matrix.clone()) for matrix in stack.detach()]
            one, many = oxidion.Dion([stack], rank_fraction=0.5), oxidion.Dion(alone, rank_fraction=0.5)
            one.init_state(), many.init_state()
            for number, matrix in enumerate(alone):
                matrix.grad = stack.grad[number].clone()
                many.state[matrix]["Q"].copy_(one.state[stack]["Q"][number])
            for _ in range(3):
                one.step(), many.step()
            torch.testing.assert_close(stack, torch.stack(alone), rtol=0, atol=1e-6)
        """,
    )


@needs_nvrtc
def test_orthonormal_right_factors_hold_there(environment: dict[str, str]) -> None:
    places = ("algorithm/test_cases.py", "algorithm/test_dion_orthonormal.py")
    passed, skipped = on_the_device(environment, "orthonormal", *places)
    assert passed >= 100
    assert skipped == 0


@needs_nvrtc
def test_few_wide_matrices_are_factored_by_several_blocks(environment: dict[str, str]) -> None:
    """Columns of eight tiles: a block for each and for those below, in the first two of five passes."""
    run(
        {**environment, "OXIDION_EMULATED_MULTIPROCESSORS": "20"},
        """
        def launched():
            kinds = ("diagonal", "below", "factor")
            return [driver.emulator_launches_of(f"cholesky_{kind}".encode()) for kind in kinds]

        param, = parameters((460, 456))
        optimizer = oxidion.Dion([param], lr=1.0, adjust_lr=None, weight_decay=0.0, rank_fraction=450 / 456)
        start, before = launched(), param.detach().clone()
        optimizer.step()
        assert [now - then for now, then in zip(launched(), start)] == [16, 14, 3]
        update = (before - param.detach()).double()
        values = torch.linalg.svdvals(update)
        assert (values > 1e-3).sum() == 450, values
        """,
    )
