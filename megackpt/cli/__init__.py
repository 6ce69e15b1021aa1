"""The command line: commands, reports and the shard map."""
