"""Plan time: pure functions over frozen values. No torch, no files, no ranks to talk to, no threads."""
