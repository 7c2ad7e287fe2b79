"""Operations as the extension declares them: the one list of their kernels, operands and scalars."""

from __future__ import annotations

from dataclasses import dataclass

from oxidion import _oxidion


@dataclass(frozen=True)
class Operation:
    """A kernel of an operation."""

    name: str
    operation: str
    family: str
    scalars: list[str]
    flags: list[bool]
    follows_rate: list[bool]
    operands: list[str]
    reads: list[bool]
    writes: list[bool]
    contents: list[str]
    encoded: bool

    def arguments(self, values: dict[str, float]) -> tuple[float, ...]:
        """Scalars by name in the order in which the kernel gets them.

        Raises:
            TypeError: where the names are others.
        """
        if set(values) != set(self.scalars):
            raise TypeError(f"{self.name}: expected the scalars {self.scalars}, got {sorted(values)}")
        return tuple(float(values[name]) for name in self.scalars)

    def written(self) -> tuple[int, ...]:
        """Numbers of the operands that are written."""
        return tuple(n for n, writes in enumerate(self.writes) if writes)


OPERATIONS = {each["name"]: Operation(**each) for each in _oxidion.device_kernels()}


def names(family: str, *, encoded: bool = False) -> list[str]:
    """Kernels of a pass; those that also take operands that are more than numbers of their type."""
    return [
        each.name for each in OPERATIONS.values() if each.family == family and (each.encoded or not encoded)
    ]
