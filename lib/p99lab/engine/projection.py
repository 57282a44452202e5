"""The products of a decoder layer, each with the norm before it or the residual sum after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from p99lab.engine.linear import Linear, gated_linear, is_large, linear
from p99lab.engine.norm import add_norm_for


@dataclass(frozen=True, slots=True)
class Norm:
    """A root-mean-square norm; weight: [hidden]."""

    weight: torch.Tensor
    eps: float


class Projection(Protocol):
    """x @ weight.T + bias, or silu(gate(x)) * up(x), between the residual stream and what a layer computes from it."""

    def of_norm(self, residual: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> torch.Tensor:
        """Add delta, if there is one, to the residual stream in place, and project the sum's norm.

        residual, delta: [T, hidden]. Returns [T, out], new.
        """
        ...

    def onto(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """Project x: [T, in] and add it to the residual stream, [T, out], in place.

        Returns what is left to be added: the projection itself, or None.
        """
        ...


def projection(weight: torch.Tensor, bias: torch.Tensor | None, pack: bool, gated: bool = False) -> Projection:
    """The fastest on the weight's device.

    Args:
        weight: [out, in]; if gated [2 * out, in], gate above up.
        bias: as long as the weight, or None.
        pack: see `can_pack`.
    """
    product = gated_linear(weight, bias, pack) if gated else linear(weight, bias, pack)
    separate = Separate(product, weight.device)
    return Thin(weight, bias, gated, separate) if is_large(weight) else separate


class Separate:
    """Norm and residual sum are one launch, the product is another."""

    def __init__(self, product: Linear, device: torch.device) -> None:
        self._product = product
        self._add_norm = add_norm_for(device)

    def of_norm(self, residual: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> torch.Tensor:
        return self._product(self._add_norm(residual, delta, norm.weight, norm.eps))

    def onto(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        return self._product(x)


class Thin:
    """One launch for few tokens, with the sum after it and, where that pays, the norm before it; else `separate`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool, separate: Projection) -> None:
        from p99lab.engine.thin_linear import ThinProduct  # Triton, which comes with torch for CUDA

        self._product, self._separate = ThinProduct(weight, bias, gated), separate
        self._add_norm = add_norm_for(weight.device)

    def of_norm(self, residual: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> torch.Tensor:
        if not self._product.takes(len(residual)):
            return self._separate.of_norm(residual, delta, norm)
        if delta is None and self._product.takes_norm(len(residual)):
            return self._product(residual, norm.weight, norm.eps)
        return self._product(self._add_norm(residual, delta, norm.weight, norm.eps))

    def onto(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        if not self._product.takes(len(x)):
            return self._separate.onto(residual, x)
        self._product(x, residual=residual)
        return None
