"""The laws of a format, in three rooms (writing, reading, faults) over a harness that saves and loads small worlds."""
