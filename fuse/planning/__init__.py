"""What is known of a definition before it is called: its candidates and their cost, which is fastest, the module of one, its
proof."""
