"""The columns of a cache's row: the latent, which is the value of all heads, then the columns that are rotated by position."""

LATENT, ROTARY = 512, 64
COLUMNS = LATENT + ROTARY
