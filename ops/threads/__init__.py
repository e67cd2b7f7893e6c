"""Who works together: the four lanes of a quad, the warps of a warpgroup or block, several warpgroups. They meet, exchange
registers and take turns; what they compute is in the rooms above."""
