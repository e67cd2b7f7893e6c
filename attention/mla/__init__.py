"""Attention over latents, of which keys and values are made: DeepSeek's multi-head latent attention, as it decodes."""
