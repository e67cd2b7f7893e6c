"""Parts of the kernels of linear attention: gates, decays, chunks of tokens, states."""
