"""Ops that one family of attention kernels each was written for: online softmax, Based's Taylor features, the delta rule's
triangular inverse. They stay in ops/ because each has two meanings and a lowering as every op does, and knows no kernel."""
