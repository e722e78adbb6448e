"""Device code shared by the kernels: where a logical element stands in a strided tensor, and how a value is rounded."""

import triton
import triton.language as tl

__all__ = ["memory_position", "rounded"]


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """`value` in DTYPE as PyTorch casts: from fp64 to bf16 and fp16 by way of fp32."""
    if value.dtype == tl.float64 and value.dtype != DTYPE:
        value = value.to(tl.float32)
    return value.to(DTYPE)


@triton.jit
def memory_position(element, layout_ptr):
    """Memory positions, in elements, of the row-major logical elements `element` (int64 [N]).

    `layout_ptr` is one row of `addresses.Launch.layouts`. Worked example, a transposed (2, 3) tensor with strides
    (1, 2), row [2, 3, 2, 2, 1]: elements 0 1 2 3 4 5 stand at 0 2 4 1 3 5.
    """
    num_dims = tl.load(layout_ptr)
    if num_dims == 0:
        position = element
    else:
        position = element * 0
        dim = num_dims * 0
        while dim < num_dims:
            size = tl.load(layout_ptr + 1 + 2 * dim)
            stride = tl.load(layout_ptr + 2 + 2 * dim)
            position += (element % size) * stride
            element = element // size
            dim += 1
    return position
