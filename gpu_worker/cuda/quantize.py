"""The device's twin of ``layout::quantize``: decode, swap-out and CPU-bound prefills share it."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_of(top):
    """fp32 scale of rows whose largest magnitude is ``top``."""
    return tl.div_rn(top, 127.0)


@triton.jit
def quantize(x, scale):
    """``x / scale`` to the nearest integer from -127 to 127, ties to even; ``scale``: of each row.

    Divides instead of multiplying by 1 / scale, which overflows where scale is subnormal.
    """
    by = tl.broadcast_to(tl.where(scale == 0.0, 1.0, scale)[:, None], x.shape)
    whole = (tl.div_rn(x, by) + 12582912.0) - 12582912.0  # exact below 2 ** 22
    return tl.minimum(tl.maximum(whole, -127.0), 127.0)
