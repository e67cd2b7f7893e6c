"""What writes kernels for terms: a class that finds its form in a term, says what it costs, and gives the kernel's lines. Here
are those that call `attention`; rows/ and products/ have kernels of their own."""
