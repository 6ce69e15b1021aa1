"""The commands, one file each, and how their answers reach people. Nothing here knows how a command is called."""
