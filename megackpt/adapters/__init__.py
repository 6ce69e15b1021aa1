"""Other people's words into ours: what nn.Modules and optimizers hold, declared as shards."""
