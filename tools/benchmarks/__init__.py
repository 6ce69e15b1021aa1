"""What tools/benchmark.py is made of: contestants, the processes that they run in, and the figures."""
