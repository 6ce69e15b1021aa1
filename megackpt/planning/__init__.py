"""Planning: pure functions over frozen values, without torch, I/O, communication or threads."""
