"""Mirrors of the structures that kernels take, and arrays as the kernels see them."""

from __future__ import annotations

import ctypes

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
    def listed(cls, matrices: Tensor) -> tuple[MatrixBatch, Tensor]:
        """The same by a pointer to each; the second value holds the pointers and has to live on."""
        pointers = torch.tensor([matrix.data_ptr() for matrix in matrices])
        return cls(None, pointers.data_ptr(), 0, matrices.stride(1)), pointers


class SymmetricTerms(ctypes.Structure):
    """Mirror of ``SymmetricTerms``."""

    _fields_ = (
        ("addend", MatrixBatch * 2),
        ("alpha", Factor),
        ("beta", Factor * 2),
        ("gamma", Factor),
    )


class SymmetricProduct(ctypes.Structure):
    """Mirror of ``SymmetricProduct``."""

    _fields_ = (
        ("left", MatrixBatch),
        ("right", MatrixBatch),
        ("out", MatrixBatch),
        ("terms", SymmetricTerms),
        ("size", ctypes.c_int),
        ("depth", ctypes.c_int),
        ("tiles", ctypes.c_int),
        ("parts", ctypes.c_int),
        ("partial", ctypes.c_void_p),
    )


class TensorMap(ctypes.Structure):
    """What the emulator keeps in a tensor map: extents and steps in elements, innermost first."""

    _fields_ = (
        ("start", ctypes.c_void_p),
        ("extent", ctypes.c_int64 * 3),
        ("step", ctypes.c_int64 * 3),
        ("box", ctypes.c_int32 * 2),
        ("rest", ctypes.c_byte * 64),
    )

    @classmethod
    def of(cls, matrices: Tensor, box_rows: int, box_cols: int) -> TensorMap:
        """A map of [B, rows, cols]; boxes lie in one matrix."""
        extent, step = (tuple(reversed(values)) for values in (matrices.shape, matrices.stride()))
        three = ctypes.c_int64 * 3
        return cls(
            matrices.data_ptr(), three(*extent), three(*step), (ctypes.c_int32 * 2)(box_cols, box_rows)
        )

    @classmethod
    def array(cls, matrices: Tensor, box_rows: int, box_cols: int) -> ctypes.Array[TensorMap]:
        """One map for each matrix of [B, rows, cols]."""
        single = [cls.of(matrices[z : z + 1], box_rows, box_cols) for z in range(len(matrices))]
        return (cls * len(single))(*single)


class SymmetricTensorProduct(ctypes.Structure):
    """Mirror of ``SymmetricTensorProduct``."""

    _fields_ = (
        ("left", TensorMap),
        ("right", TensorMap),
        ("out", TensorMap),
        ("left_each", ctypes.c_void_p),
        ("right_each", ctypes.c_void_p),
        ("out_each", ctypes.c_void_p),
        ("terms", SymmetricTerms),
        ("size", ctypes.c_int),
        ("depth", ctypes.c_int),
        ("pairs", ctypes.c_int),
        ("batch", ctypes.c_int),
        ("rest", ctypes.c_byte * 88),  # up to the alignment of a tensor map
    )


class PanelStatus(ctypes.Structure):
    """Mirror of ``PanelStatus``."""

    _fields_ = (("info", ctypes.c_int), ("ratio", ctypes.c_float))


class Selection(ctypes.Structure):
    """Mirror of ``Selection``."""

    _fields_ = (("status", ctypes.c_void_p), ("threshold", ctypes.c_float), ("which", ctypes.c_int))


class GramProduct(ctypes.Structure):
    """Mirror of ``GramProduct``."""

    _fields_ = (
        ("panel", MatrixBatch),
        ("gram", ctypes.c_void_p),
        ("selection", Selection),
        ("rows", ctypes.c_int),
        ("cols", ctypes.c_int),
        ("tiles", ctypes.c_int),
        ("parts", ctypes.c_int),
    )


class CholeskyFactor(ctypes.Structure):
    """Mirror of ``CholeskyFactor``."""

    _fields_ = (
        ("gram", ctypes.c_void_p),
        ("factor", ctypes.c_void_p),
        ("inverses", ctypes.c_void_p),
        ("status", ctypes.c_void_p),
        ("selection", Selection),
        ("shift", Factor),
        ("left_out", ctypes.c_float),
        ("size", ctypes.c_int),
        ("parts", ctypes.c_int),
        ("column", ctypes.c_int),
    )


class CholeskySolve(ctypes.Structure):
    """Mirror of ``CholeskySolve``."""

    _fields_ = (
        ("panel", MatrixBatch),
        ("out", MatrixBatch),
        ("factor", ctypes.c_void_p),
        ("inverses", ctypes.c_void_p),
        ("status", ctypes.c_void_p),
        ("selection", Selection),
        ("rows", ctypes.c_int),
        ("cols", ctypes.c_int),
        ("tiles", ctypes.c_int),
    )
