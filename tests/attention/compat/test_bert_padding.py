"""attention/compat/bert_padding.py: unpadding and padding are inverse, for values and for gradients."""

import pytest

torch = pytest.importorskip("torch")

from attention.compat.bert_padding import index_first_axis, pad_input, unpad_input  # noqa: E402
from attention.compat.flash_attn import flash_attn_varlen_func  # noqa: E402

MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]])


def test_there_and_back():
    x = torch.randn(3, 5, 2, 4, requires_grad=True)
    packed, indices, ends, longest, used = unpad_input(x, MASK)
    assert ends.tolist() == [0, 3, 3, 7] and ends.dtype == torch.int32 and longest == 4 and used.tolist() == [3, 0, 4]
    assert (packed == x[MASK.bool()]).all() and (index_first_axis(x.flatten(0, 1), indices) == packed).all()
    back = pad_input(packed, indices, 3, 5)
    assert (back == x * MASK[..., None, None]).all()
    back.sum().backward()
    assert (x.grad == MASK[..., None, None]).all()


def test_room_that_is_not_used():
    x, unused = torch.randn(3, 5, 2), torch.zeros_like(MASK)
    unused[1, 0] = 1
    packed, indices, ends, longest, used = unpad_input(x, MASK, unused)
    assert ends.tolist() == [0, 3, 4, 8] and used.tolist() == [3, 0, 4] and indices[3] == 5 and longest == 4
    assert (packed[3] == x[1, 0]).all()


def test_with_attention():
    """Attention of packed sequences equals attention of each sequence alone."""
    q = torch.randn(3, 5, 1, 16).bfloat16()
    packed, indices, ends, longest, _ = unpad_input(q, MASK)
    out = pad_input(flash_attn_varlen_func(packed, packed, packed, ends, ends, longest, longest), indices, 3, 5)
    for sequence, seen, actual in zip(q, MASK.bool(), out):
        rows = sequence[seen].double().swapaxes(0, 1)
        expected = torch.nn.functional.scaled_dot_product_attention(rows, rows, rows).swapaxes(0, 1)
        torch.testing.assert_close(actual[seen].double(), expected, atol=0.02, rtol=0.02)
        assert not actual[~seen].any()


def test_masks_of_another_shape():
    for masks, name in (((MASK[:2],), "attention_mask"), ((MASK, MASK.T), "unused_mask")):
        with pytest.raises(ValueError, match=rf"^{name}: must be \(batch, seqlen\) of hidden_states, \(3, 5\)"):
            unpad_input(torch.zeros(3, 5, 8), *masks)
