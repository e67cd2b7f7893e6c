"""What a token's row of a cache is: the latent, which is also the value of all heads; behind it what is rotated by place."""

LATENT, ROTARY = 512, 64
COLUMNS = LATENT + ROTARY
