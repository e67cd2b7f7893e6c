"""Plans of softmax attention, forward and backward."""
