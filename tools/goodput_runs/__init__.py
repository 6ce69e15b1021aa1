"""Goodput: a small training under a schedule of faults, and what each checkpoint library saves of it."""
