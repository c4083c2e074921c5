"""The registry: the declared set of dimensions that keys are bound to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvprov.contract.dimension import Dimension, Half
from kvprov.contract.errors import ContractError, ErrorCode


class Registry:
    """An immutable set of dimensions, in an order of its own.

    The order in which dimensions were registered never matters: each half is kept by name in byte
    order, which is the order of the encoding. Names are unique across both halves.

    Args:
        dimensions: The entries.

    Raises:
        ContractError: `doubled_dimension`, when a name occurs twice.
    """

    __slots__ = ("_by_name", "request", "worker")

    def __init__(self, dimensions: Iterable[Dimension] = ()) -> None:
        by_name: dict[str, Dimension] = {}
        for dimension in dimensions:
            if dimension.name in by_name:
                raise ContractError(
                    ErrorCode.DOUBLED_DIMENSION,
                    dimension.name,
                    f"The dimension {dimension.name!r} is registered twice.",
                    "Remove one of the two, or give one of them a prefix of its own.",
                )
            by_name[dimension.name] = dimension
        # Names are ASCII, so the order of code points is the order of bytes.
        self._by_name = dict(sorted(by_name.items()))
        self.worker: tuple[str, ...] = self._names(Half.WORKER)
        self.request: tuple[str, ...] = self._names(Half.REQUEST)

    def _names(self, half: Half) -> tuple[str, ...]:
        return tuple(name for name, dimension in self._by_name.items() if dimension.half is half)

    def names(self, half: Half) -> tuple[str, ...]:
        """Return the names of one half, in byte order."""
        return self.worker if half is Half.WORKER else self.request

    def register(self, *dimensions: Dimension) -> Registry:
        """Return a registry that also has `dimensions`. Its keys differ from this one's: a new epoch."""
        return Registry([*self, *dimensions])

    def withhold(self, *names: str) -> Registry:
        """Return a registry without `names`, for experiments that show what a missing dimension reopens.

        Raises:
            ContractError: `unregistered_dimension`, when a name is not in this registry.
        """
        for name in names:
            self[name]
        return Registry(d for d in self if d.name not in names)

    def __getitem__(self, name: str) -> Dimension:
        try:
            return self._by_name[name]
        except KeyError:
            raise ContractError(
                ErrorCode.UNREGISTERED_DIMENSION,
                name,
                f"The dimension {name!r} is not registered.",
                f"Registered are: {', '.join(self._by_name) or 'none'}.",
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[Dimension]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Registry) and self._by_name == other._by_name

    def __hash__(self) -> int:
        return hash(tuple(self._by_name.values()))

    def __repr__(self) -> str:
        return f"Registry(worker={list(self.worker)}, request={list(self.request)})"
