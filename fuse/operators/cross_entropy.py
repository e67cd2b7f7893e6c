"""A projection to a vocabulary, and the cross entropy of its softmax."""

from tiles import fp32

from ..calls.fused import kernel
from ..language.functions import cast, exp, log, max, pick, sum


@kernel
def linear_cross_entropy(x, w, target):
    """-log(softmax(x @ w)[target]) of each row, and log(sum(exp(x @ w))): (loss, lse), both float32, one column. x (..., K),
    w (K, N), target (M,) of int64 or int32, one for each row of x. Where a target is negative (to be ignored), loss is lse."""
    logits = x @ w
    greatest = max(logits)
    lse = log(sum(exp(logits - greatest))) + greatest
    return cast(lse - pick(logits, target), fp32), cast(lse, fp32)
