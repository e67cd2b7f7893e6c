"""Plans of the delta rule, with decays of tokens and of channels (KDA)."""
