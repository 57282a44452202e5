"""Matrix products with fixed weights, by the fastest kernel the device has.

On a CPU in fp32, torch's `F.linear` goes to MKL, which on two cores reads a weight at half the memory's speed for one
token and computes narrow batches at half the speed of oneDNN. So there one token runs as a batched product over slices
of the weight, and more tokens run in oneDNN over a copy of the weight in its own layout, as inductor does it.
`p99lab bench cpu` shows what that buys. On a GPU, `projection` has kernels for large weights and few tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Linear = Callable[[torch.Tensor], torch.Tensor]  # [T, in] -> [T, out], a new tensor

NUM_SLICES = 32  # of a weight in a product with one token; enough for any thread count, and no slower for two
MAX_PACKED_BYTES = 2 << 30  # a model whose copies would take more is not packed
MIN_LARGE_BYTES = 32 << 20  # on a GPU; smaller weights may stay in the 50 MiB of an H200's L2


def linear(weight: torch.Tensor, bias: torch.Tensor | None, pack: bool) -> Linear:
    """x @ weight.T + bias. weight: [out, in], bias: [out]."""
    return PackedLinear(weight, bias) if pack else PlainLinear(weight, bias)


def gated_linear(weight: torch.Tensor, bias: torch.Tensor | None, pack: bool) -> Linear:
    """silu(gate(x)) * up(x). weight: [2 * out, in], gate above up; bias: [2 * out]."""
    return PackedGatedLinear(weight, bias) if pack else PlainGatedLinear(weight, bias)


def can_pack(weight: torch.Tensor, num_bytes: int) -> bool:
    """Whether weights like this one, `num_bytes` of them in all, should be packed."""
    eligible = weight.device.type == "cpu" and weight.dtype == torch.float32 and num_bytes <= MAX_PACKED_BYTES
    return eligible and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def is_large(weight: torch.Tensor) -> bool:
    """Whether products of few tokens with this weight take as long as reading it, on a GPU, in 16 bits.

    Only where the kernels for them can run: one begins while the one before it ends, which Hopper was the first to do.
    """
    if not weight.is_cuda or torch.cuda.get_device_capability(weight.device) < (9, 0):
        return False
    return weight.element_size() == 2 and weight.nbytes >= MIN_LARGE_BYTES


class PlainLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


class PlainGatedLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias
        self._gate = silu_and_multiply
        if weight.device.type == "cuda":
            from p99lab.engine import kernels  # Triton, which comes with torch for CUDA

            self._gate = kernels.silu_and_multiply

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._gate(F.linear(x, self._weight, self._bias))


class PackedLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._slices = _slices(weight)
        self._packed = _packed(weight)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _product_of_one(x, self._slices, self._bias) if len(x) == 1 else _product(x, self._packed, self._bias)


class PackedGatedLinear:
    """Gate and up are packed apart, so that oneDNN applies silu to the gate while it is in registers."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._slices = _slices(weight)
        self._bias = bias
        self._gate, self._up = (_packed(half) for half in weight.chunk(2))
        gate_bias, up_bias = (None, None) if bias is None else bias.chunk(2)
        self._gate_bias: torch.Tensor | None = gate_bias
        self._up_bias: torch.Tensor | None = up_bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            return silu_and_multiply(_product_of_one(x, self._slices, self._bias))
        return _product(x, self._gate, self._gate_bias, "swish").mul_(_product(x, self._up, self._up_bias))


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up in the memory of gate. gate_up: [T, 2 * n]; returns [T, n], a view."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate, inplace=True).mul_(up)


def _slices(weight: torch.Tensor) -> torch.Tensor:
    """[slices, out / slices, in], a view: threads share a batch's products, but not the rows of a single one."""
    return weight.view(math.gcd(len(weight), NUM_SLICES), -1, weight.shape[1])


def _product_of_one(x: torch.Tensor, slices: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = torch.bmm(slices, x.t().expand(len(slices), -1, -1)).view(1, -1)
    return product if bias is None else product.add_(bias)


def _packed(weight: torch.Tensor) -> Any:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())


def _product(x: torch.Tensor, packed: Any, bias: torch.Tensor | None, activation: str = "none") -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, activation, [], "")
    return product
