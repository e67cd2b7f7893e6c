"""Other libraries' signatures over our functions: change one import, and keep the call.

| instead of                                                 | import from             |
| ---------------------------------------------------------- | ----------------------- |
| flash_attn (FlashAttention-2)                              | compat.flash_attn       |
| flash_attn_interface (FlashAttention-3)                    | compat.flash_attn_interface |
| flash_attn.bert_padding                                    | compat.bert_padding         |
| flashinfer (wrappers of batches: decode, prefill)          | compat.flashinfer       |
| torch.nn.functional (scaled_dot_product_attention)         | compat.sdpa             |
| torch.nn.attention.flex_attention                          | compat.flex             |
| fla.ops (flash-linear-attention's chunk_* functions)       | compat.fla              |
| transformers (attn_implementation, recurrent layers)       | compat.huggingface      |

Each is a table: names, defaults and the order of axes are theirs; arrays of any framework, dtypes, devices and errors are
those of attention.forward, attention.linear and so on. What changes no result, such as a hint for a scheduler, is taken and not
used. What cannot be served raises NotImplementedError that names the argument and says what to do. Nothing here imports torch,
but compat.huggingface, which imports transformers, too.
"""
