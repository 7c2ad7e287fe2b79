"""Mirrors of the structures that kernels take, and arrays as the kernels see them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor


class Factor(ctypes.Structure):
    """A factor by value, or where it lives."""

    _fields_ = (("live", ctypes.c_void_p), ("value", ctypes.c_float))

    @classmethod
    def of(cls, value: float | Tensor) -> Factor:
        """By value, or read from a float32 tensor when the kernel runs."""
        return cls(value.data_ptr(), float("nan")) if isinstance(value, Tensor) else cls(None, value)


class MatrixBatch(ctypes.Structure):
    """Matrices by stride or by pointers."""

    _fields_ = (
        ("first", ctypes.c_void_p),
        ("each", ctypes.c_void_p),
        ("matrix_stride", ctypes.c_longlong),
        ("row_stride", ctypes.c_longlong),
    )

    @classmethod
    def strided(cls, matrices: Tensor) -> MatrixBatch:
        """A tensor [B, rows, cols] with contiguous rows."""
        return cls(matrices.data_ptr(), None, matrices.stride(0), matrices.stride(1))

    @classmethod
    def listed(cls, matrices: Tensor, order: Sequence[int]) -> tuple[MatrixBatch, Tensor]:
        """Matrices of a tensor in any order; the second value holds the pointers and has to live on."""
        pointers = torch.tensor([matrices[index].data_ptr() for index in order])
        return cls(None, pointers.data_ptr(), 0, matrices.stride(1)), pointers


class SymmetricProduct(ctypes.Structure):
    """Mirror of ``SymmetricProduct``."""

    _fields_ = (
        ("left", MatrixBatch),
        ("right", MatrixBatch),
        ("out", MatrixBatch),
        ("addend", MatrixBatch * 2),
        ("alpha", Factor),
        ("beta", Factor * 2),
        ("gamma", Factor),
        ("size", ctypes.c_int),
        ("depth", ctypes.c_int),
        ("tiles", ctypes.c_int),
    )
