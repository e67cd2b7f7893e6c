"""Plans of linear attention, GLA, Mamba-2, Based and Hedgehog, and what all of the recurrent family checks and shares."""
