"""Other libraries' signatures over our functions: change one import, and keep the call.

| instead of                                                 | import from             |
| ---------------------------------------------------------- | ----------------------- |
| flash_attn (FlashAttention-2)                              | compat.flash_attn       |
| flash_attn_interface (FlashAttention-3)                    | compat.flash_attn_interface |
| flash_attn.bert_padding                                    | compat.bert_padding         |
| flashinfer (batch wrappers: decode, prefill)               | compat.flashinfer       |
| torch.nn.functional (scaled_dot_product_attention)         | compat.sdpa             |
| torch.nn.attention.flex_attention                          | compat.flex             |
| fla.ops (flash-linear-attention's chunk_* functions)       | compat.fla              |
| transformers (attn_implementation, recurrent layers)       | compat.huggingface      |

Argument names, defaults and the order of axes are the other library's; frameworks, dtypes, devices and errors are those of
attention.forward, attention.linear and so on. Arguments that change no result, such as scheduling hints, are accepted and
ignored. An argument that is not supported raises NotImplementedError, which names it and says what to do instead. None of these
modules imports torch, except compat.huggingface, which imports transformers as well."""
