"""Templates of row maps: elementwise maps, sums and maxima of rows. row_map.py chooses the form by the rows' width."""
